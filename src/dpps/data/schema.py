"""The public description of tables or images: the columns, ranges, categories and targets that all nodes agree on before they read data.

Everything that turns a cell into a number comes from here, and nothing from the data of any node: ranges scale, the middle of a range
stands for a missing value, and the declared values are the categories. So no statistic of private data is computed, and none leaves.
`[target]` declares what is predicted, by a task of `dpps.tasks`; its columns are never inputs.
"""

import hashlib
import json
import logging
import math
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpps.data.tables import Table, as_number, frame_table, read_table
from dpps.errors import MismatchError, UsageError, quoted, unknown
from dpps.tasks import TASKS, Classification, Column, Draft, Task, parse_target, rounded_range
from dpps.tasks.task import canonical, numbers, only, texts

log = logging.getLogger(__name__)

MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?")
"""Cells whose value is not known, unless the schema says otherwise."""
CODES = 6
"""Whole numbers of at most so many different values that occur again and again are codes of categories rather than amounts."""
OFTEN = 0.05
"""From this share of missing cells on, a draft gives missing values an input of their own."""
MOST_CATEGORIES = 20
"""A text column with more different values is a name or a remark rather than a category, and is ignored."""
DATES = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y%m%d")
"""Date formats that a draft tries; the last one for numbers only."""
_EPOCH = "1970-01-01"
_KEYS: Mapping[str, tuple[str, ...]] = {
    "number": ("range", "missing"),
    "category": ("values", "aliases", "undeclared", "missing"),
    "date": ("since", "range", "format", "missing"),
    "ignore": (),
}
"""What a schema says about a column of each kind."""
_USUAL: Mapping[str, Any] = {"aliases": {}, "undeclared": "refuse", "format": DATES[0], "missing": False}
"""What need not be said."""

ASKED = ("range", "edges")
"""What a person can be asked for, about a number or the target."""
TARGET = "[target]"


@dataclass(frozen=True)
class Schema:
    """Columns in the order of the model's inputs, and what is predicted.

    Attributes:
        columns: all but those of the target.
        target: what is predicted, and its columns. None if there is nothing to predict, as for statistics.
        missing: texts that stand for a missing value.
        decimal: "," where numbers are written as 1,5, whatever separates the cells.
    """

    columns: tuple[Column, ...]
    target: Task | None = None
    missing: tuple[str, ...] = MISSING
    decimal: str = "."

    def check_target(self, where: str | Path) -> None:
        """Refuse a schema without a target where a model is to learn one."""
        if self.target is None:
            raise UsageError(
                f"the schema {where} declares no [target]: add one to learn from these tables (dpps data describe --label COLUMN drafts "
                "it); without one they can be asked questions (dpps stats)"
            )

    @property
    def task(self) -> Task:
        """What is predicted; refused where there is nothing."""
        self.check_target("of these tables")
        assert self.target is not None
        return self.target

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the columns that are predicted and never inputs."""
        return () if self.target is None else tuple(column.name for column in self.target.columns)

    @property
    def used(self) -> tuple[Column, ...]:
        """The columns that become inputs."""
        return tuple(column for column in self.columns if column.kind != "ignore")

    @property
    def described(self) -> tuple[Column, ...]:
        """All columns whose values are declared, including those of the target."""
        return self.used + (() if self.target is None else self.target.columns)

    @property
    def width(self) -> int:
        """How many inputs a model reads."""
        return sum(column.width for column in self.columns)

    @property
    def shape(self) -> tuple[int]:
        """The shape of one example's inputs."""
        return (self.width,)

    @property
    def length(self) -> float:
        """The length of an example's inputs, with a 1 for the bias, if all values are equally likely."""
        return math.sqrt(1 + sum(column.square for column in self.columns))

    def checksum(self) -> str:
        """Equal for schemas that say the same."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]

    def to_toml(self, guessed: str = "", known: Collection[str] = ()) -> str:
        """The text of a schema file.

        Args:
            guessed: a remark behind everything that was guessed.
            known: columns whose range was given by a person, and "[target]" if its range or edges were.
        """

        def lines(given: Mapping[str, Any], whose: str) -> list[str]:
            names = self.targets if whose == TARGET else ()
            sure = {key for key in given if (key in ASKED and whose in known) or given[key] in names}
            return [f"{key} = {_toml(value)}{'' if key in sure else guessed}" for key, value in given.items()]

        found = [f"missing = {_toml(self.missing)}"]
        if self.decimal != ".":
            found.append(f"decimal = {_toml(self.decimal)}")
        if self.target is not None:
            found += [
                "",
                TARGET,
                f"kind = {_toml(self.target.kind)}",
                *lines(self.target.declaration(), TARGET),
            ]
        for column in self.columns:
            given = {key: getattr(column, key) for key in ("kind", *_KEYS[column.kind])}
            said = {key: value for key, value in given.items() if value != _USUAL.get(key)}
            found += ["", "[[columns]]", f"name = {_toml(column.name)}", *lines(said, column.name)]
        return "\n".join(found) + "\n"


@dataclass(frozen=True)
class ImageSchema:
    """What all nodes agree on before they read their images: the names of the sub-folders, and (channels, height, width)."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]

    @property
    def task(self) -> Task:
        """Which class."""
        return Classification(self.classes, "folder")

    @property
    def length(self) -> None:
        """Not known for images."""

    def checksum(self) -> str:
        """Equal for schemas that say the same."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """The text of a schema file."""
        return f"classes = {_toml(self.classes)}\nimages = {_toml(self.shape)}  # channels, height, width\n"


def _toml(value: Any) -> str:
    """A value in TOML, which escapes one character more than JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# Reading


