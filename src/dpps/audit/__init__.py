"""Attacks on the code and on the data. This package may import all others."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.audit.epsilon import (
        ALPHA,
        CLAIM,
        ENOUGH,
        LEAST,
        Bound,
        Case,
        Finding,
        Progress,
        Wiretap,
        attack,
        audit,
        cases,
        certifiable,
        clopper_pearson,
        epsilon_lower,
        weakened,
        work,
    )
    from dpps.audit.leaks import (
        Attack,
        Knowledge,
        Outcome,
        check_picture,
        draw_inversion,
        draw_reconstruction,
        invert,
        reconstruct,
    )
    from dpps.audit.pairs import MeanFinding, audit_mean, member_cases, pair_cases
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
