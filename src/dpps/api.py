"""The public names of the package. `import dpps` loads this file when one of them is first used."""

from dpps import data, features, models, tasks
from dpps.errors import DppsError, RunError, UsageError
from dpps.learning import PEDFL, SGP, SGPDP, GradientTracking, PartPSP
from dpps.learning.gradients.calling import ModelLoss
from dpps.learning.released import Adam, Momentum
from dpps.noise.mechanisms import Gaussian, Laplace, Mechanism, NoNoise
from dpps.noise.source import NoiseSource, Seeded
from dpps.privacy.accountant import Charge, label, total
from dpps.privacy.partners import Nobody, Pairs
from dpps.privacy.units import Contribution, NodeSwap, Record
from dpps.protocol import DPPS, State
from dpps.runs.deployment import Simulation
from dpps.runs.run import Run
from dpps.runs.saved_models import load
from dpps.runs.torch_distributed import TorchDistributed
from dpps.sensitivity import Bounded, Certified, Oracle, Paper, Sensitivity, WorstCase
from dpps.statistics.release import stats
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
from dpps.transport import Stacked
from dpps.version import __version__

__all__ = [
    "DPPS", "PEDFL", "SGP", "SGPDP", "Adam", "Base", "Bounded", "Certified", "Charge", "Complete",
    "Contribution", "DOut", "DppsError", "Exponential", "Gaussian", "GradientTracking", "Laplace",
    "Mechanism", "ModelLoss", "Momentum", "NoNoise", "Nobody", "NodeSwap", "NoiseSource", "OnePeerRandom",
    "Oracle", "Pairs", "Paper", "PartPSP", "Record", "Ring", "Run", "RunError", "Seeded", "Sensitivity",
    "Sequence", "Simulation", "Stacked", "State", "Static", "Topology", "TorchDistributed", "UsageError",
    "WorstCase", "__version__", "data", "features", "from_networkx", "label", "load", "models", "stats",
    "tasks", "total",
]  # fmt: skip
