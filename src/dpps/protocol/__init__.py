"""DPPS, Algorithm 1 of the paper: what a round does, the state it changes, and what is refused."""

from dpps.protocol.algorithm import DPPS
from dpps.protocol.state import Message, RoundRecord, State

__all__ = ["DPPS", "Message", "RoundRecord", "State"]
