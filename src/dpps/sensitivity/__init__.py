"""How far apart two messages of a round can be: what the noise is calibrated to."""

from dpps.sensitivity.base import Look, Memory, Outcome, Sensitivity, Setting, real_sensitivity
from dpps.sensitivity.bounded import Bounded
from dpps.sensitivity.certified import Certified, WorstCase
from dpps.sensitivity.paper import Oracle, Paper

__all__ = [
    "Bounded",
    "Certified",
    "Look",
    "Memory",
    "Oracle",
    "Outcome",
    "Paper",
    "Sensitivity",
    "Setting",
    "WorstCase",
    "real_sensitivity",
]
