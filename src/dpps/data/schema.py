"""The public description of tables or images: what columns, ranges, categories and targets all nodes agree on before they read their data.

Everything that turns a cell into a number comes from here and nothing from the data of any node: ranges scale, their middle stands
for what is missing, and declared values are the categories. So no statistic of private data is computed, and none leaves. What is
predicted is declared in `[target]`, by a task of `dpps.tasks`; its columns are never inputs.
"""

import hashlib
import json
import logging
import math
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
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
from dpps.tasks import TASKS, Classification, Draft, TargetColumn, Task, parse_target, rounded_range

log = logging.getLogger(__name__)

KINDS = ("number", "category", "date", "ignore")
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?")
"""What stands in a cell whose value is not known, unless the schema says otherwise."""
CODES = 6
"""Whole numbers of at most so many different values that occur again and again are rather codes of categories than amounts."""
OFTEN = 0.05
"""From this part of missing cells on, a draft gives what is missing an input of its own."""
_EPOCH = "1970-01-01"
MOST_CATEGORIES = 20
"""A text column with more different values is rather a name or a remark than a category, and is ignored."""
DATES = ("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y%m%d")
"""Ways to write a date that are tried when a schema is drafted."""
_KEYS = ("label", "classes", "target", "missing", "decimal", "columns")
_IMAGE_KEYS = ("classes", "images")
_COLUMN_KEYS = {
    "number": ("name", "kind", "range", "missing"),
    "category": ("name", "kind", "values", "aliases", "undeclared", "missing"),
    "date": ("name", "kind", "since", "range", "format", "missing"),
    "ignore": ("name", "kind"),
}

