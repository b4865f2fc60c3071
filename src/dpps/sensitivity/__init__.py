"""Sensitivity: how far apart two messages of a round can be. The noise is calibrated to it."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.sensitivity.base import (
        SENSITIVITIES,
        Bounded,
        Known,
        Memory,
        ProtocolConfig,
        Released,
        RoundView,
        Sensitivity,
        Unclipped,
        real_sensitivity,
    )
    from dpps.sensitivity.certified import WINDOW, Certified, coefficients, mean_abs, noise_factor
    from dpps.sensitivity.paper import Oracle, Paper, WorstCase
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
