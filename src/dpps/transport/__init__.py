"""Where the rows live, and how they reach each other."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.transport.base import (
        Alone,
        Arrived,
        Bound,
        Control,
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
        Identity,
        Listener,
        Rendezvous,
        Report,
        SignedStore,
        address_towards,
        all_said,
        cannot_reach,
        check_secret,
        decoded,
        digest,
        make_secret,
        printable,
        read_secret,
        restarted,
        same_facts,
        started_distributed,
        understood,
        unreachable,
        unreached,
        verdict,
        wait_for,
    )
    from dpps.transport.distributed import Distributed, Route, blocks, rounds_until_heard
    from dpps.transport.wire import CLOSED, HEADER_SIZE, ROWS, SMALL, SPREAD, Message, Wire, check_header

__getattr__, __dir__, __all__ = lazy_imports(__name__)