ASKED = ("range", "edges")
"""What a person can be asked for, of a number or of the target."""
TARGET = "[target]"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: as in the header.
        kind: "number", "category", "date" or "ignore".
        range: of a number: what is mapped to -1 and to 1. What lies outside counts as the nearer end. Of a date: in days.
        values: of a category. The first is the one that all inputs are 0 for; each other one has an input of its own.
        undeclared: "missing" if any other value of a category counts as missing; "refuse" if it is a mistake.
        missing: whether there is an input that is 1 where the value is not known. Without one, what is not known lies in the
            middle of a range, or between all values of a category.
        aliases: other ways to write a value of a category.
        since: of a date: the public day from which days are counted, as 2000-01-31.
        format: of a date: how it is written, as Python's `strptime` has it.
    """

    name: str
    kind: str
    range: tuple[float, float] = (-1.0, 1.0)
    values: tuple[str, ...] = ()
    undeclared: str = "refuse"
    missing: bool = False
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    since: str = ""
    format: str = DATES[0]

    @property
    def width(self) -> int:
        """How many inputs of the model it becomes."""
        if self.kind == "ignore":
            return 0
        return (len(self.values) - 1 if self.kind == "category" else 1) + self.missing

    @property
    def square(self) -> float:
        """The mean square of its inputs, if every value is as likely as every other."""
        if self.kind == "ignore":
            return 0.0
        return (len(self.values) - 1) / len(self.values) if self.kind == "category" else 1 / 3

    @property
    def numbers(self) -> dict[str, int]:
        """Of a category: the place of each value and of its aliases."""
        found = {value: k for k, value in enumerate(self.values)}
        return found | {canonical(a): found[value] for value, others in self.aliases.items() for a in others}


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
    def described(self) -> tuple[Column, ...]:
        """All columns whose values are declared, those of the target included."""
        return self.used + tuple(
            Column(
                c.name,
                c.kind,
                c.range,
                c.values,
                aliases={value: tuple(a for a, of in c.aliases.items() if of == value) for value in c.values},
            )
            for c in (() if self.target is None else self.target.columns)
        )

    @property
    def width(self) -> int:
        """How many inputs a model reads."""
        return sum(column.width for column in self.columns)

    @property
    def shape(self) -> tuple[int]:
        """Of what a model reads of one example."""
        return (self.width,)

    @property
    def used(self) -> tuple[Column, ...]:
        """The columns that become inputs."""
        return tuple(column for column in self.columns if column.kind != "ignore")

    @property
    def length(self) -> float:
        """How long an example's inputs are, with a 1 for the bias, if every value is as likely as every other."""
        return math.sqrt(1 + sum(column.square for column in self.columns))

    def checksum(self) -> str:
        """Equal for schemas that say the same."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]

    def to_toml(self, guessed: str = "", known: Collection[str] = ()) -> str:
        """The text of a schema file.

        Args:
            guessed: a remark behind everything that was guessed.
            known: columns whose range was not, and "[target]" where its range or edges were not.
        """
        lines = [f"missing = {_toml(self.missing)}"]
        if self.decimal != ".":
            lines.append(f"decimal = {_toml(self.decimal)}")
        if self.target is not None:
            lines += ["", "[target]", f"kind = {_toml(self.target.kind)}"]
            lines += [
                f"{key} = {_toml(value)}"
                + ("" if value in self.targets or (key in ASKED and TARGET in known) else guessed)
                for key, value in self.target.declaration().items()
            ]
        for column in self.columns:
            name, kind = _toml(column.name), _toml(column.kind)
            lines += ["", "[[columns]]", f"name = {name}", f"kind = {kind}{guessed}"]
            given = {key: getattr(column, key) for key in _COLUMN_KEYS[column.kind][2:]}
            plain = {f.name: f.default for f in fields(Column)}
            plain |= {"range": None, "values": None, "aliases": {}}
            lines += [
                f"{k} = {_toml(v)}" + ("" if k in ASKED and column.name in known else guessed)
                for k, v in given.items()
                if v != plain[k]
            ]
        return "\n".join(lines) + "\n"


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
        """Of images it is not known."""

    def checksum(self) -> str:
        """Equal for schemas that say the same."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """The text of a schema file."""
        return f"classes = {_toml(self.classes)}\nimages = {_toml(self.shape)}  # channels, height, width\n"


def canonical(text: str) -> str:
    """A class or category as it is compared: whole numbers lose the `.0` that other programs add,
    and true and false are written small."""
    if text.lower() in ("true", "false"):
        return text.lower()
    whole = text.removesuffix(".0")
    return whole if whole.removeprefix("-").isdecimal() else text


def read_schema(path: str | Path) -> Schema | ImageSchema:
    """Read and check a schema file, of tables or, where it has an entry `images`, of images."""
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
    """The schema in a TOML table, of tables or, where it has an entry `images`, of images; `where` is the file, for messages."""
    return _parse_images(table, where) if "images" in table else _parse_columns(table, where)


def _parse_columns(table: Mapping[str, Any], where: str) -> Schema:
    for key in table:
        if key not in _KEYS:
            raise unknown(f"entry in {where}", key, _KEYS)
    task = _target(table, where)
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
    columns = tuple(_column(entry, k, where) for k, entry in enumerate(entries, start=1))
    names = [column.name for column in columns]
    targets = () if task is None else [target.name for target in task.columns]
    for name in names:
        if names.count(name) > 1 or name in targets:
            whose = "the target and a column" if name in targets else "two columns"
            raise UsageError(f"{where}: {whose} are called {name!r}: leave one out")
    schema = Schema(columns, task, tuple(missing), decimal)
    if not schema.width:
        raise UsageError(
            f"{where}: no column is of the kind number, category or date: a model needs one input or more"
        )
    return schema


def _target(table: Mapping[str, Any], where: str) -> Task | None:
    """What `[target]` declares; or `label` and `classes`, which are the same as a target of the kind class; None: neither."""
    if not {"target", "label", "classes"} & table.keys():
        return None
    if "target" in table:
        for key in ("label", "classes"):
            if key in table:
                raise UsageError(f"{where}: there are both [target] and {key}: keep [target]")
        entry = table["target"]
        if isinstance(entry, Mapping) and isinstance(entry.get("classes"), list):
            entry = {
                **entry,
                "classes": list(_texts(entry["classes"], f"{where}, [target]: classes", least=2)),
            }
        return parse_target(entry, where)
    label = table.get("label")
    if not isinstance(label, str) or not label:
        raise UsageError(
            f'{where}: label is {label!r}: name the column to predict, such as label = "diagnosis", or write [target]'
        )
    return Classification(_texts(table.get("classes"), f"{where}: classes", least=2), label)


def _parse_images(table: Mapping[str, Any], where: str) -> ImageSchema:
    for key in table:
        if key not in _IMAGE_KEYS:
            raise unknown(f"entry in {where}, which describes images,", key, _IMAGE_KEYS)
    classes, shape = table.get("classes"), table["images"]
    if (
        not isinstance(classes, list)
        or not all(isinstance(name, str) and name for name in classes)
        or len(set(classes)) < max(2, len(classes))
    ):
        raise UsageError(f"{where}: classes is {classes!r}: name two or more sub-folders, each once")
    if (
        not isinstance(shape, list)
        or len(shape) != 3
        or not all(type(size) is int and size > 0 for size in shape)
        or shape[0] not in (1, 3)
    ):
        raise UsageError(
            f"{where}: images is {shape!r}: give channels (1 for grey, 3 for colour), height and width, such "
            "as images = [3, 32, 32]"
        )
    return ImageSchema(tuple(classes), (shape[0], shape[1], shape[2]))


def _column(entry: Mapping[str, Any], place: int, where: str) -> Column:
    name, kind = entry.get("name"), entry.get("kind")
    if not isinstance(name, str) or not name:
        raise UsageError(f'{where}: entry {place} of columns has no name: add name = "..." as in the header')
    where = f"{where}, column {name!r}"
    if kind not in KINDS:
        raise unknown(f"kind in {where}", kind, KINDS)
    for key in entry:
        if key not in _COLUMN_KEYS[kind]:
            raise unknown(f"entry in {where} of the kind {kind}", key, _COLUMN_KEYS[kind])
    if kind == "ignore":
        return Column(name, kind)
    missing = entry.get("missing", False)
    if not isinstance(missing, bool):
        raise UsageError(f"{where}: missing is {missing!r}: give true (an input of its own) or false")
    if kind == "number":
        return Column(name, kind, range=_range(entry.get("range"), where), missing=missing)
    if kind == "date":
        return _date_column(entry, name, missing, where)
    undeclared = entry.get("undeclared", "refuse")
    if undeclared not in ("refuse", "missing"):
        raise unknown(f"undeclared in {where}", undeclared, ("refuse", "missing"))
    values = _texts(entry.get("values"), f"{where}: values", least=1)
    aliases = _aliases(entry.get("aliases", {}), values, where)
    return Column(name, kind, values=values, undeclared=undeclared, missing=missing, aliases=aliases)


def _date_column(entry: Mapping[str, Any], name: str, missing: bool, where: str) -> Column:
    since, written = entry.get("since"), entry.get("format", DATES[0])
    days = as_days(str(since), DATES[0], _EPOCH)
    if days is None:
        raise UsageError(f'{where}: since is {since!r}: give a day in quotes, such as since = "2000-01-01"')
    if not isinstance(written, str) or "%" not in written:
        raise UsageError(
            f'{where}: format is {written!r}: say how dates are written, such as format = "%d.%m.%Y"'
        )
    found = _range(entry.get("range"), where)
    return Column(name, "date", range=found, missing=missing, since=str(since), format=written)


def as_days(text: str, written: str, since: str) -> float | None:
    """How many days a date lies after another one, written as 2000-01-31; None: it is no date. A time of the day is left out."""
    text = text.strip()
    if written == DATES[0]:
        text = text[:10] if len(text) > 10 and text[10] in "T " else text
    try:
        return float((datetime.strptime(text, written) - datetime.strptime(since, DATES[0])).days)
    except ValueError:
        return None


def _aliases(found: Any, values: tuple[str, ...], where: str) -> dict[str, tuple[str, ...]]:
    """Other ways to write values, each for one of them."""
    if not isinstance(found, Mapping):
        raise UsageError(
            f'{where}: aliases is {found!r}: give other ways to write a value, such as aliases = {{"F" = ["f", "female"]}}'
        )
    taken = set(values)
    aliases = {}
    for value, others in found.items():
        if canonical(value) not in values:
            raise unknown(f"value in aliases of {where}", value, values)
        texts = _texts(others, f"{where}: aliases of {value!r}", least=1)
        for text in texts:
            if text in taken:
                raise UsageError(f"{where}: the alias {text!r} stands for two values: leave one out")
            taken.add(text)
        aliases[canonical(value)] = texts
    return aliases


def _range(found: Any, where: str) -> tuple[float, float]:
    if (
        not isinstance(found, list)
        or len(found) != 2
        or not all(type(end) in (int, float) and as_number(str(end)) is not None for end in found)
        or not found[0] < found[1]
    ):
        raise UsageError(
            f"{where}: range is {found}: give the lowest and a higher highest possible value, such as range = [0, 120]"
        )
    return float(found[0]), float(found[1])


def _texts(found: Any, where: str, least: int) -> tuple[str, ...]:
    """Texts, or whole numbers as texts; each once."""
    if not isinstance(found, list) or not all(type(value) in (str, int) for value in found):
        raise UsageError(
            f'{where} is {found!r}: give a list of texts or whole numbers, such as ["no", "yes"]'
        )
    texts = tuple(canonical(str(value)) for value in found)
    if len(set(texts)) < len(texts) or len(texts) < least:
        raise UsageError(f"{where} is {found}: give {least} or more, each once")
    return texts


def _toml(value: Any) -> str:
    """Text, number or a list of them, as TOML has it (which escapes one character more than JSON)."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# Guessing


