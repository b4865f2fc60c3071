"""From tables to tensors by a public schema: one example at a time, with nothing computed over the data."""

import logging
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpps.data.schema import Column, Schema, as_days, canonical, read_schema
from dpps.data.tables import Table, frame_table, read_table
from dpps.errors import UsageError, quoted
from dpps.tasks import TargetColumn

log = logging.getLogger(__name__)


def table_dataset(source: Any, schema: Schema | str | Path) -> TensorDataset:
    """Read a table as a data set of (inputs, targets) for `dpps.Run`. No statistics of the data are
    computed.

    Args:
        source: a file (.csv, .tsv, .parquet, .npz), a pandas frame, or what has `to_pandas()` (Arrow tables,
            Hugging Face data sets, polars frames).
        schema: a schema, or a schema file (`dpps data describe` drafts one).
    """
    found = schema if isinstance(schema, Schema) else read_schema(Path(schema))
    if not isinstance(found, Schema):
        raise UsageError(f"the schema {schema} describes images: use dpps.data.image_dataset(folder, schema)")
    table = read_table(Path(source)) if isinstance(source, (str, Path)) else frame_table(source)
    return TensorDataset(*encode(table, found))


def encode(table: Table, schema: Schema) -> tuple[Tensor, Tensor]:
    """Inputs of shape (examples, `schema.width`) and targets as the schema's task has them."""
    schema.check_target(f"of {table.path}")
    targets = encode_targets(
        table, schema
    )  # first: a missing target is refused before columns left out give a warning
    return encode_inputs(table, schema), targets


def encode_inputs(table: Table, schema: Schema) -> Tensor:
    """Numbers in [-1, 1] by their declared range and categories as 0 and 1, in the order of the schema, not of the file."""
    parts = [_INPUTS[column.kind](table, column, schema) for column in schema.used]
    known = {*schema.targets, *(column.name for column in schema.columns)}
    others = [name for name in table.names if name not in known]
    if others:
        log.warning("%s: not in the schema and left out: %s", table.path, ", ".join(others))
    return torch.from_numpy(np.concatenate(parts, axis=1))


def encode_targets(table: Table, schema: Schema) -> Tensor:
    """What is to be predicted, one row at a time."""
    return schema.task.targets([_target(table, column, schema) for column in schema.task.columns])


def _target(table: Table, column: TargetColumn, schema: Schema) -> np.ndarray:
    """A column of the target: numbers, or the places of values among those that are declared."""
    places = {name: k for k, name in enumerate(column.values)}
    places |= {alias: places[value] for alias, value in column.aliases.items()}

    def number(cell: str, row: int) -> float:
        found: float | None = table.number(cell, schema.decimal)
        if column.kind == "category":
            found = places.get(canonical(cell), places.get(cell.lower()))
        if found is not None:
            return found
        where = table.place(row, column.name)
        if cell in schema.missing:
            raise UsageError(f"{where} has no label: add it, or leave the line out")
        if column.kind == "category":
            raise UsageError(
                f"{where} is {cell!r}, not one of the classes {quoted(column.values)}: correct it, or declare the class in the schema"
            )
        raise UsageError(f"{where} is {cell!r} and the schema says number: correct it, or leave the line out")

    return _decoded(table, column.name, schema, number)


def column_values(table: Table, column: Column, schema: Schema) -> np.ndarray:
    """The values of a column: numbers as they stand there and dates in days, NaN where one is missing; categories by their place
    among the declared values, -1 where one is missing."""
    places = column.numbers

    def number(cell: str, row: int) -> float:
        if cell in schema.missing:
            return np.nan
        if (found := table.number(cell, schema.decimal)) is None:
            raise UsageError(
                f"{table.place(row, column.name)} is {cell!r} and the schema says number: correct it, or add it to `missing` in the "
                "schema if it means that the value is not known"
            )
        return found

    def date(cell: str, row: int) -> float:
        if cell in schema.missing:
            return np.nan
        if (found := as_days(cell, column.format, column.since)) is None:
            raise UsageError(
                f"{table.place(row, column.name)} is {cell!r} and the schema says that dates are written as {column.format}: correct "
                "one of the two, or add it to `missing` in the schema if it means that the date is not known"
            )
        return found

    def category(cell: str, row: int) -> float:
        if (found := places.get(canonical(cell))) is not None:
            return found
        if cell in schema.missing or column.undeclared == "missing":
            return -1
        raise UsageError(
            f"{table.place(row, column.name)} is {cell!r}, not one of the declared values {quoted(column.values)}: correct it, declare "
            'it or an alias in the schema, or write undeclared = "missing" there'
        )

    decode = {"number": number, "date": date, "category": category}[column.kind]
    values = _decoded(table, column.name, schema, decode)
    low, high = column.range
    outside = int(((values < low) | (values > high)).sum()) if column.kind != "category" else 0
    if outside:
        log.warning(
            "%s: %d of %d values of %s lie outside of the declared range %g to %g and count as its ends: is it the right unit?",
            *(table.path, outside, len(values), column.name, low, high),
        )
    return values


def _numbers(table: Table, column: Column, schema: Schema) -> np.ndarray:
    """From its range to -1..1. What is missing is in the middle of the range, and where the schema says so has an input of its own."""
    values, (low, high) = column_values(table, column, schema), column.range
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    scaled: np.ndarray = np.nan_to_num((np.clip(values, low, high) - middle) / half, nan=0.0)
    parts = [scaled, np.isnan(values)] if column.missing else [scaled]
    return np.stack(parts, axis=1).astype(np.float32)


def _categories(table: Table, column: Column, schema: Schema) -> np.ndarray:
    """One input for each declared value but the first. What is missing has an input of its own where the schema says so; otherwise it
    lies between all values."""
    places, values = column_values(table, column, schema).astype(np.int64), len(column.values)
    codes = np.zeros((values + 1, column.width), dtype=np.float32)
    codes[1:values, : values - 1] = np.eye(values - 1)
    codes[-1] = np.eye(1, column.width, column.width - 1) if column.missing else 1 / values
    coded: np.ndarray = codes[places]  # -1 is the last
    return coded


_INPUTS: dict[str, Callable[[Table, Column, Schema], np.ndarray]] = {
    "number": _numbers,
    "category": _categories,
    "date": _numbers,
}
"""By the kind of a column: its part of the inputs, (examples, `column.width`)."""


def _decoded(table: Table, name: str, schema: Schema, decode: Callable[[str, int], float]) -> np.ndarray:
    """A number for every cell of a column; each different cell is decoded once, with the row where it first stands."""
    if name not in table.columns:
        what = "label" if name in schema.targets else "column"
        near = get_close_matches(name, table.names, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(
            f"{table.path}: there is no {what} {name!r}, which the schema declares{hint}: the file has {quoted(table.names)}; "
            "rename the column there, or correct the schema"
        )
    numbers: dict[str, float] = {}
    for row, cell in enumerate(table.columns[name]):
        if cell not in numbers:
            numbers[cell] = decode(cell, row)
    return np.array([numbers[cell] for cell in table.columns[name]], dtype=np.float64)
