"""Topologies by name, for the command line."""

import re
from collections.abc import Callable

from dpps.errors import unknown
from dpps.topology.base import Topology
from dpps.topology.base_graph import Base
from dpps.topology.families import Complete, DOut, Exponential, OnePeerRandom, Ring

NAMES = ("exp", "K-out", "ring", "complete", "base-K", "random")
"""What ``parse`` understands; K stands for a number."""

_PLAIN: dict[str, Callable[[int], Topology]] = {
    "exp": Exponential,
    "ring": Ring,
    "complete": Complete,
    "random": OnePeerRandom,
}


def parse(text: str, nodes: int) -> Topology:
    """The topology called ``text`` on ``nodes`` nodes, such as ``exp``, ``4-out`` or ``base-2``."""
    if text in _PLAIN:
        return _PLAIN[text](nodes)
    if match := re.fullmatch(r"([0-9]+)-out", text):
        return DOut(nodes, int(match[1]))
    if match := re.fullmatch(r"base-([0-9]+)", text):
        return Base(nodes, int(match[1]))
    raise unknown("topology", text, NAMES)