def guess_schema(
    table: Table, label: str | None = None, task: str = "classification", **columns: str
) -> Schema:
    """A first schema: kinds, rounded ranges, categories, classes and edges as this table has them; `columns` are further columns of the target,
    by the names that the task has for them (`time` and `event`).

    What is guessed is read off private data and becomes public with the schema: better give a made-up example of the data.
    """
    columns |= {} if label is None else {"label": label}
    for role, name in columns.items():
        if name not in table.names:
            raise unknown(f"{role} for {table.path}", name, table.names)
    decimal = _decimal(table)
    cells = {
        role: [cell for cell in table.columns[name] if cell not in MISSING] for role, name in columns.items()
    }
    texts = {role: _values(found) for role, found in cells.items()}
    numbers = {role: [table.number(cell, decimal) for cell in found] for role, found in cells.items()}
    drafts = {role: Draft(columns[role], texts[role], tuple(numbers[role]), len(table)) for role in columns}
    found = TASKS[task].draft(drafts, str(table.path)) if columns else None
    inputs = tuple(_guess(name, table, decimal) for name in table.names if name not in columns.values())
    schema = Schema(inputs, found, decimal=decimal)
    # as it will be read
    return _parse_columns(tomllib.loads(schema.to_toml()), f"the schema of {table.path}")


