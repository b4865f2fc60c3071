"""Named data sets, from the embedded mnist-mini to CIFAR-10, and their splits over the nodes."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.data.cache import user_cache
    from dpps.data.catalog import folder_beside, load, obtain
    from dpps.data.dataset import DataSet, Images
    from dpps.data.encoding import encode, encode_inputs
    from dpps.data.features import FeatureSet
    from dpps.data.fetch import one_at_a_time
    from dpps.data.formats import CIFAR_RECORD, UBYTE, Bytes, parse_cifar, parse_idx, read_raw, unpack
    from dpps.data.frames import image_dataset, table_dataset
    from dpps.data.guessing import guess_schema, rounded_range
    from dpps.data.images import (
        ImageSchema,
        guess_image_schema,
        image_files,
        labelled_images,
        parse_image_schema,
        unlabelled_images,
    )
    from dpps.data.node_files import (
        NodeFiles,
        check_headers,
        hold_out_own,
        node_folder,
        read_examples,
        read_node,
    )
    from dpps.data.recipe import DATA_SETS, Layout, Recipe, Source
    from dpps.data.schema import Column, Schema, canonical, parse_any, parse_schema, read_schema
    from dpps.data.sets.cifar_10 import ARCHIVE, read_cifar_files
    from dpps.data.sets.mnist import IDX, idx_sources, read_idx_files
    from dpps.data.splits import FORMS, describe, hold_out, split
    from dpps.data.table import as_number, read_table

__getattr__, __dir__, __all__ = lazy_imports(__name__)
