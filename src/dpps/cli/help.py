"""The texts of `--help`, derived from the dataclass of a command's options; completion scripts and the reference use them, too.

The docstring of a field is its help: the first paragraph is the line of `--help`, the others are for the reference. Where a
default depends on other options, the line ends with it, in brackets.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.text import Text
from tyro.conf import Positional

ARGUMENTS, OPTIONS = "arguments", "options"
_KINDS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclass(frozen=True)
class Option:
    """One option, or one argument without a name.

    Attributes:
        flag: as it is typed; what an argument stands for.
        value: what follows it; empty for a switch.
        choices: the words it can be, or forms of them.
        default: as text; empty where there is none, or it depends on others.
        help: one line.
        details: the rest.
        required: whether it must be there.
        is_path: whether files complete it.
        positional: whether it has no name.
    """

    flag: str
    value: str = ""
    choices: tuple[str, ...] = ()
    default: str = ""
    help: str = ""
    details: str = ""
    required: bool = False
    is_path: bool = False
    positional: bool = False

    @property
    def line(self) -> str:
        """Help, choices and default."""
        words = f"{self.help}: {', '.join(self.choices)}" if self.choices else self.help
        return f"{words} [{self.default}]" if self.default else words

    @property
    def spelled(self) -> str:
        """As it is typed, with what follows."""
        return f"{self.flag} {self.value}".rstrip()


def groups_of(kind: type[Any]) -> dict[str, list[Option]]:
    """The options of a command by group, in the order of its fields.

    Args:
        kind: a dataclass with one field per option. Its `groups` say where a group begins; `also` are words that are no
            fields; `unused` are fields that the command does not have, although the class it extends does.
    """
    texts, hints = _texts(kind), get_type_hints(kind, include_extras=True)
    found: dict[str, list[Option]] = {}
    title = OPTIONS
    for field in dataclasses.fields(kind):
        title = getattr(kind, "groups", {}).get(field.name, title)
        if field.name not in getattr(kind, "unused", ()):
            option = _option(field, hints[field.name], texts.get(field.name, ""))
            found.setdefault(ARGUMENTS if option.positional else title, []).append(option)
    also: Mapping[str, tuple[str, str]] = getattr(kind, "also", {})
    more = [Option(flag, value, help=text, is_path=value == "FILE") for flag, (value, text) in also.items()]
    last = "run" if "run" in found else next((name for name in reversed(found) if name != ARGUMENTS), OPTIONS)
    found.setdefault(last, []).extend([*more, Option("--help", help="Show this help")])
    return found


def options_of(kind: type[Any]) -> list[Option]:
    """The options of a command."""
    return [option for group in groups_of(kind).values() for option in group]


def description(kind: type[Any]) -> list[str]:
    """The paragraphs of a command's docstring."""
    return inspect.cleandoc(kind.__doc__ or "").split("\n\n")


def usage(kind: type[Any], prog: str) -> str:
    """How a command is typed."""
    options = options_of(kind)
    words = [o.flag if o.required else f"[{o.flag}]" for o in options if o.positional]
    words += [o.spelled for o in options if o.required and not o.positional]
    return " ".join([prog, *words, "[options]"])


def print_help(kind: type[Any], prog: str, console: Console) -> None:
    """Usage, description, and a line for each option, by group."""
    width = min(console.width, 100)

    def put(*parts: str | tuple[str, str]) -> None:
        console.print(Text.assemble(*parts), soft_wrap=True)

    put((prog, "bold"), usage(kind, prog).removeprefix(prog), "\n")
    for paragraph in description(kind):
        example = paragraph.startswith("Example")
        put(paragraph if example else textwrap.fill(" ".join(paragraph.split()), width), "\n")
    found = groups_of(kind)
    names = {option: f"  {option.spelled}" for options in found.values() for option in options}
    left = min(29, max(map(len, names.values()))) + 2
    if any(option.default for option in names):
        put("Defaults are in [brackets].\n")
    for title, options in found.items():
        put((title, "bold"))
        for option in options:
            name, lines = names[option], textwrap.wrap(option.line, width - left, break_on_hyphens=False)
            if len(name) >= left:  # too long to stand before its text
                lines.insert(0, "")
            put((name, "cyan"), f"{'':{left - len(name)}}{lines[0]}" if lines[0] else "")
            for line in lines[1:]:
                put(" " * left, line)
        put()


def _option(field: Any, hint: Any, text: str) -> Option:
    kind, extras = hint, list[Any]()
    while hasattr(kind, "__metadata__"):
        extras += kind.__metadata__
        kind = kind.__origin__
    positional = get_args(Positional[int])[1] in extras
    metavar = next((e.metavar for e in extras if getattr(e, "metavar", None)), None)
    if NoneType in get_args(kind) or get_origin(kind) in (Union, UnionType):
        kind = next(k for k in get_args(kind) if k is not NoneType)
    several = get_origin(kind) is tuple
    single = get_args(kind)[0] if several else kind
    choices: tuple[str, ...] = ()
    if metavar and metavar.startswith("{"):
        choices, metavar = tuple(metavar.strip("{}").split(",")), "NAME"
        choices = (*choices[:-2], "PREFIX,..") if choices[-1] == ".." else choices
    elif get_origin(kind) is Literal:
        choices, metavar = tuple(map(str, get_args(kind))), "NAME"
    if metavar is None:
        metavar = "" if kind is bool else _KINDS.get(single, "TEXT") + (" .." if several else "")
    default = None if field.default is MISSING else field.default
    flag = f"--{'no-' if default is True else ''}{field.name.replace('_', '-')}"
    first, _, rest = inspect.cleandoc(text).partition("\n\n")
    help_, own = re.fullmatch(r"(.*?)(?: \[([^\[]*)\])?\.?", " ".join(first.split())).groups()  # type: ignore[union-attr]
    return Option(
        flag=metavar if positional else flag,
        value="" if positional else metavar,
        choices=choices,
        default=own or _default(default),
        help=help_,
        details=" ".join(rest.split()),
        required=field.default is MISSING and field.default_factory is MISSING,
        is_path=single is Path,
        positional=positional,
    )


def _default(value: Any) -> str:
    if value is None or isinstance(value, bool) or value in ("", ()):
        return ""
    if isinstance(value, tuple):
        return " ".join(f"{part:g}" for part in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _texts(kind: type[Any]) -> dict[str, str]:
    """The docstring of every field, of the class and of those it extends."""
    found: dict[str, str] = {}
    for each in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for pair in pairwise(tree.body):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                    found[name] = str(text)
    return found