def _decimal(table: Table) -> str:
    """A comma where cells of some column are numbers only if it is one, and of none if it is a point."""
    if table.separator == ";":
        return "."  # both are read between semicolons
    known = [[c for c in cells if c not in MISSING] for cells in table.columns.values()]

    def count(decimal: str) -> int:
        return sum(
            bool(cells) and all(table.number(c, decimal) is not None for c in cells) for cells in known
        )

    return "," if count(",") > count(".") else "."


def _guess(name: str, table: Table, decimal: str) -> Column:
    cells = table.columns[name]
    known = [cell for cell in cells if cell not in MISSING]
    often = len(known) < (1 - OFTEN) * len(cells)
    numbers = [table.number(cell, decimal) for cell in known]
    finite = [number for number in numbers if number is not None]
    written = next(
        (f for f in DATES if known and all(as_days(c, f, _EPOCH) is not None for c in known)), None
    )
    if written is not None and not (written == "%Y%m%d" and len(finite) < len(known)):
        return _guess_date(name, known, written)
    if known and len(finite) == len(known):
        if len(finite) > 10 and all(b - a == 1 for a, b in pairwise(sorted(finite))):
            return Column(name, "ignore")  # running numbers, in any order: they name records
        codes = sorted({*finite})
        if len(known) > 4 * len(codes) and all(code.is_integer() for code in codes) and len(codes) <= CODES:
            return Column(name, "category", values=_values(cells), missing=often)  # sex, stages, yes and no
        return Column(name, "number", rounded_range(finite))
    values = _values(cells)
    if not values or len(values) > MOST_CATEGORIES or len(values) == len(known) > 2:
        return Column(name, "ignore")
    return Column(name, "category", values=values, missing=often)


