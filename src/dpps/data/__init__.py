"""Named data sets, from the embedded mnist-mini to CIFAR-10, and their splits over the nodes."""

from dpps.data.catalog import folder_beside, load
from dpps.data.dataset import DataSet, Images
from dpps.data.features import FeatureSet
from dpps.data.frames import image_dataset, table_dataset
from dpps.data.images import ImageSchema
from dpps.data.recipe import DATA_SETS, Layout, Recipe, Source
from dpps.data.schema import Schema, read_schema
from dpps.data.splits import FORMS, describe, hold_out, split

__all__ = [
    "DATA_SETS",
    "FORMS",
    "DataSet",
    "FeatureSet",
    "ImageSchema",
    "Images",
    "Layout",
    "Recipe",
    "Schema",
    "Source",
    "describe",
    "folder_beside",
    "hold_out",
    "image_dataset",
    "load",
    "read_schema",
    "split",
    "table_dataset",
]
