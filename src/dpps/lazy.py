"""The public names of a package, imported when one is first asked for: `dpps --help` need not wait for torch."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_imports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names are imported where its `if TYPE_CHECKING:` block says.

    So the names stand in one place, written as imports that readers and type checkers know::

        if TYPE_CHECKING:
            from dpps.noise.mechanisms import Laplace
        else:
            __getattr__, __dir__, __all__ = lazy_imports(__name__)

    Public are these, what the package's own file defines, and what it imports from its own modules.
    """
    body = ast.parse(Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")).body
    lazy = _imported([line for block in body if isinstance(block, ast.If) for line in block.body], "dpps.")
    defined = {line.name for line in body if isinstance(line, (ast.FunctionDef, ast.ClassDef))}
    assigned = {
        t.id for line in body if isinstance(line, ast.Assign) for t in line.targets if isinstance(t, ast.Name)
    }
    public = {*lazy, *_imported(body, f"{package}."), *defined, *assigned}

    def get(name: str) -> Any:
        if name not in lazy:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(lazy[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return get, names, sorted(name for name in public if not name.startswith("_"))


def _imported(lines: list[ast.stmt], start: str) -> dict[str, str]:
    """The names that some lines import from modules whose name begins so, and the modules."""
    imports = [
        line for line in lines if isinstance(line, ast.ImportFrom) and str(line.module).startswith(start)
    ]
    return {name.name: str(line.module) for line in imports for name in line.names}