def _guess_date(name: str, cells: Sequence[str], written: str) -> Column:
    days = [as_days(cell, written, _EPOCH) or 0.0 for cell in cells]
    first = datetime.strptime(_EPOCH, DATES[0]) + timedelta(days=min(days))
    since = f"{first.year:04d}-01-01"
    counted = [as_days(cell, written, since) or 0.0 for cell in cells]
    return Column(name, "date", rounded_range([0.0, max(*counted, 1.0)]), since=since, format=written)


def _values(cells: Sequence[str]) -> tuple[str, ...]:
    """The different values, in the order of numbers where all are numbers, otherwise of the alphabet."""
    found = {canonical(cell) for cell in cells if cell not in MISSING}
    numbers = {value: as_number(value) for value in found}
    if None in numbers.values():
        return tuple(sorted(found))
    return tuple(sorted(found, key=lambda value: (numbers[value], value)))


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
    """What must be said of tables that are read together, once for all of them, when the last one is read. Values outside of their
    range are often a wrong unit, and columns that the schema does not know a wrong name."""

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
            paths = [path for found in self._outside.values() for path, _, _ in found]
            sums = {
                name: (sum(n for _, n, _ in found), sum(n for *_, n in found))
                for name, found in self._outside.items()
            }
            listed = ", ".join(f"{outside} of {of} of {name}" for name, (outside, of) in sums.items())
            log.warning(
                "%s: values outside of the declared range count as its ends, %s: is it the right unit?",
                *(_files(paths), listed),
            )
        if self._unknown:
            paths = [path for found in self._unknown.values() for path in found]
            log.warning("%s: not in the schema and left out: %s", _files(paths), ", ".join(self._unknown))


def _files(paths: Sequence[Path]) -> str:
    first, *others = dict.fromkeys(paths)
    return f"{first} and {len(others)} more" if others else str(first)


def encode(table: Table, schema: Schema, remarks: Remarks | None = None) -> tuple[Tensor, Tensor]:
    """Inputs of shape (examples, `schema.width`) and targets as the schema's task has them; `remarks` of tables that are read together."""
    schema.check_target(f"of {table.path}")
    # first: a missing target is refused before columns left out give a warning
    targets = schema.task.targets([_target_values(table, column, schema) for column in schema.task.columns])
    return encode_inputs(table, schema, remarks), targets


