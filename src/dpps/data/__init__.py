"""Named data sets, from the embedded mnist-mini to CIFAR-10, and their splits over the nodes."""

from dpps.data.catalog import NAMES, DataSet, Images, load
from dpps.data.splits import FORMS, describe, hold_out, split

__all__ = ["FORMS", "NAMES", "DataSet", "Images", "describe", "hold_out", "load", "split"]
