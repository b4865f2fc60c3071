"""Tasks: classification, regression and survival, with their targets, losses, metrics and predictions."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.tasks.classification import Classification
    from dpps.tasks.estimates import Estimate, Estimates, Measured
    from dpps.tasks.metrics import METRICS, ClassRow, Metric, by_name, per_class, rehearse
    from dpps.tasks.regression import Regression
    from dpps.tasks.survival import Hazards, Survival
    from dpps.tasks.task import (
        TASKS,
        Column,
        Draft,
        Task,
        compare,
        measure,
        parse_target,
        rounded_range,
    )
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
