"""A first schema, guessed from one file. What is guessed is read off private data and becomes public with the schema."""

import math
import tomllib
from itertools import pairwise

from dpps.data.schema import MISSING, Column, Schema, canonical, parse_schema
from dpps.data.table import Table, as_number
from dpps.errors import UsageError, unknown

MOST_CATEGORIES = 20
"""A text column with more different values is rather a name or a remark than a category, and is ignored."""


def guess_schema(table: Table, label: str) -> Schema:
    """Kinds, rounded ranges, categories and classes as this table has them.

    Args:
        table: one node's data, or better a made-up example of them.
        label: the column to predict.
    """
    if label not in table.names:
        raise unknown(f"label for {table.path}", label, table.names)
    cells = dict(zip(table.names, zip(*table.rows, strict=True), strict=True))
    classes = _values(cells.pop(label))
    if len(classes) < 2 or len(classes) > max(MOST_CATEGORIES, len(table.rows) // 2):
        raise UsageError(
            f"{table.path}: the label {label!r} has {len(classes)} different values in {len(table.rows)} "
            "examples: a column with 2 or more "
            "classes that occur again and again is needed; choose another label"
        )
    columns = tuple(_guess(name, column, table.separator) for name, column in cells.items())
    schema = Schema(columns, label, classes)
    return parse_schema(tomllib.loads(schema.to_toml()), f"the schema of {table.path}")  # as it will be read


def _guess(name: str, cells: tuple[str, ...], separator: str) -> Column:
    known = [cell for cell in cells if cell not in MISSING]
    numbers = [as_number(cell, separator) for cell in known]
    finite = [number for number in numbers if number is not None]
    if known and len(finite) == len(known):
        return (
            Column(name, "ignore") if _counts_rows(finite) else Column(name, "number", rounded_range(finite))
        )
    values = _values(cells)
    if not values or len(values) > MOST_CATEGORIES or len(values) == len(known) > 2:
        return Column(name, "ignore")
    return Column(name, "category", values=values)


def _values(cells: tuple[str, ...]) -> tuple[str, ...]:
    """The different values, in the order of numbers where all are numbers, otherwise of the alphabet."""
    found = {canonical(cell) for cell in cells if cell not in MISSING}
    numbers = {value: as_number(value) for value in found}
    if None in numbers.values():
        return tuple(sorted(found))
    return tuple(sorted(found, key=lambda value: (numbers[value], value)))


def _counts_rows(numbers: list[float]) -> bool:
    """Whether these are running numbers, in any order: they name records and say nothing of them."""
    return len(numbers) > 10 and all(b - a == 1 for a, b in pairwise(sorted(numbers)))


def rounded_range(numbers: list[float]) -> tuple[float, float]:
    """A range around the numbers whose ends are multiples of 1, 2 or 5 times a power of ten, at least a quarter of
    their spread: 36.2 to 40.9 gives 36 to 42. A range far wider than the values makes a column invisible."""
    low, high = min(numbers), max(numbers)
    spread = high / 4 - low / 4 or abs(low) or 1.0
    spread = min(max(spread, 1e-9 * max(abs(low), abs(high)), 1e-300), 1e300)  # ends have twelve digits
    power = math.floor(math.log10(spread) + 1e-9)
    step = next(s for s in (float(f"{k}e{power}") for k in (1, 2, 5, 10)) if s >= spread * (1 - 1e-9))
    first, last = math.floor(low / step), math.ceil(high / step)
    return float(f"{first * step:.12g}"), float(f"{max(last, first + 1) * step:.12g}")
