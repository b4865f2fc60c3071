"""The options of a run: those that had an effect, and the command line that repeats it."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpps.errors import UsageError
from dpps.learning.algorithm import ALGORITHMS
from dpps.models import MODELS
from dpps.privacy.units import UNITS
from dpps.runs.config import TrainConfig
from dpps.sensitivity import SENSITIVITIES

#: Files that a run needs again; everything else about where and how it was carried out is left out of the command.
_NEEDED_AGAIN = ("data-dir", "node-data", "schema", "weights")
#: Said in other words.
_NOT_LISTED = ("data", "secure_noise", "seeded_noise")

_APPLIES: dict[str, Callable[[TrainConfig], bool]] = {
    "split": lambda c: c.node_data is None,
    "hold_out": lambda c: c.node_data is None or bool(c.hold_out),
    "norm": lambda c: c.model in MODELS and MODELS[c.model].has_norm,
    "shared": lambda c: not ALGORITHMS[c.algorithm].shares_all,
    "sync_every": lambda c: ALGORITHMS[c.algorithm].synchronises,
    "delta": lambda c: c.privacy() is not None,
    "records_per_user": lambda c: _of_unit("--records-per-user", c),
    "mechanism": lambda c: _of_unit("--mechanism", c) and UNITS[c.unit].fixed_mechanism is None,
    "noise_rate": lambda c: c.budget is not None,
    "sensitivity": lambda c: _of_unit("--sensitivity", c) and not ALGORITHMS[c.algorithm].own_sensitivity,
    "c_prime": lambda c: _of_sensitivity("--c-prime", c),
    "decay": lambda c: _of_sensitivity("--decay", c),
}
"""Options that matter only beside others."""


def _of_unit(option: str, config: TrainConfig) -> bool:
    return config.unit in UNITS and option in UNITS[config.unit].own_options


def _of_sensitivity(option: str, config: TrainConfig) -> bool:
    return _of_unit(option, config) and option in SENSITIVITIES[config.sensitivity].own_options


def applied(
    config: TrainConfig, private_noise: bool, chosen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options that had an effect on the result, by their names; what was switched off (None, no, 0) had none.

    Args:
        config: as the run was told.
        private_noise: whether nobody can know the noise.
        chosen: what the run chose itself of what was left open.
    """
    shown: dict[str, Any] = {"data": data_name(config)}
    for option, value in {**config.common(), **(chosen or {})}.items():
        name = option.replace("-", "_")
        applies = _APPLIES.get(name)
        off = value in (None, False, "none")
        if (
            name not in _NOT_LISTED
            and (not off or name in ("unit", "seed"))
            and (applies is None or applies(config))
        ):
            shown[option] = value
    if config.privacy() is not None:
        shown["noise"] = "secure, from the operating system" if private_noise else "seeded (simulation)"
    return shown


def data_name(config: TrainConfig) -> str:
    """What the data are called: the data set, or the folder of the nodes' own files without a node's number."""
    if config.node_data is None:
        return config.data
    for part in reversed(config.node_data.parts):
        name = part.replace("{rank}", "").strip("-_. /")
        if name and name not in ("node", "rank", "data"):
            return name
    return "own data"


def command(config: TrainConfig, processes: int = 0, schema: Path | None = None) -> str:
    """The shortest command line that resolves to this configuration; a distributed run needs a folder, too.

    Args:
        config: as the run was told.
        processes: how many it had; 0: a simulation.
        schema: where the schema can be read now, if not where the run was told.
    """
    named, config = config.schema, replace(config, schema=schema or config.schema)
    wanted, plain = config.resolved(), TrainConfig()
    names = [name.replace("-", "_") for name in (*config.common(), *_NEEDED_AGAIN)]
    given = {n: getattr(wanted, n) for n in names if getattr(wanted, n) != getattr(plain, n)}
    meaning = _meaning(given)
    for option in list(given):
        fewer = {k: v for k, v in given.items() if k != option}
        if meaning is not None and _meaning(fewer) == meaning:
            given = fewer
    if named is not None:
        given["schema"] = named
    words = [word for option, value in given.items() for word in _option(option, value)]
    start = ["dpps", "train"]
    if processes:
        start = ["torchrun", "--nproc-per-node", str(processes), "-m", *start, "--out", "again"]
    return shlex.join([*start, *words])


def _meaning(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What these options resolve to; None if they have no meaning together."""
    try:
        return TrainConfig(**options).resolved().to_json()
    except UsageError:
        return None


def _option(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]
