"""Fabrics: where the nodes' rows are, and how they are exchanged."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.transport.base import (
        Arrived,
        Bound,
        Exchange,
        Fabric,
        Link,
        Stacked,
        average,
        combine,
        synchronised,
    )
    from dpps.transport.cluster import (
        SECRET,
        Cluster,
        Rendezvous,
        read_secret,
        restarted,
        started_distributed,
    )
    from dpps.transport.distributed import ROWS, SMALL, Distributed, Message, blocks, rounds_until_heard
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
