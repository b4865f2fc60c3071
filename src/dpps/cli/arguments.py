"""From words to options: what the parser refuses becomes one line like every other mistake."""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from difflib import get_close_matches
from textwrap import dedent
from typing import Any, TypeVar

import tyro

from dpps.errors import UsageError

Options = TypeVar("Options")

_SAID = (
    (
        r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)",
        r"\1 is \2: it must be a whole number",
    ),
    (r"Error parsing (\S+): could not convert string to float: (.*)", r"\1 is \2: it must be a number"),
    (r"Error parsing (\S+): no type .*INT.* from \[(.*?)\]", r"\1 is \2: it must be a whole number"),
    (r"Error parsing (\S+): no type .*FLOAT.* from \[(.*?)\]", r"\1 is \2: it must be a number"),
    (r"invalid choice (.*) for argument '(.*)'\. Expected one of \((.*)\)", r"\2 is \1: choose one of \3"),
    (r"Missing value for argument '(.*)'.*", r"\1 needs a value"),
    (
        r"Unrecognized options: (.*)",
        r"unexpected \1: a value belongs right behind its option",
    ),
)
"""The parser's words, as far as they are known, and ours: the option, what it was, what is allowed."""

_FRAME = re.compile(r"^[│╭╰|+]?(.*?)[│╮╯|+]?\s*$")  # round where the terminal can, otherwise of plain letters


def parse_options(
    kind: type[Options], arguments: Sequence[str], prog: str, default: Options | None = None
) -> Options:
    """The options in `arguments`.

    Args:
        kind: a dataclass with one field per option.
        arguments: as typed.
        prog: the command, for messages and --help.
        default: where options that are not given come from.
    """
    _refuse_unknown(kind, arguments, prog)
    told = io.StringIO()
    more: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with redirect_stderr(told):
            found: Options = tyro.cli(kind, args=arguments, prog=prog, **more)
    except SystemExit as error:
        if not error.code:  # --help
            raise
        raise UsageError(f"{_one_line(told.getvalue(), prog)}; {prog} --help explains every option") from None
    return found


def _refuse_unknown(kind: type[Any], arguments: Sequence[str], prog: str) -> None:
    known = {"--help"}
    for name in (field.name.replace("_", "-") for field in fields(kind)):
        known |= {f"--{name}", f"--no-{name}"}
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-")
        if name.startswith("--") and name not in known:
            near = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{prog} has no option {name}: {hint}{prog} --help lists them")


def _one_line(told: str, prog: str) -> str:
    """What stands in the first part of the parser's box; of missing options their names alone."""
    inside = [match[1] for line in told.splitlines() if (match := _FRAME.match(line))]
    rules = [k for k, line in enumerate(inside) if line.rstrip().endswith(("──", "--"))]
    # between the title and what explains
    part = inside[rules[0] + 1 : rules[1]] if len(rules) > 1 else inside
    part = dedent("\n".join(part)).splitlines()
    missing = [line.strip() for line in part if re.match(r" {4}\S", line)]
    if part and part[0].strip().startswith("Missing from") and missing:
        return f"{prog} needs {' and '.join(missing)}"
    words = " ".join(line.strip() for line in part).strip().rstrip(". ")
    for pattern, told_as in _SAID:
        if said := re.match(pattern, words):
            return said.expand(told_as)
    return words.removeprefix("Error parsing ")
