"""The public description of tables or images: what columns, ranges, categories and classes all nodes agree on before they read their data.

Everything that turns a cell into a number comes from here and nothing from the data of any node:
ranges scale, their middle stands for what is missing, and declared values are the categories.
So no statistic of private data is computed, and none leaves.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from dpps.data.tables import Table, as_number
from dpps.errors import UsageError, unknown

KINDS = ("number", "category", "ignore")
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?")
"""What stands in a cell whose value is not known, unless the schema says otherwise."""
MOST_CATEGORIES = 20
"""A text column with more different values is rather a name or a remark than a category, and is ignored."""
_KEYS = ("label", "classes", "missing", "columns")
_IMAGE_KEYS = ("classes", "images")
_COLUMN_KEYS = {
    "number": ("name", "kind", "range"),
    "category": ("name", "kind", "values", "undeclared"),
    "ignore": ("name", "kind"),
}


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: as in the header.
        kind: "number", "category" or "ignore".
        range: of a number: what is mapped to -1 and to 1. What lies outside counts as the nearer end.
        values: of a category, each with an input of its own.
        undeclared: "missing" if any other value of a category counts as missing; "refuse" if it is a mistake.
    """

    name: str
    kind: str
    range: tuple[float, float] = (-1.0, 1.0)
    values: tuple[str, ...] = ()
    undeclared: str = "refuse"

    @property
    def width(self) -> int:
        """How many inputs of the model it becomes: a category has one for each value and one for what is missing."""
        return {"number": 1, "category": len(self.values) + 1, "ignore": 0}[self.kind]


@dataclass(frozen=True)
class Schema:
    """Columns in the order of the model's inputs, and the label.

    `classes` are the label's values, in the order of the model's outputs; `missing` what stands for a value that is not known.
    `label` is empty where there is nothing to predict: statistics need none.
    """

    columns: tuple[Column, ...]
    label: str = ""
    classes: tuple[str, ...] = ()
    missing: tuple[str, ...] = MISSING

    def check_label(self, where: str | Path) -> None:
        """Refuse a schema without a label where a model is to learn one."""
        if not self.label:
            raise UsageError(
                f'the schema {where} names no label: add label = "COLUMN" and its classes to learn from these tables; without one '
                "they can be asked questions (dpps stats)"
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

    def checksum(self) -> str:
        """Equal for schemas that say the same."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """The text of a schema file."""
        named = ("label", "classes", "missing") if self.label else ("missing",)
        lines = [f"{name} = {_toml(getattr(self, name))}" for name in named]
        for column in self.columns:
            lines += ["", "[[columns]]", f"name = {_toml(column.name)}", f"kind = {_toml(column.kind)}"]
            if column.kind == "number":
                lines.append(f"range = {_toml(column.range)}")
            elif column.kind == "category":
                lines.append(f"values = {_toml(column.values)}")
                if column.undeclared != "refuse":
                    lines.append(f"undeclared = {_toml(column.undeclared)}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ImageSchema:
    """What all nodes agree on before they read their images: the names of the sub-folders, and (channels, height, width)."""

    classes: tuple[str, ...]
    shape: tuple[int, int, int]

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
    label: Any = ""
    classes: tuple[str, ...] = ()
    if "label" in table or "classes" in table:
        label = table.get("label")
        if not isinstance(label, str) or not label:
            raise UsageError(
                f'{where}: label is {label!r}: name the column to predict, such as label = "diagnosis"'
            )
        classes = _texts(table.get("classes"), f"{where}: classes", least=2)
    missing = table.get("missing", list(MISSING))
    if not isinstance(missing, list) or not all(isinstance(word, str) for word in missing):
        raise UsageError(
            f'{where}: missing is {missing!r}: give a list of texts in quotes, such as ["", "NA"]'
        )
    entries = table.get("columns")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{where}: columns are missing: write [[columns]] with name and kind for each")
    columns = tuple(_column(entry, k, where) for k, entry in enumerate(entries, start=1))
    names = [column.name for column in columns]
    for name in names:
        if names.count(name) > 1 or name == label:
            whose = "the label and a column" if name == label else "two columns"
            raise UsageError(f"{where}: {whose} are called {name!r}: leave one out")
    schema = Schema(columns, label, classes, tuple(missing))
    if not schema.used:
        raise UsageError(
            f"{where}: no column is of the kind number or category: a model needs one input or more"
        )
    return schema


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
    if kind == "number":
        return Column(name, kind, range=_range(entry.get("range"), where))
    undeclared = entry.get("undeclared", "refuse")
    if undeclared not in ("refuse", "missing"):
        raise unknown(f"undeclared in {where}", undeclared, ("refuse", "missing"))
    return Column(
        name, kind, values=_texts(entry.get("values"), f"{where}: values", least=1), undeclared=undeclared
    )


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
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(part) for part in value) + "]"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


# Guessing


def guess_schema(table: Table, label: str | None = None) -> Schema:
    """A first schema: kinds, rounded ranges, categories and classes as this table has them.

    What is guessed is read off private data and becomes public with the schema: better give a made-up example of the data.
    """
    if label is None:
        return _as_read(Schema(tuple(_guess(name, table) for name in table.names)), table)
    if label not in table.names:
        raise unknown(f"label for {table.path}", label, table.names)
    classes = _values(table.columns[label])
    if len(classes) < 2 or len(classes) > max(MOST_CATEGORIES, len(table) // 2):
        raise UsageError(
            f"{table.path}: the label {label!r} has {len(classes)} different values in {len(table)} examples: a column with 2 "
            "or more classes that occur again and again is needed; choose another label"
        )
    columns = tuple(_guess(name, table) for name in table.names if name != label)
    return _as_read(Schema(columns, label, classes), table)


def _as_read(schema: Schema, table: Table) -> Schema:
    """A guessed schema as it will be read from its file."""
    return _parse_columns(tomllib.loads(schema.to_toml()), f"the schema of {table.path}")


def _guess(name: str, table: Table) -> Column:
    cells = table.columns[name]
    known = [cell for cell in cells if cell not in MISSING]
    numbers = [table.number(cell) for cell in known]
    finite = [number for number in numbers if number is not None]
    if known and len(finite) == len(known):
        if len(finite) > 10 and all(b - a == 1 for a, b in pairwise(sorted(finite))):
            return Column(name, "ignore")  # running numbers, in any order: they name records
        return Column(name, "number", rounded_range(finite))
    values = _values(cells)
    if not values or len(values) > MOST_CATEGORIES or len(values) == len(known) > 2:
        return Column(name, "ignore")
    return Column(name, "category", values=values)


def _values(cells: Sequence[str]) -> tuple[str, ...]:
    """The different values, in the order of numbers where all are numbers, otherwise of the alphabet."""
    found = {canonical(cell) for cell in cells if cell not in MISSING}
    numbers = {value: as_number(value) for value in found}
    if None in numbers.values():
        return tuple(sorted(found))
    return tuple(sorted(found, key=lambda value: (numbers[value], value)))


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
