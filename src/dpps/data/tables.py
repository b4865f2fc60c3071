"""Reads tables as columns of text: CSV (comma, semicolon or tab; quoted), Parquet, .npz and data frames."""

import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpps.errors import UsageError, needs_extra

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
TEXT = (".csv", ".tsv")
ENDINGS = (*TEXT, ".parquet", ".npz")


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of text.

    Attributes:
        path: the file.
        columns: the cells of every column by its name; a column without a name is "column 1", "column 2", ...
            A value that is not there is the empty text.
        lines: the line in which each row of a text file begins; in other files the number of the row, from 1.
        headed: whether the file names its columns.
        separator: between the cells of a text file; empty in other files.
    """

    path: Path
    columns: dict[str, list[str]]
    lines: Sequence[int]
    headed: bool = True
    separator: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns."""
        return tuple(self.columns)

    def __len__(self) -> int:
        return len(self.lines)

    def content(self) -> str:
        """A checksum of its rows, in whatever order they are."""
        cells = zip(*self.columns.values(), strict=True)
        rows = (hashlib.sha256("\0".join(row).encode()).digest() for row in cells)
        return hashlib.sha256("\0".join(self.names).encode() + b"".join(sorted(rows))).hexdigest()

    def number(self, cell: str, decimal: str = ".") -> float | None:
        """As `as_number`, written as in this file."""
        return as_number(cell, ";" if decimal == "," else self.separator)

    def place(self, row: int, column: str) -> str:
        """Where a cell is: file, line and column, counted from 1."""
        name = f" ({column})" if self.headed else ""
        kind = "line" if self.separator else "row"
        return f"{self.path}, {kind} {self.lines[row]}, column {self.names.index(column) + 1}{name}"


def as_number(text: str, separator: str = "") -> float | None:
    """The finite number in a cell, or None. Between semicolons `1,5` is one and a half, as spreadsheets write it."""
    if separator == ";" and text.count(",") == 1 and "." not in text:
        text = text.replace(",", ".")
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) and "_" not in text else None


def read_table(path: Path, headed: bool | None = True) -> Table:
    """Read a table; the ending of its name says what it is.

    `headed`: whether the first line of a text file holds column names; None: it does unless all its cells are numbers.
    """
    if path.suffix not in ENDINGS:
        raise UsageError(f"{path} is no table that can be read: give one of {', '.join(ENDINGS)}")
    try:
        if path.suffix in TEXT:
            return _read_text(path, headed)
        return _read_parquet(path) if path.suffix == ".parquet" else _read_npz(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror or error}): name another file") from error


def frame_table(frame: Any) -> Table:
    """The table that a pandas frame holds, or what has `to_pandas()`."""
    if hasattr(frame, "to_pandas"):
        frame = frame.to_pandas()
    if not hasattr(frame, "columns") or not hasattr(frame, "isna"):
        raise UsageError(
            f"the table is a {type(frame).__name__}: give a file, a pandas frame, or what has to_pandas()"
        )
    columns = [frame.iloc[:, k] for k in range(frame.shape[1])]
    values = [each.astype(object).where(each.notna(), None).tolist() for each in columns]
    return _of_values(Path("data frame"), [str(name) for name in frame.columns], values)


def _read_text(path: Path, headed: bool | None) -> Table:
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UsageError(
            f"{path}, line {line}: byte {content[error.start]:#04x} is not UTF-8: save the file as UTF-8 (in "
            "a spreadsheet: CSV UTF-8)"
        ) from error
    # the separator is what occurs most often in the first line, outside of quotes
    first = re.sub(r'"[^"]*"', "", text.lstrip("\r\n")).partition("\n")[0]
    separator = max(SEPARATORS, key=first.count)
    records, starts = _records(path, text, separator)
    if not records:
        raise UsageError(f"{path} is empty: a line of column names and one line per example are needed")
    if headed is None:
        headed = any(as_number(cell, separator) is None for cell in records[0])
    width = len(records[0])
    for record, line in zip(records, starts, strict=True):
        if len(record) != width:
            raise UsageError(
                f"{path}, line {line}: {len(record)} cells and {width} in line {starts[0]} (separated by {SEPARATORS[separator]}): "
                'add what is missing, or put a cell that holds the separator in quotes ("a, b")'
            )
    names = [(cell if headed else "") or f"column {k}" for k, cell in enumerate(records[0], start=1)]
    columns = [list(cells) for cells in zip(*records[headed:], strict=True)]
    return _checked(path, names, columns, starts[headed:], headed, separator)


def _records(path: Path, text: str, separator: str) -> tuple[list[list[str]], list[int]]:
    """Every record that is not blank, without white space around its cells, and the line it begins in."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    records, starts, start = [], [], 1
    try:
        for record in reader:
            cells = [cell.strip() for cell in record]
            if any(cells):
                records.append(cells)
                starts.append(start)
            start = reader.line_num + 1  # a quoted cell may hold line ends
    except csv.Error as error:
        raise UsageError(
            f"{path}, line {start}: {error}: close the quotes, and write a quotation mark inside of quotes twice"
        ) from error
    return records, starts


def _read_parquet(path: Path) -> Table:
    with needs_extra("tables"):
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    try:
        with ParquetFile(path) as file:
            found = file.read()
            columns = [column.to_pylist() for column in found.columns]
    except ArrowException as error:
        raise UsageError(f"{path} is no Parquet file: {str(error).splitlines()[0]}") from error
    return _of_values(path, found.column_names, columns)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file."""
    if not path.is_file():
        raise UsageError(f"{path} cannot be read (No such file): name another file")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays}
    except (OSError, TypeError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is no .npz file of numbers or texts: {error}") from error


def _read_npz(path: Path) -> Table:
    found = read_arrays(path)
    for name, array in found.items():
        if array.ndim != 1:
            raise UsageError(
                f"{path}: array {name!r} has {array.ndim} dimensions: with a schema give one array of one dimension per column, "
                "under the column's name; arrays x and y are read without a schema"
            )
    return _of_values(path, list(found), [array.tolist() for array in found.values()])


def _of_values(path: Path, names: list[str], columns: Sequence[Sequence[object]]) -> Table:
    """A table from values of any type, written as in a CSV file."""
    lengths = {len(column) for column in columns} or {0}
    if len(lengths) > 1:
        raise UsageError(
            f"{path}: columns of {min(lengths)} and {max(lengths)} values: all need the same number"
        )
    texts = [[_as_text(value) for value in column] for column in columns]
    return _checked(path, names, texts, range(1, min(lengths) + 1))


def _as_text(value: object) -> str:
    """The text of a value; empty for null and NaN."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value).strip()


def _checked(
    path: Path,
    names: list[str],
    columns: list[list[str]],
    lines: Sequence[int],
    headed: bool = True,
    separator: str = "",
) -> Table:
    if len(names) < 2:
        raise UsageError(
            f"{path} has {len(names)} column: the label and one input or more are needed, separated by comma, semicolon or tab"
        )
    for place, name in enumerate(names):
        if (first := names.index(name)) < place:
            raise UsageError(
                f"{path}: columns {first + 1} and {place + 1} are both called {name!r}: rename one"
            )
    if not lines:
        raise UsageError(f"{path} has no examples: one or more are needed")
    return Table(path, dict(zip(names, columns, strict=True)), lines, headed, separator)
