"""Where the rows live, and how they reach each other."""

from dpps.transport.base import Arrived, Exchange, Fabric, Link
from dpps.transport.control import Alone, Control
from dpps.transport.distributed import Distributed
from dpps.transport.stacked import Stacked

__all__ = ["Alone", "Arrived", "Control", "Distributed", "Exchange", "Fabric", "Link", "Stacked"]
