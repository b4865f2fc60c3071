"""Models of one's own on the command line: `package.module:callable`, called with the shape of an example and
the number of classes."""

import importlib
import os
import sys

from torch import nn

from dpps.errors import UsageError, unknown


def is_own(name: str) -> bool:
    """Whether this names something to import and not a model that comes with the package."""
    return ":" in name


def build_own(
    name: str, shared: str, shape: tuple[int, ...], classes: int
) -> tuple[nn.Module, tuple[str, ...]]:
    """The model and its shared part.

    Args:
        name: `package.module:callable`; modules in the current folder are found, too.
        shared: "1" or "2" for its first one or two parts with parameters, "all", or prefixes with commas between.
        shape: of one example.
        classes: how many outputs it should have.
    """
    make = _imported(name)
    try:
        model = make(shape, classes)
    except Exception as error:
        told = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"--model {name}: called with shape {shape} and {classes} classes it raises {type(error).__name__}: {told}"
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"--model {name}: called with shape {shape} and {classes} classes it gives a {type(model).__name__}, not an nn.Module"
        )
    return model, _prefixes(name, model, shared)


def _imported(name: str):  # type: ignore[no-untyped-def]  # whatever stands there
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise UsageError(f"--model {name}: write package.module:callable, such as my_models:make")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: nothing there takes the place of an installed package
    try:
        found = importlib.import_module(module)
    except Exception as error:
        told = (str(error).strip().splitlines() or [""])[0]
        raise UsageError(
            f"--model {name}: importing {module} raises {type(error).__name__}: {told}; it must be "
            "installed, or lie in the current folder"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise unknown(
                f"name in --model {name}:",
                part,
                [n for n, v in vars(found).items() if callable(v) and not n.startswith("_")],
            )
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(
            f"--model {name} is of type {type(found).__name__}: name a function or class of (shape, classes)"
        )
    return found


def _prefixes(name: str, model: nn.Module, shared: str) -> tuple[str, ...]:
    parts = list(dict.fromkeys(parameter.split(".")[0] for parameter, _ in model.named_parameters()))
    if not parts:
        raise UsageError(f"--model {name} has no parameters: there is nothing to learn")
    if shared in ("1", "2", "all"):
        return tuple(parts if shared == "all" else parts[: int(shared)])
    prefixes = tuple(part.strip() for part in shared.split(","))
    for prefix in prefixes:
        if prefix.split(".")[0] not in parts:
            raise unknown(f"shared part of {name}", prefix, ("1", "2", "all", *parts))
    return prefixes
