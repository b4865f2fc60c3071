"""The options of a run, read from files: TOML for --config, JSON as a run's folder keeps them."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from dpps.errors import UsageError, unknown
from dpps.runs.config import TrainConfig

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text in quotes",
    Path: "a path in quotes",
}


RETIRED = {"threads": "set the environment variable OMP_NUM_THREADS=N instead"}
"""Options of earlier versions, and what to do instead. They said how a run was carried out, not what it computed, so the options
that a folder keeps are read without them."""


def from_toml(path: Path) -> TrainConfig:
    """The configuration in a TOML file; the names are those of the options."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    hints = {name.replace("_", "-"): hint for name, hint in get_type_hints(TrainConfig).items()}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name in RETIRED:
            raise UsageError(f"{path}: {name} is no longer an option: {RETIRED[name]}, and delete this line")
        if name not in hints:
            raise unknown(f"option in {path}", name, hints)
        values[name.replace("-", "_")] = _typed(path, name, value, hints[name])
    return TrainConfig(**values)


def from_json(found: Mapping[str, Any], otherwise: str) -> TrainConfig:
    """The configuration that `to_json` wrote.

    Raises:
        UsageError: these are not options of `dpps train`; it says `otherwise`.
    """
    hints = get_type_hints(TrainConfig)
    values = {name.replace("-", "_"): value for name, value in found.items() if name not in RETIRED}
    if not set(values) <= set(hints) or "data" not in values:
        raise UsageError(otherwise)
    typed: dict[str, Any] = {
        n: Path(v) if v is not None and Path in get_args(hints[n]) else v for n, v in values.items()
    }
    return TrainConfig(**typed)


def _typed(path: Path, name: str, value: Any, hint: Any) -> Any:
    """The value of an option in a file, refused if it is of another kind than the option."""
    kinds = get_args(hint) or (hint,)
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) in kinds or value in kinds:  # a literal is its own kind
        return value
    wanted = " or ".join(_KINDS.get(kind, repr(kind)) for kind in kinds if kind is not type(None))
    raise UsageError(f"{path}: {name} is {value!r}: it must be {wanted}")
