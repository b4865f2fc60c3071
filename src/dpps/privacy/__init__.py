"""What privacy costs: units, accountant, ledger, statement, audit."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The modules of this folder, loaded when first asked for."""
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
