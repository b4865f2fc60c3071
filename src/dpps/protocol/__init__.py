"""DPPS, Algorithm 1 of the paper: what a round does, the state it changes, and what is refused."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.protocol.dpps import DPPS, Message, RoundRecord, State
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
