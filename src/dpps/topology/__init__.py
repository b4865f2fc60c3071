"""Who sends to whom in round t, with which weights; validation (double stochasticity, connectivity)."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.topology.analysis import FORMATS, Report, draw
    from dpps.topology.base import KEPT_ROUNDS, TOPOLOGIES, Topology, Weights, parse
    from dpps.topology.base_graph import Base
    from dpps.topology.families import (
        Complete,
        DOut,
        Exponential,
        OnePeerRandom,
        Ring,
        Sequence,
        Static,
        from_networkx,
    )
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
