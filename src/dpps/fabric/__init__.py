"""Where the rows live."""

from dpps.fabric.base import Fabric
from dpps.fabric.distributed import Distributed
from dpps.fabric.stacked import Stacked

__all__ = ["Distributed", "Fabric", "Stacked"]
