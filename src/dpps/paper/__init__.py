"""Reproduces the tables and figures of the paper, next to the published numbers."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.paper.convergence import Constants, Problem, Rates
    from dpps.paper.pages import Page, Spread, Table, spread, text
    from dpps.paper.runner import (
        Cell,
        Pool,
        Store,
        cores,
        dataset_of,
        identity,
        mean_real,
        prepare,
        rounds_above,
        run,
    )
    from dpps.paper.tables import EXPERIMENTS, MODELS, SEEDS, Scope, paper_cell
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
