"""How commands print: consoles, bars, and log lines."""

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console

from dpps.logs import only_from


def plain_console(**options: Any) -> Console:
    """A console that prints what it is given: long lines stay one line, numbers have no colours, and `:x:` in a name is no picture."""
    return Console(**{"highlight": False, "soft_wrap": True, "emoji": False} | options)


def wide_console() -> Console:
    """The same, for tables: in a file or a pipe nothing of them is folded."""
    console = plain_console()
    return console if console.is_terminal else plain_console(width=max(200, console.width))


def working(console: Console, what: str) -> AbstractContextManager[object]:
    """A spinner for what takes a few seconds; nothing when the output is not a terminal."""
    return console.status(what) if console.is_terminal else nullcontext()


@contextmanager
def log_lines(formatter: logging.Formatter | None = None) -> Iterator[None]:
    """Within, warnings and errors of the library are lines on the standard error; a caller's own logging stays as it was.

    Args:
        formatter: how a line looks; by default the message alone. A formatter takes the place of an outer one.
    """
    root, shown = logging.getLogger(), logging.StreamHandler(sys.stderr)
    shown.setFormatter(formatter or logging.Formatter("%(message)s"))
    shown.set_name(_NAME)
    outer = [handler for handler in root.handlers if handler.name == _NAME]
    for handler in outer:
        root.removeHandler(handler)
    root.addHandler(shown)
    try:
        with only_from(logging.WARNING, root):
            yield
    finally:
        root.removeHandler(shown)
        for handler in outer:
            root.addHandler(handler)


_NAME = "dpps.cli"
