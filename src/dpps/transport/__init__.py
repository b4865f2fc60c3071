"""Where the rows live, and how they reach each other."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.transport.base import Arrived, Exchange, Fabric, Link, average, combine, synchronised
    from dpps.transport.blame import CLOSED, Report, all_said, cannot_reach, printable, verdict
    from dpps.transport.bound import Bound
    from dpps.transport.cluster import Cluster
    from dpps.transport.control import Alone, Control, rounds_until_heard
    from dpps.transport.distributed import Distributed
    from dpps.transport.header import HEADER_SIZE, check_header
    from dpps.transport.hello import decoded, same_facts, understood, unreached
    from dpps.transport.reach import Listener, unreachable
    from dpps.transport.rendezvous import (
        Rendezvous,
        address_towards,
        free_port,
        restarted,
        started_distributed,
        wait_for,
    )
    from dpps.transport.routes import Route, blocks
    from dpps.transport.secret import (
        SECRET,
        Identity,
        SignedStore,
        check_secret,
        digest,
        make_secret,
        read_secret,
    )
    from dpps.transport.stacked import Stacked
    from dpps.transport.wire import ROWS, SMALL, SPREAD, Message, Wire

__all__ = [
    "CLOSED",
    "HEADER_SIZE",
    "ROWS",
    "SECRET",
    "SMALL",
    "SPREAD",
    "Alone",
    "Arrived",
    "Bound",
    "Cluster",
    "Control",
    "Distributed",
    "Exchange",
    "Fabric",
    "Identity",
    "Link",
    "Listener",
    "Message",
    "Rendezvous",
    "Report",
    "Route",
    "SignedStore",
    "Stacked",
    "Wire",
    "address_towards",
    "all_said",
    "average",
    "blocks",
    "cannot_reach",
    "check_header",
    "check_secret",
    "combine",
    "decoded",
    "digest",
    "free_port",
    "make_secret",
    "printable",
    "read_secret",
    "restarted",
    "rounds_until_heard",
    "same_facts",
    "started_distributed",
    "synchronised",
    "understood",
    "unreachable",
    "unreached",
    "verdict",
    "wait_for",
]
__getattr__, __dir__ = lazy_imports(__name__)
