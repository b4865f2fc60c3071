"""Named data sets, from the embedded mnist-mini to CIFAR-10."""

from dpps.data.catalog import NAMES, DataSet, Images, load

__all__ = ["NAMES", "DataSet", "Images", "load"]