def read_schema(path: str | Path) -> Schema | ImageSchema:
    """Read and check a schema file, of tables or, if it has an entry `images`, of images."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"the schema {path} cannot be read ({error.strerror}): dpps data describe FILE --label COLUMN --out {path} writes one"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the schema {path} is not TOML: {error}") from error
    return parse_schema(table, str(path))


def parse_schema(table: Mapping[str, Any], where: str) -> Schema | ImageSchema:
    """The schema in a TOML table, of tables or, if it has an entry `images`, of images; `where` is the file, for messages."""
    return _parse_images(table, where) if "images" in table else _parse_columns(table, where)


def _parse_images(table: Mapping[str, Any], where: str) -> ImageSchema:
    only(table, ("classes", "images"), f"{where}, which describes images,")
    classes: Any = table.get("classes")
    shape = table["images"]
    named = isinstance(classes, list) and all(isinstance(name, str) and name for name in classes)
    if not named or len(set(classes)) < max(2, len(classes)):
        raise UsageError(f"{where}: classes is {classes!r}: name two or more sub-folders, each once")
    sized = (
        isinstance(shape, list) and len(shape) == 3 and all(type(size) is int and size > 0 for size in shape)
    )
    if not sized or shape[0] not in (1, 3):
        raise UsageError(
            f"{where}: images is {shape!r}: give channels (1 for grey, 3 for colour), height and width, such "
            "as images = [3, 32, 32]"
        )
    return ImageSchema(tuple(classes), (shape[0], shape[1], shape[2]))


def _parse_columns(table: Mapping[str, Any], where: str) -> Schema:
    only(table, ("label", "classes", "target", "missing", "decimal", "columns"), where)
    task = _parse_target(table, where)
    missing = table.get("missing", list(MISSING))
    if not isinstance(missing, list) or not all(isinstance(word, str) for word in missing):
        raise UsageError(
            f'{where}: missing is {missing!r}: give a list of texts in quotes, such as ["", "NA"]'
        )
    decimal = table.get("decimal", ".")
    if decimal not in (".", ","):
        raise UsageError(f'{where}: decimal is {decimal!r}: give "." or ","')
    entries = table.get("columns")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{where}: columns are missing: write [[columns]] with name and kind for each")
    columns = tuple(_parse_column(entry, k, where) for k, entry in enumerate(entries, start=1))
    schema = Schema(columns, task, tuple(missing), decimal)
    names = Counter([*schema.targets, *(column.name for column in columns)])
    for name, count in names.items():
        if count > 1:
            whose = "the target and a column" if name in schema.targets else "two columns"
            raise UsageError(f"{where}: {whose} are called {name!r}: leave one out")
    if not schema.width:
        raise UsageError(
            f"{where}: no column is of the kind number, category or date: a model needs one input or more"
        )
    return schema


def _parse_target(table: Mapping[str, Any], where: str) -> Task | None:
    """What `[target]` declares, or `label` and `classes`, which mean a target of the kind class. None: neither."""
    old = [key for key in ("label", "classes") if key in table]
    if "target" in table:
        if old:
            raise UsageError(f"{where}: there are both [target] and {old[0]}: keep [target]")
        return parse_target(table["target"], where)
    if not old:
        return None
    label = table.get("label")
    if not isinstance(label, str) or not label:
        raise UsageError(
            f'{where}: label is {label!r}: name the column to predict, such as label = "diagnosis", or write [target]'
        )
    return Classification(texts(table, "classes", where, 2), label)


def _parse_column(entry: Mapping[str, Any], place: int, where: str) -> Column:
    name, kind = entry.get("name"), entry.get("kind")
    if not isinstance(name, str) or not name:
        raise UsageError(f'{where}: entry {place} of columns has no name: add name = "..." as in the header')
    where = f"{where}, column {name!r}"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise unknown(f"kind in {where}", kind, tuple(_KEYS))
    only(entry, ("name", "kind", *_KEYS[kind]), f"{where} of the kind {kind}")
    found = {key: entry[key] for key in _KEYS[kind] if key in entry}
    if not isinstance(found.get("missing", False), bool):
        raise UsageError(
            f"{where}: missing is {found['missing']!r}: give true (an input of its own) or false"
        )
    if kind in ("number", "date"):
        found["range"] = numbers(entry, "range", where, "[0, 120]", count=2)
    if kind == "category":
        if found.get("undeclared", "refuse") not in ("refuse", "missing"):
            raise unknown(f"undeclared in {where}", found["undeclared"], ("refuse", "missing"))
        found["values"] = texts(entry, "values", where, 1)
        found["aliases"] = _parse_aliases(found.get("aliases", {}), found["values"], where)
    if kind == "date":
        since, written = entry.get("since"), entry.get("format", DATES[0])
        if as_days(str(since), DATES[0], _EPOCH) is None:
            raise UsageError(
                f'{where}: since is {since!r}: give a day in quotes, such as since = "2000-01-01"'
            )
        if not isinstance(written, str) or "%" not in written:
            raise UsageError(
                f'{where}: format is {written!r}: say how dates are written, such as format = "%d.%m.%Y"'
            )
        found["since"] = str(since)
    return Column(name, kind, **found)


def _parse_aliases(found: Any, values: tuple[str, ...], where: str) -> dict[str, tuple[str, ...]]:
    """Other ways to write values, each for one of them."""
    if not isinstance(found, Mapping):
        raise UsageError(
            f'{where}: aliases is {found!r}: give other ways to write a value, such as aliases = {{"F" = ["f", "female"]}}'
        )
    taken, aliases = set(values), {}
    for value in found:
        if canonical(value) not in values:
            raise unknown(f"value in aliases of {where}", value, values)
        aliases[canonical(value)] = others = texts(found, value, f"{where}: aliases", 1)
        if twice := taken.intersection(others):
            raise UsageError(f"{where}: the alias {min(twice)!r} stands for two values: leave one out")
        taken.update(others)
    return aliases


def as_days(text: str, written: str, since: str) -> float | None:
    """How many days a date lies after another one, written as 2000-01-31; None: it is no date. A time of day is left out."""
    text = text.strip()
    if written == DATES[0] and text[10:11] in ("T", " "):
        text = text[:10]
    try:
        return float((datetime.strptime(text, written) - datetime.strptime(since, DATES[0])).days)
    except ValueError:
        return None


# Guessing


def guess_schema(
    table: Table, label: str | None = None, task: str = "classification", **columns: str
) -> Schema:
    """A first schema: kinds, rounded ranges, categories, classes and edges as this table has them.

    What is guessed is read off private data and becomes public with the schema: better give a made-up example of the data.

    Args:
        table: the table.
        label: the column to predict.
        task: what is predicted.
        columns: further columns of the target, by the names that the task has for them (`time` and `event`).
    """
    columns |= {} if label is None else {"label": label}
    for role, name in columns.items():
        if name not in table.names:
            raise unknown(f"{role} for {table.path}", name, table.names)
    known = {name: [c for c in cells if c not in MISSING] for name, cells in table.columns.items()}
    decimal = _decimal(table, known)
    drafts = {
        role: Draft(
            name, _values(known[name]), tuple(table.number(c, decimal) for c in known[name]), len(table)
        )
        for role, name in columns.items()
    }
    target = TASKS[task].draft(drafts, str(table.path)) if columns else None
    inputs = [name for name in table.names if name not in columns.values()]
    schema = Schema(
        tuple(_guess(name, known[name], table, decimal) for name in inputs), target, decimal=decimal
    )
    # as it will be read
    return _parse_columns(tomllib.loads(schema.to_toml()), f"the schema of {table.path}")


def _decimal(table: Table, known: Mapping[str, Sequence[str]]) -> str:
    """A comma, if that makes numbers of more columns than a point does. Between semicolons both are read."""

    def count(decimal: str) -> int:
        return sum(all(table.number(c, decimal) is not None for c in cells) for cells in known.values())

    return "," if table.separator != ";" and count(",") > count(".") else "."


def _guess(name: str, known: Sequence[str], table: Table, decimal: str) -> Column:
    """A column, by its cells that are not missing."""
    if not known:
        return Column(name, "ignore")
    often = len(known) < (1 - OFTEN) * len(table)
    finite = [number for cell in known if (number := table.number(cell, decimal)) is not None]
    numeric = len(finite) == len(known)
    for written in DATES if numeric else DATES[:-1]:
        if all(as_days(cell, written, _EPOCH) is not None for cell in known):
            days = min(as_days(cell, written, _EPOCH) or 0.0 for cell in known)
            since = f"{(datetime.strptime(_EPOCH, DATES[0]) + timedelta(days=days)).year:04d}-01-01"
            last = max(as_days(cell, written, since) or 0.0 for cell in known)
            return Column(name, "date", rounded_range([0.0, max(last, 1.0)]), since=since, format=written)
    values = _values(known)
    if numeric:
        if len(finite) > 10 and all(b - a == 1 for a, b in pairwise(sorted(finite))):
            return Column(name, "ignore")  # running numbers, in any order: they name records
        codes = {*finite}
        if len(codes) > CODES or len(known) <= 4 * len(codes) or not all(c.is_integer() for c in codes):
            return Column(name, "number", rounded_range(finite))  # no codes of sex, stages, yes and no
    elif len(values) > MOST_CATEGORIES or len(values) == len(known) > 2:
        return Column(name, "ignore")
    return Column(name, "category", values=values, missing=often)


def _values(cells: Iterable[str]) -> tuple[str, ...]:
    """The different values, in the order of numbers if all are numbers, otherwise of the alphabet."""
    found = sorted({canonical(cell) for cell in cells})
    amounts = [as_number(value) for value in found]
    return tuple(found if None in amounts else sorted(found, key=float))


# From tables to tensors: one example at a time, with nothing computed over the data


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


class Remarks:
    """Warnings about tables that are read together, logged once for all of them at the end. Values outside of their range are often
    a wrong unit, and columns that the schema does not know a wrong name."""

    def __init__(self) -> None:
        self._outside: dict[str, list[tuple[Path, int, int]]] = {}
        self._unknown: dict[str, list[Path]] = {}

    def outside(self, table: Table, column: Column, values: np.ndarray) -> None:
        """Values that count as the ends of their range."""
        low, high = column.range
        if count := int(((values < low) | (values > high)).sum()):
            named = f"{column.name} ({low:g} to {high:g})"
            self._outside.setdefault(named, []).append((table.path, count, len(values)))

    def unknown(self, table: Table, names: Iterable[str]) -> None:
        """Columns that are left out."""
        for name in names:
            self._unknown.setdefault(name, []).append(table.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # what is refused is not read
            return
        if self._outside:
            listed = ", ".join(
                f"{sum(n for _, n, _ in found)} of {sum(n for *_, n in found)} of {name}"
                for name, found in self._outside.items()
            )
            log.warning(
                "%s: values outside of the declared range count as its ends, %s: is it the right unit?",
                _files(path for found in self._outside.values() for path, _, _ in found),
                listed,
            )
        if self._unknown:
            paths = _files(path for found in self._unknown.values() for path in found)
            log.warning("%s: not in the schema and left out: %s", paths, ", ".join(self._unknown))


def _files(paths: Iterable[Path]) -> str:
    first, *others = dict.fromkeys(paths)
    return f"{first} and {len(others)} more" if others else str(first)


def encode(table: Table, schema: Schema, remarks: Remarks | None = None) -> tuple[Tensor, Tensor]:
    """Inputs of shape (examples, `schema.width`), and targets as the schema's task has them; `remarks` collects those of several tables."""
    schema.check_target(f"of {table.path}")
    # first: a missing target is refused before columns left out give a warning
    targets = schema.task.targets([_target_values(table, column, schema) for column in schema.task.columns])
    return encode_inputs(table, schema, remarks), targets


