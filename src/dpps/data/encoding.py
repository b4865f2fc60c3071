"""From tables to tensors by a public schema: one example at a time, with nothing computed over the data."""

import logging
from collections.abc import Callable
from difflib import get_close_matches

import numpy as np
import torch
from torch import Tensor

from dpps.data.schema import Column, Schema, canonical
from dpps.data.table import Table, as_number
from dpps.errors import UsageError, quoted

log = logging.getLogger(__name__)


def encode(table: Table, schema: Schema) -> tuple[Tensor, Tensor]:
    """Inputs of shape (examples, `schema.width`) and class numbers."""
    labels = encode_labels(
        table, schema
    )  # first: a label that is missing is not told as a column that is left out
    return encode_inputs(table, schema), labels


def encode_inputs(table: Table, schema: Schema) -> Tensor:
    """Numbers in [-1, 1] by their declared range and categories as 0 and 1, in the order of the schema, not of the file."""
    parts = [
        _encoder(column)(table, _find(table, column.name, schema), column, schema) for column in schema.used
    ]
    _tell_left_out(table, schema)
    return torch.from_numpy(np.concatenate(parts, axis=1))


def encode_labels(table: Table, schema: Schema) -> Tensor:
    """The place of each label in the declared classes."""
    column = _find(table, schema.label, schema)
    numbers = {name: k for k, name in enumerate(schema.classes)}
    labels = np.empty(len(table.rows), np.int64)
    for k, row in enumerate(table.rows):
        number = numbers.get(canonical(row[column]))
        if number is None:
            empty = row[column] in schema.missing
            what = "has no label: add it, or leave the line out" if empty else f"is {row[column]!r}"
            declared = f", not one of the classes {quoted(schema.classes)}: correct it, or declare the class in the schema"
            raise UsageError(f"{table.place(k, column)} {what}{'' if empty else declared}")
        labels[k] = number
    return torch.from_numpy(labels)


def _encoder(column: Column) -> Callable[[Table, int, Column, Schema], np.ndarray]:
    return _number if column.kind == "number" else _category


def _number(table: Table, place: int, column: Column, schema: Schema) -> np.ndarray:
    low, high = column.range
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    values, outside = np.zeros((len(table.rows), 1), np.float32), 0  # 0: the middle of the range
    for k, row in enumerate(table.rows):
        if row[place] in schema.missing:
            continue
        number = as_number(row[place], table.separator)
        if number is None:
            raise UsageError(
                f"{table.place(k, place)} is {row[place]!r} and the schema says number: correct it, or add "
                "it to `missing` in the "
                "schema if it means that the value is not known"
            )
        outside += not low <= number <= high
        values[k] = (min(max(number, low), high) - middle) / half
    if outside:
        log.warning(
            "%s: %d of %d values of %s lie outside of the declared range %g to %g and count as its ends: is it the right unit?",
            *(table.path, outside, len(table.rows), column.name, low, high),
        )
    return values


def _category(table: Table, place: int, column: Column, schema: Schema) -> np.ndarray:
    """One input for each declared value, and the last for what is missing."""
    numbers = {value: k for k, value in enumerate(column.values)}
    values = np.zeros((len(table.rows), column.width), np.float32)
    for k, row in enumerate(table.rows):
        number = numbers.get(canonical(row[place]))
        if number is None and (row[place] in schema.missing or column.undeclared == "missing"):
            number = len(column.values)
        if number is None:
            raise UsageError(
                f"{table.place(k, place)} is {row[place]!r}, not one of the declared values {quoted(column.values)}: correct it, "
                'declare it in the schema, or write undeclared = "missing" there'
            )
        values[k, number] = 1
    return values


def _find(table: Table, name: str, schema: Schema) -> int:
    if name not in table.names:
        what = "label" if name == schema.label else "column"
        near = get_close_matches(name, table.names, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UsageError(
            f"{table.path}: there is no {what} {name!r}, which the schema declares{hint}: the file has "
            f"{quoted(table.names)}; rename the "
            "column there, or correct the schema"
        )
    return table.names.index(name)


def _tell_left_out(table: Table, schema: Schema) -> None:
    known = {schema.label, *(column.name for column in schema.columns)}
    others = [name for name in table.names if name not in known]
    if others:
        log.warning("%s: not in the schema and left out: %s", table.path, ", ".join(others))
