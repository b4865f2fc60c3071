"""Things by name: one registry per kind. Command line, plan, report and documentation derive their lists from it.

A module registers what it offers with a decorator, and the modules of a registry's package are loaded when a name is first
asked for. So adding a topology or a model is adding one file. A program of your own may register, too::

    @TOPOLOGIES.register("star")
    class Star(Topology): ...
"""

import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dpps.errors import UsageError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and what they stand for; the modules of `package` register themselves. A capital K in a name stands for a number:
    "K-out" is found by "4-out"."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind, self._package = kind, package
        self._entries: dict[str, T] = {}
        self._complete = False

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that files what it decorates under this name."""

        def file(entry: T) -> T:
            if self._entries.setdefault(name, entry) is not entry:
                raise UsageError(f"there are two {self.kind}s called {name!r}: choose another name")
            return entry

        return file

    def names(self) -> tuple[str, ...]:
        """All names, in alphabetical order: the order in which modules are loaded must not show."""
        self._load()
        return tuple(sorted(self._entries, key=str.lower))

    def find(self, text: str) -> tuple[T, list[int]]:
        """What `text` stands for, and the number in it, if its name has one."""
        self._load()
        for name, entry in self._entries.items():
            pattern = re.escape(name).replace("K", "([0-9]+)")
            if match := re.fullmatch(pattern, text):
                return entry, [int(number) for number in match.groups()]
        if text in self._entries:
            raise UsageError(
                f"{self.kind} {text!r}: the K stands for a number, such as {text.replace('K', '2')!r}"
            )
        raise unknown(self.kind, text, self.names())

    def __getitem__(self, text: str) -> T:
        return self.find(text)[0]

    def __contains__(self, text: object) -> bool:
        self._load()
        return text in self._entries

    def _load(self) -> None:
        if self._complete:
            return
        self._complete = True
        package = importlib.import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self._package}.{module.name}")


# Code of one's own that an option names: `package.module:callable`


def is_own(name: str) -> bool:
    """Whether this names something to import and not something that comes with the package."""
    return ":" in name


def imported(option: str, name: str, arguments: str) -> Callable[..., Any]:
    """What `package.module:callable` names; modules in the current folder are found, too. UsageError: it cannot be imported, or not
    called. `option` and `arguments`, such as "(shape, classes)", are for messages."""
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise UsageError(f"{option} {name}: write package.module:callable, such as my_models:make")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: nothing there takes the place of an installed package
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise UsageError(
            f"{option} {name}: importing {module} raises {first_line(error)}; install it, or run dpps in the folder that holds it"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            offered = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
            raise unknown(f"name in {option} {name}:", part, offered)
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(
            f"{option} {name} is of type {type(found).__name__}: name a function or class of {arguments}"
        )
    return found  # type: ignore[no-any-return]


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