def encode_inputs(table: Table, schema: Schema, remarks: Remarks | None = None) -> Tensor:
    """Numbers in [-1, 1] by their declared range and categories as 0 and 1, in the order of the schema, not of the file."""
    known = {*schema.targets, *(column.name for column in schema.columns)}
    with nullcontext(remarks) if remarks else Remarks() as told:
        parts = [_INPUTS[column.kind](table, column, schema, told) for column in schema.used]
        told.unknown(table, (name for name in table.names if name not in known))
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _target_values(table: Table, column: TargetColumn, schema: Schema) -> np.ndarray:
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
            raise MismatchError(
                f"{where} is {cell!r}, not one of the classes {quoted(column.values)}: correct it",
                "declare the class in the schema",
            )
        raise UsageError(f"{where} is {cell!r} and the schema says number: correct it, or leave the line out")

    return _decoded(table, column.name, schema, number)


def column_values(table: Table, column: Column, schema: Schema, remarks: Remarks) -> np.ndarray:
    """The values of a column: numbers as they stand there and dates in days, NaN where one is missing; categories by their place
    among the declared values, -1 where one is missing. Numbers outside of their range go to the remarks."""
    places = column.numbers

    def number(cell: str, row: int) -> float:
        if cell in schema.missing:
            return np.nan
        if (found := table.number(cell, schema.decimal)) is None:
            raise MismatchError(
                f"{table.place(row, column.name)} is {cell!r} and the schema says number: correct it",
                "add it to `missing` in the schema if it means that the value is not known",
            )
        return found

    def date(cell: str, row: int) -> float:
        if cell in schema.missing:
            return np.nan
        if (found := as_days(cell, column.format, column.since)) is None:
            raise MismatchError(
                f"{table.place(row, column.name)} is {cell!r} and the schema says that dates are written as {column.format}: correct it",
                "correct the schema, or add it to `missing` there if it means that the date is not known",
            )
        return found

    def category(cell: str, row: int) -> float:
        if (found := places.get(canonical(cell))) is not None:
            return found
        if cell in schema.missing or column.undeclared == "missing":
            return -1
        raise MismatchError(
            f"{table.place(row, column.name)} is {cell!r}, not one of the declared values {quoted(column.values)}: correct it",
            'declare it or an alias in the schema, or write undeclared = "missing" there',
        )

    decode = {"number": number, "date": date, "category": category}[column.kind]
    values = _decoded(table, column.name, schema, decode)
    if column.kind != "category":
        remarks.outside(table, column, values)
    return values


def _numbers(table: Table, column: Column, schema: Schema, remarks: Remarks) -> np.ndarray:
    """From its range to -1..1. What is missing is in the middle of the range, and where the schema says so has an input of its own."""
    values, (low, high) = column_values(table, column, schema, remarks), column.range
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    scaled: np.ndarray = np.nan_to_num((np.clip(values, low, high) - middle) / half, nan=0.0)
    parts = [scaled, np.isnan(values)] if column.missing else [scaled]
    return np.stack(parts, axis=1).astype(np.float32)


def _categories(table: Table, column: Column, schema: Schema, remarks: Remarks) -> np.ndarray:
    """One input for each declared value but the first. What is missing has an input of its own where the schema says so; otherwise it
    lies between all values."""
    places, values = column_values(table, column, schema, remarks).astype(np.int64), len(column.values)
    codes = np.zeros((values + 1, column.width), dtype=np.float32)
    codes[1:values, : values - 1] = np.eye(values - 1)
    codes[-1] = np.eye(1, column.width, column.width - 1) if column.missing else 1 / values
    coded: np.ndarray = codes[places]  # -1 is the last
    return coded


_INPUTS: dict[str, Callable[[Table, Column, Schema, Remarks], np.ndarray]] = {
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
        raise MismatchError(
            f"{table.path}: there is no {what} {name!r}, which the schema declares{hint}: the file has {quoted(table.names)}; "
            "rename the column there",
            "correct the schema",
        )
    numbers: dict[str, float] = {}
    for row, cell in enumerate(table.columns[name]):
        if cell not in numbers:
            numbers[cell] = decode(cell, row)
    return np.array([numbers[cell] for cell in table.columns[name]], dtype=np.float64)
