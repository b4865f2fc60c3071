"""Learning on top of the protocol: algorithms, partition, sampling, evaluation."""

from dpps.learning.gradient_tracking import GradientTracking
from dpps.learning.partition import Partition
from dpps.learning.partpsp import PartPSP
from dpps.learning.pedfl import PEDFL
from dpps.learning.sgp import SGP
from dpps.learning.sgpdp import SGPDP

__all__ = ["PEDFL", "SGP", "SGPDP", "GradientTracking", "PartPSP", "Partition"]
