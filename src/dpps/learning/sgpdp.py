"""SGPDP, a baseline of the paper: SGP with the protocol's noise."""

from dpps.learning.algorithm import ALGORITHMS
from dpps.learning.partpsp import PartPSP


@ALGORITHMS.register("sgpdp")
class SGPDP(PartPSP):
    """Differentially private stochastic gradient push: PartPSP with everything shared."""

    shares_all = True