def encode_inputs(table: Table, schema: Schema, remarks: Remarks | None = None) -> Tensor:
    """Numbers in [-1, 1] by their declared range and categories as 0 and 1, in the order of the schema, not of the file."""
    known = {*schema.targets, *(column.name for column in schema.columns)}
    with nullcontext(remarks) if remarks else Remarks() as told:
        parts = [_inputs(table, column, schema, told) for column in schema.used]
        told.unknown(table, (name for name in table.names if name not in known))
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _inputs(table: Table, column: Column, schema: Schema, remarks: Remarks) -> np.ndarray:
    """A column's part of the inputs, (examples, `column.width`). A number goes from its range to -1..1. A category has one input for each
    declared value but the first. A missing value is in the middle of its range or between all categories, unless it has an input of its own."""
    values = column_values(table, column, schema, remarks)
    if column.kind != "category":
        low, high = column.range
        scaled = (np.clip(values, low, high) - (low / 2 + high / 2)) / (high / 2 - low / 2)
        parts = [np.nan_to_num(scaled, nan=0.0), *([np.isnan(values)] if column.missing else [])]
        return np.stack(parts, axis=1).astype(np.float32)
    count = len(column.values)
    codes = np.zeros((count + 1, column.width), dtype=np.float32)
    codes[1:count, : count - 1] = np.eye(count - 1)
    codes[-1] = np.eye(1, column.width, column.width - 1) if column.missing else 1 / count
    coded: np.ndarray = codes[values.astype(np.int64)]  # -1, a missing value, is the last
    return coded


