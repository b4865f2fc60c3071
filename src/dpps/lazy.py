"""The public names of a package, imported when one is first asked for: `dpps --help` need not wait for torch."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_imports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are imported where its `if TYPE_CHECKING:` block says they are.

    So the names stand in one place, written as imports that readers and type checkers know::

        if TYPE_CHECKING:
            from dpps.noise.mechanisms import Laplace

        __all__ = ["Laplace"]
        __getattr__, __dir__ = lazy_imports(__name__)

    Args:
        package: its `__name__`.
    """
    places: dict[str, str] = {}

    def get(name: str) -> Any:
        if not places:
            places.update(_imports_for_types(Path(str(sys.modules[package].__file__))))
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(places[name]), name)

    def names() -> list[str]:
        module = vars(sys.modules[package])
        return sorted({*module, *module["__all__"]})

    return get, names


def _imports_for_types(path: Path) -> dict[str, str]:
    """The names that a file imports for type checkers only, and their modules."""
    blocks = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    return {name.name: str(line.module) for line in imports for name in line.names}
