"""The public description of a table: what columns, ranges, categories and classes all nodes agree on before they read their data.

Everything that turns a cell into a number comes from here and nothing from the data of any node:
ranges scale, their middle stands for what is missing, and declared values are the categories.
So no statistic of private data is computed, and none leaves.
"""

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpps.data.images import ImageSchema, parse_image_schema
from dpps.data.table import as_number
from dpps.errors import UsageError, unknown

KINDS = ("number", "category", "ignore")
MISSING = ("", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None", "?")
"""What stands in a cell whose value is not known, unless the schema says otherwise."""
_KEYS = ("label", "classes", "missing", "columns")
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

    Attributes:
        columns: all but the label.
        label: the name of the label's column.
        classes: the label's values, in the order of the model's outputs.
        missing: what stands for a value that is not known.
    """

    columns: tuple[Column, ...]
    label: str
    classes: tuple[str, ...]
    missing: tuple[str, ...] = MISSING

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
        lines = [f"{name} = {_toml(getattr(self, name))}" for name in ("label", "classes", "missing")]
        for column in self.columns:
            lines += ["", "[[columns]]", f"name = {_toml(column.name)}", f"kind = {_toml(column.kind)}"]
            if column.kind == "number":
                lines.append(f"range = {_toml(column.range)}")
            elif column.kind == "category":
                lines.append(f"values = {_toml(column.values)}")
                if column.undeclared != "refuse":
                    lines.append(f"undeclared = {_toml(column.undeclared)}")
        return "\n".join(lines) + "\n"


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
    return parse_any(table, str(path))


def parse_any(table: Mapping[str, Any], where: str) -> Schema | ImageSchema:
    """The schema in a TOML table, of tables or of images.

    Args:
        table: as `tomllib` reads it.
        where: the file, for messages.
    """
    return parse_image_schema(table, where) if "images" in table else parse_schema(table, where)


def parse_schema(table: Mapping[str, Any], where: str) -> Schema:
    """The schema in a TOML table.

    Args:
        table: as `tomllib` reads it.
        where: the file, for messages.
    """
    for key in table:
        if key not in _KEYS:
            raise unknown(f"entry in {where}", key, _KEYS)
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
