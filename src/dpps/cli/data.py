"""`dpps data describe`: drafts a schema for your own tables."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from tyro.conf import Positional, arg

from dpps.cli.main import DONE, parse_options, plain_console, plain_table
from dpps.data.images import ImageSchema, guess_image_schema
from dpps.data.schema import ASKED, TARGET, Column, Schema, guess_schema
from dpps.data.tables import read_table
from dpps.disk import check_target, write_aside
from dpps.errors import UsageError, quoted
from dpps.tasks import TASKS, Classification, Task, parse_target
from dpps.tasks.task import numbers

_PUBLIC = """# Public: every node of a run reads its data by this file, and anybody may see it. Agree on it before the run.
# Lines marked "guessed" come from one file. Correct them to what is known without looking at data: the range of a number that is
# physically possible, the categories of a questionnaire, the classes of a diagnosis. Every guess that stays reveals something about
# that file. Remove the mark of a line that you have checked.
# [target] kind: class (column, classes), number (column, range), survival (time, event, edges: the ends of the intervals of time).
# [[columns]] kind: number (range: becomes -1 to 1), category (values; aliases = {"F" = ["f", "female"]}), date (since, range in days,
# format), ignore. A missing value counts as the middle of the range; missing = true adds an input that marks it.
"""
_GUESSED = "  # guessed"
_MANY_CLASSES = 20
"""Above so many different numbers, the column is probably a quantity."""
Made = TypeVar("Made")

_PUBLIC_IMAGES = """# Public: every node of a run reads its images by this file, and anybody may see it. Agree on it before the run.
# It was guessed from one folder. Correct it to what is known without looking at data. Images of another size are scaled to this one.
"""


@dataclass(frozen=True)
class DescribeConfig:
    """Draft a schema from one table (kinds of columns, rounded ranges, categories, classes) or from a folder of images.

    The schema becomes public. Correct it so that it says only what is known without looking at data. On a terminal, the
    command asks for the possible range of every number. What you leave to its guess is marked in the file.

    Example: dpps data describe node-0/train.csv --label diagnosis --out schema.toml
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """A table, or a folder of images.

    A table is .csv, .tsv, .parquet or .npz. A made-up one with the same columns is best: then nothing private is read.
    """
    label: Annotated[str | None, arg(metavar="COLUMN", help_behavior_hint="")] = None
    """Column to predict (tables only); dpps stats needs none.

    In a folder of images, the sub-folders are the classes.
    """
    task: Annotated[str, arg(metavar="{" + ",".join(TASKS.names()) + "}")] = "classification"
    """A class, a number, or the time of an event."""
    time: Annotated[str | None, arg(metavar="COLUMN", help_behavior_hint="")] = None
    """Time of the event (survival).

    If the event was not observed, the time of the last observation.
    """
    event: Annotated[str | None, arg(metavar="COLUMN", help_behavior_hint="")] = None
    """Whether the event was observed, 1 or 0 (survival)."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("schema.toml")
    """Schema to write."""
    overwrite: bool = False
    """Replace an existing schema."""


def describe(arguments: list[str]) -> int:
    """Guess a schema and write it."""
    config = parse_options(DescribeConfig, arguments, "dpps data describe")
    schema = _guess(config)
    check_target("--out", config.out)
    if config.out.exists() and not config.overwrite:
        raise UsageError(
            f"--out {config.out} exists, perhaps with corrections of yours: add --overwrite or choose another file"
        )
    if isinstance(schema, ImageSchema):
        text = _PUBLIC_IMAGES + schema.to_toml()
    else:
        known: set[str] = set()
        if sys.stdin.isatty() and sys.stdout.isatty():
            schema, known = ask_ranges(schema, _typed)
        text = _PUBLIC + schema.to_toml(_GUESSED, known)
    write_aside(config.out, text.encode())
    _print_schema(schema, config.out)
    return DONE


def _typed(question: str) -> str:
    """What is typed; nothing after Ctrl-D."""
    try:
        return input(question)
    except EOFError:
        print()
        return ""


def ask_ranges(schema: Schema, ask: Callable[[str], str]) -> tuple[Schema, set[str]]:
    """The schema with the public ranges and edges that a person gives, and the columns they were given for. `ask` shows a question and
    returns the answer; an empty one keeps the guess."""
    known, columns, target = set(), list(schema.columns), schema.target
    print(
        "Give the lowest and the highest value that is possible, not those of your data (age: 0 120). Enter keeps the guess."
    )

    def answered(what: str, guess: Sequence[float], made: Callable[[tuple[float, ...]], Made]) -> Made | None:
        while text := ask(f"{what} [{' '.join(f'{x:g}' for x in guess)}]: ").strip():
            try:
                return made(tuple(float(word) for word in re.split(r"[,;\s]+|to", text) if word))
            except (ValueError, UsageError) as error:
                print(
                    error if isinstance(error, UsageError) else f"{text!r} is no list of numbers: write 0 120"
                )
        return None

    for k, column in enumerate(columns):
        if column.kind == "number":
            found = answered(column.name, column.range, partial(_with_range, column))
            if found is not None:
                columns[k] = found
                known.add(column.name)
    declared = {} if target is None else target.declaration()
    for key in ASKED:
        if target is not None and key in declared:
            what = f"{', '.join(schema.targets)}{': ends of the intervals of time' if key == 'edges' else ''}"
            task = answered(what, declared[key], partial(_with_values, target, key))
            if task is not None:
                target = task
                known.add(TARGET)
    return replace(schema, columns=tuple(columns), target=target), known


def _with_range(column: Column, given: tuple[float, ...]) -> Column:
    low, high = numbers({"range": given}, "range", column.name, "[0, 120]", count=2)
    return replace(column, range=(low, high))


def _with_values(target: Task, key: str, given: tuple[float, ...]) -> Task:
    return parse_target({**target.declaration(), "kind": target.kind, key: given}, "what you typed")


def _guess(config: DescribeConfig) -> Schema | ImageSchema:
    given = {"label": config.label, "time": config.time, "event": config.event}
    columns = {role: name for role, name in given.items() if name is not None}
    classes = TASKS[config.task] is Classification
    if config.file.is_dir():
        for role, name in columns.items():
            raise UsageError(
                f"--{role} {name}: {config.file} is a folder, and its sub-folders are the classes: leave it out"
            )
        if not classes:
            raise UsageError(f"--task {config.task}: images have classes: leave it out")
        return guess_image_schema(config.file)
    if not columns and not classes:
        raise UsageError(f"--task {config.task} needs a target: name its columns, or leave it out")
    return guess_schema(read_table(config.file), task=config.task, **columns)


def _print_schema(schema: Schema | ImageSchema, out: Path) -> None:
    console = plain_console(markup=False)
    lines = plain_table(("column", "kind", "guessed"))
    then = f"dpps train --nodes N --node-data 'DIR/node-{{rank}}' --schema {out} --model linear --shared all --baselines"
    hint = ""
    if isinstance(schema, ImageSchema):
        correct = "the classes by what can occur, and the size by what the model should read"
        lines.add_row("images", "channels, height, width", ", ".join(map(str, schema.shape)))
        lines.add_row("sub-folders", "target", quoted(schema.classes))
    else:
        correct = "ranges by what is physically possible, and categories and classes by what can occur"
        for column in schema.columns:
            lines.add_row(column.name, column.kind, _guessed(column))
        if schema.target is None:
            then = (
                f"dpps stats --nodes N --node-data 'DIR/node-{{rank}}' --schema {out} --ask 'count()' (with --label COLUMN "
                "a model can be trained)"
            )
        else:
            declared = schema.target.declaration().items()
            shown = [f"{key} {_shown(value)}" for key, value in declared if not isinstance(value, str)]
            lines.add_row(", ".join(schema.targets), "target", "; ".join(shown))
        classes = schema.target.classes if isinstance(schema.target, Classification) else ()
        if len(classes) > _MANY_CLASSES and all(re.fullmatch(r"-?[\d.]+", name) for name in classes):
            hint = f"The target has {len(classes)} classes, all numbers: to predict a number, add --task regression.\n"
    console.print(lines)
    console.print(
        f"\n{out} becomes PUBLIC, and these guesses come from the data. Before anybody else sees it, replace {correct}."
    )
    console.print(f"{hint}Then: {then}")


def _shown(value: Sequence[Any]) -> str:
    return (
        quoted(value)
        if all(isinstance(part, str) for part in value)
        else ", ".join(f"{part:g}" for part in value)
    )


def _guessed(column: Column) -> str:
    if column.kind == "category":
        return quoted(column.values)
    if column.kind == "ignore":
        return "(names a record, or has too many different texts)"
    days = f" days since {column.since}, written as {column.format}" if column.kind == "date" else ""
    return f"{column.range[0]:g} to {column.range[1]:g}{days}"
