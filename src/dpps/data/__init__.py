"""Named data sets, from the embedded mnist-mini to CIFAR-10, tables and images of one's own, and splits over the nodes."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.data.catalog import (
        DATA_SETS,
        Bytes,
        Layout,
        Recipe,
        Source,
        folder_beside,
        load,
        obtain,
        one_at_a_time,
        parsed,
        user_cache,
    )
    from dpps.data.dataset import DataSet, FeatureSet, Images
    from dpps.data.images import (
        guess_image_schema,
        image_dataset,
        image_files,
        labelled_images,
        unlabelled_images,
    )
    from dpps.data.node_files import NodeFiles, check_headers, node_folder, read_examples, read_node
    from dpps.data.schema import (
        Column,
        ImageSchema,
        Schema,
        encode,
        encode_inputs,
        guess_schema,
        parse_schema,
        read_schema,
        table_dataset,
    )
    from dpps.data.splits import describe, hold_out, hold_out_own, split
    from dpps.data.tables import Table, read_table
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
