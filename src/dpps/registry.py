"""Things by name: one registry per kind. Command line, plan, report and documentation derive their lists from it.

A module registers what it offers with a decorator, and the modules of a registry's package are loaded when a name is first
asked for. So adding a topology or a model is adding one file. A program of your own may register, too::

    @TOPOLOGIES.register("star")
    class Star(Topology): ...
"""

import importlib
import pkgutil
import re
from collections.abc import Callable
from typing import Generic, TypeVar

from dpps.errors import UsageError, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """Names and what they stand for. A capital K in a name stands for a number: "K-out" is found by "4-out".

    Args:
        kind: what the names are names of, for error messages.
        package: the package whose modules register themselves.
    """

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
