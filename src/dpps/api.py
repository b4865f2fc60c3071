"""The names of the package, in one place. `import dpps` loads this file when one of them is first asked for."""

from dpps import data, models
from dpps.errors import DppsError, RunError, UsageError
from dpps.fabric import Stacked
from dpps.learning import PartPSP, Run, Stopped
from dpps.mechanisms import Gaussian, Laplace, Mechanism, NoNoise
from dpps.noise import NoiseSource, Seeded
from dpps.privacy.accountant import Charge, label, total
from dpps.privacy.units import Contribution, NodeSwap, Record
from dpps.protocol import DPPS, State
from dpps.sensitivity import Bounded, Certified, Oracle, Paper, Sensitivity, WorstCase
from dpps.topology import (
    Base,
    Complete,
    DOut,
    Exponential,
    OnePeerRandom,
    Ring,
    Sequence,
    Static,
    Topology,
    from_networkx,
)
from dpps.version import __version__

__all__ = [
    "DPPS",
    "Base",
    "Bounded",
    "Certified",
    "Charge",
    "Complete",
    "Contribution",
    "DOut",
    "DppsError",
    "Exponential",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "NoNoise",
    "NodeSwap",
    "NoiseSource",
    "OnePeerRandom",
    "Oracle",
    "Paper",
    "PartPSP",
    "Record",
    "Ring",
    "Run",
    "RunError",
    "Seeded",
    "Sensitivity",
    "Sequence",
    "Stacked",
    "State",
    "Static",
    "Stopped",
    "Topology",
    "UsageError",
    "WorstCase",
    "__version__",
    "data",
    "from_networkx",
    "label",
    "models",
    "total",
]
