"""Who sends to whom in round t, with which weights; validation (double stochasticity, connectivity)."""

from dpps.topology.analysis import Report
from dpps.topology.base import TOPOLOGIES, Topology, parse
from dpps.topology.base_graph import Base
from dpps.topology.families import (
    Complete,
    DOut,
    Exponential,
    OnePeerRandom,
    Ring,
    Sequence,
    Static,
    from_networkx,
)
from dpps.topology.weights import Weights

__all__ = [
    "TOPOLOGIES",
    "Base",
    "Complete",
    "DOut",
    "Exponential",
    "OnePeerRandom",
    "Report",
    "Ring",
    "Sequence",
    "Static",
    "Topology",
    "Weights",
    "from_networkx",
    "parse",
]
