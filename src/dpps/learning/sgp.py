"""SGP (Assran et al. 2019), a baseline of the paper: the whole model is shared, and nothing is noised."""

from dpps.learning.algorithm import ALGORITHMS
from dpps.learning.partpsp import PartPSP


@ALGORITHMS.register("sgp")
class SGP(PartPSP):
    """Stochastic gradient push: PartPSP with everything shared and without noise."""

    noisy = False
    shares_all = True