def column_values(table: Table, column: Column, schema: Schema, remarks: Remarks) -> np.ndarray:
    """The values of a column: numbers as they are and dates in days, NaN where one is missing; categories by their place among the declared
    values, -1 where one is missing. Numbers outside of their range go to the remarks."""
    category, read = column.kind == "category", _reader(table, column, schema)
    wrong, remedy = {
        "number": (
            "and the schema says number",
            "add it to `missing` in the schema if it means that the value is not known",
        ),
        "date": (
            f"and the schema says that dates are written as {column.format}",
            "correct the schema, or add it to `missing` there if it means that the date is not known",
        ),
        "category": (
            f"which is not one of the declared values {quoted(column.values)}",
            'declare it or an alias in the schema, or write undeclared = "missing" there',
        ),
    }[column.kind]

    def decode(cell: str, row: int) -> float:
        missing = cell in schema.missing
        found = None if missing and not category else read(cell)
        if found is not None:
            return found
        if missing or column.undeclared == "missing":
            return -1.0 if category else np.nan
        raise MismatchError(f"{table.place(row, column.name)} is {cell!r}, {wrong}: correct it", remedy)

    values = _decoded(table, column.name, schema, decode)
    if not category:
        remarks.outside(table, column, values)
    return values


def _target_values(table: Table, column: Column, schema: Schema) -> np.ndarray:
    """A column of the target: numbers, or the places of values among those that are declared, also if written in capitals."""
    read, places = _reader(table, column, schema), column.places

    def decode(cell: str, row: int) -> float:
        found = read(cell)
        found = places.get(cell.lower()) if found is None else found
        if found is not None:
            return found
        where = table.place(row, column.name)
        if cell in schema.missing:
            raise UsageError(f"{where} has no label: add it, or leave the line out")
        if column.kind == "category":
            raise MismatchError(
                f"{where} is {cell!r}, not one of the classes {quoted(column.values)}: correct it",
                "declare the class in the schema",
            )
        raise UsageError(f"{where} is {cell!r} and the schema says number: correct it, or leave the line out")

    return _decoded(table, column.name, schema, decode)


def _reader(table: Table, column: Column, schema: Schema) -> Callable[[str], float | None]:
    """What a cell of a column means; None: nothing."""
    if column.kind == "number":
        return lambda cell: table.number(cell, schema.decimal)
    if column.kind == "date":
        return lambda cell: as_days(cell, column.format, column.since)
    places = column.places
    return lambda cell: places.get(canonical(cell))


def _decoded(table: Table, name: str, schema: Schema, decode: Callable[[str, int], float]) -> np.ndarray:
    """A number for every cell of a column; each different cell is decoded once, with the row where it first occurs."""
    if name not in table.columns:
        what = "label" if name in schema.targets else "column"
        near = get_close_matches(name, table.names, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise MismatchError(
            f"{table.path}: there is no {what} {name!r}, which the schema declares{hint}: the file has {quoted(table.names)}; "
            "rename the column there",
            "correct the schema",
        )
    cells, numbers_of = table.columns[name], {}
    for row, cell in enumerate(cells):
        if cell not in numbers_of:
            numbers_of[cell] = decode(cell, row)
    return np.array([numbers_of[cell] for cell in cells], dtype=np.float64)
