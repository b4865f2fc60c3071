"""Every table and figure of the paper, computed again and laid beside the published numbers: one short file each."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.paper.cells import Cell, mean_real, rounds_above, run
    from dpps.paper.convergence import SIGMA
    from dpps.paper.pages import Page, Spread, Table, spread, text
    from dpps.paper.scheduler import Scheduler, Store, cores
    from dpps.paper.scope import MODELS, SEEDS, Scope
    from dpps.paper.theorem2 import Constants, Problem, Rates

__getattr__, __dir__, __all__ = lazy_imports(__name__)
