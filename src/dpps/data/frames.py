"""Data of one's own in Python: files, data frames and folders of images become data sets by a schema."""

from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

from dpps.data.encoding import encode
from dpps.data.images import ImageSchema, labelled_images
from dpps.data.schema import Schema, read_schema
from dpps.data.table import Table, as_text, of_columns, read_table
from dpps.errors import UsageError


def table_dataset(source: Any, schema: Schema | str | Path) -> TensorDataset:
    """The examples of a table as (inputs, class numbers), for `dpps.Run`; nothing is computed over the data.

    Args:
        source: a file (.csv, .tsv, .parquet, .npz), a pandas frame, or what has `to_pandas()` (Arrow tables,
            Hugging Face data sets, polars frames).
        schema: what the columns mean, or the file that says it (`dpps data describe` drafts one).
    """
    found = schema if isinstance(schema, Schema) else read_schema(Path(schema))
    if not isinstance(found, Schema):
        raise UsageError(f"the schema {schema} describes images: use dpps.data.image_dataset(folder, schema)")
    table = read_table(Path(source)) if isinstance(source, (str, Path)) else _of_frame(source)
    return TensorDataset(*encode(table, found))


def image_dataset(folder: str | Path, schema: ImageSchema | str | Path) -> TensorDataset:
    """The images of a folder as (inputs from 0 to 1, class numbers), for `dpps.Run`; nothing is computed over the data.

    Args:
        folder: with a sub-folder for every class.
        schema: the classes and the size, or the file that says them (`dpps data describe FOLDER` drafts one).
    """
    found = schema if isinstance(schema, ImageSchema) else read_schema(Path(schema))
    if not isinstance(found, ImageSchema):
        raise UsageError(f"the schema {schema} describes tables: use dpps.data.table_dataset(file, schema)")
    return TensorDataset(*labelled_images(Path(folder), found))


def _of_frame(frame: Any) -> Table:
    if hasattr(frame, "to_pandas"):
        frame = frame.to_pandas()
    if not hasattr(frame, "columns") or not hasattr(frame, "isna"):
        raise UsageError(
            f"the table is a {type(frame).__name__}: give a file, a pandas frame, or what has to_pandas()"
        )
    columns = [
        ["" if missing else as_text(value) for value, missing in zip(values, gaps, strict=True)]
        for values, gaps in (
            (frame.iloc[:, k].tolist(), frame.iloc[:, k].isna().tolist()) for k in range(frame.shape[1])
        )
    ]
    return of_columns(Path("data frame"), tuple(str(name) for name in frame.columns), columns)
