"""Attacks on the code and on the data: they may import everything."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.audit.absences import absence_cases
    from dpps.audit.attacks import Finding, Progress, attack, audit, work
    from dpps.audit.bounds import ALPHA, Bound, certifiable, clopper_pearson, epsilon_lower
    from dpps.audit.cases import CLAIM, Case, LocalRecordCase, NoiseNormCase
    from dpps.audit.coalition import Observer, PairsCase, coalition_cases
    from dpps.audit.inversion import invert
    from dpps.audit.mean import MeanFinding, WrongSign, audit_mean, mean_variance
    from dpps.audit.pictures import check_picture, draw
    from dpps.audit.reconstruction import (
        DELTA,
        LARGEST_VALUE,
        Attack,
        Knowledge,
        Listener,
        Outcome,
        reconstruct,
    )
    from dpps.audit.wiretap import Joined, Weakened, Wiretap, weakened

__getattr__, __dir__, __all__ = lazy_imports(__name__)
