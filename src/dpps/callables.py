"""Code of one's own that an option names: `package.module:callable`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from dpps.errors import UsageError, unknown


def is_own(name: str) -> bool:
    """Whether this names something to import and not something that comes with the package."""
    return ":" in name


def imported(option: str, name: str, arguments: str) -> Callable[..., Any]:
    """What `package.module:callable` names. Modules in the current folder are found, too.

    Args:
        option: the option that names it, for messages.
        name: as the user wrote it.
        arguments: what it is called with, for messages, such as "(shape, classes)".

    Raises:
        UsageError: it cannot be imported, or not called.
    """
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
