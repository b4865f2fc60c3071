"""Learning on top of the protocol."""

from dpps.learning.partition import Partition
from dpps.learning.partpsp import Learner, PartPSP
from dpps.learning.training import RoundLog, Run, Stopped, Training

__all__ = ["Learner", "PartPSP", "Partition", "RoundLog", "Run", "Stopped", "Training"]
