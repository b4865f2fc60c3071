"""How far apart two messages of a round can be: what the noise is calibrated to."""

from dpps.sensitivity.base import (
    SENSITIVITIES,
    Memory,
    ProtocolConfig,
    Released,
    RoundView,
    Sensitivity,
    real_sensitivity,
)
from dpps.sensitivity.bounded import Bounded, Known, Unclipped
from dpps.sensitivity.certified import Certified, WorstCase
from dpps.sensitivity.paper import Oracle, Paper

__all__ = [
    "SENSITIVITIES",
    "Bounded",
    "Certified",
    "Known",
    "Memory",
    "Oracle",
    "Paper",
    "ProtocolConfig",
    "Released",
    "RoundView",
    "Sensitivity",
    "Unclipped",
    "WorstCase",
    "real_sensitivity",
]
