"""`dpps data describe`: a schema for tables of one's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table as Lines
from tyro.conf import Positional, arg

from dpps.cli.console import plain_console
from dpps.cli.main import DONE, parse_options
from dpps.data.images import ImageSchema, guess_image_schema
from dpps.data.schema import Column, Schema, guess_schema
from dpps.data.tables import read_table
from dpps.disk import check_target, write_aside
from dpps.errors import UsageError, quoted

_PUBLIC = """# Public: every node of a run reads its data by this file, and anybody may see it. Agree on it before the run.
# It was guessed from one file. Correct it to what is known without looking at data: the range of a number that is physically
# possible, the categories of a questionnaire, the classes of a diagnosis. Every guess that stays reveals something about that file.
# kind: number (range: becomes -1 to 1; missing = middle), category (values: one input each, and one for missing), ignore.
"""

_PUBLIC_IMAGES = """# Public: every node of a run reads its images by this file, and anybody may see it. Agree on it before the run.
# It was guessed from one folder. Correct it to what is known without looking at data. Images of another size are scaled to this one.
"""


@dataclass(frozen=True)
class DescribeConfig:
    """Draft a schema from one table (kinds of columns, rounded ranges, categories, classes) or from a folder of images.

    The schema becomes public. Correct it to what is known without looking at data.

    Example: dpps data describe node-0/train.csv --label diagnosis --out schema.toml
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """A table, or a folder of images.

    A table is .csv, .tsv, .parquet or .npz. Best is a made-up one with the same columns, so that nothing private is read.
    """
    label: Annotated[str | None, arg(metavar="COLUMN", help_behavior_hint="")] = None
    """The column to predict (tables only); dpps stats needs none.

    A folder of images has its classes as sub-folders.
    """
    out: Annotated[Path, arg(metavar="FILE")] = Path("schema.toml")
    """Schema to write."""
    overwrite: bool = False
    """Replace a schema that is there."""


def describe(arguments: list[str]) -> int:
    """Guess a schema and write it."""
    config = parse_options(DescribeConfig, arguments, "dpps data describe")
    schema = _guess(config.file, config.label)
    check_target("--out", config.out)
    if config.out.exists() and not config.overwrite:
        raise UsageError(
            f"--out {config.out} exists, perhaps with corrections of yours: add --overwrite or choose another file"
        )
    about = _PUBLIC if isinstance(schema, Schema) else _PUBLIC_IMAGES
    write_aside(config.out, (about + schema.to_toml()).encode())
    _print_schema(schema, config.out)
    return DONE


def _guess(file: Path, label: str | None) -> Schema | ImageSchema:
    if file.is_dir():
        if label is not None:
            raise UsageError(
                f"--label {label}: {file} is a folder, and its sub-folders are the classes: leave it out"
            )
        return guess_image_schema(file)
    table = read_table(file)
    return guess_schema(table, label)


def _print_schema(schema: Schema | ImageSchema, out: Path) -> None:
    console = plain_console(markup=False)
    lines = Lines(box=None, pad_edge=False)
    for title in ("column", "kind", "guessed"):
        lines.add_column(title)
    if isinstance(schema, Schema):
        for column in schema.columns:
            lines.add_row(column.name, column.kind, _guessed(column))
    else:
        lines.add_row("images", "channels, height, width", ", ".join(map(str, schema.shape)))
    label = schema.label if isinstance(schema, Schema) else "sub-folders"
    if label:
        lines.add_row(label, "label", quoted(schema.classes))
    console.print(lines)
    console.print(
        f"\nThese guesses come from the data, and {out} becomes PUBLIC: correct {_correct(schema)}, before anybody else sees it."
    )
    if not label:
        console.print(
            f"Then: dpps stats --nodes N --node-data 'DIR/node-{{rank}}' --schema {out} --ask 'count()' (with --label COLUMN "
            "a model can be trained)"
        )
        return
    console.print(
        f"Then: dpps train --nodes N --node-data 'DIR/node-{{rank}}' --schema {out} --model linear --shared all --baselines"
    )


def _correct(schema: Schema | ImageSchema) -> str:
    if isinstance(schema, Schema):
        return "ranges to what is physically possible and categories and classes to what can occur"
    return "the classes to what can occur and the size to what the model shall read"


def _guessed(column: Column) -> str:
    if column.kind == "number":
        return f"{column.range[0]:g} to {column.range[1]:g}"
    return (
        quoted(column.values)
        if column.kind == "category"
        else "(names a record, or has too many different texts)"
    )
