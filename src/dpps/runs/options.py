"""Options that would be ignored are refused: whoever writes one means something by it.

Only what stands on the command line counts. A configuration file may hold every option: --print-config writes them all.
"""

from collections.abc import Sequence

from dpps.data import DATA_SETS
from dpps.errors import UsageError
from dpps.learning.algorithm import ALGORITHMS
from dpps.models import MODELS
from dpps.privacy.units import UNITS
from dpps.runs.config import TrainConfig
from dpps.sensitivity import SENSITIVITIES


def refuse_idle(arguments: Sequence[str], unit: str, mechanism: str) -> None:
    """Refuse options of other units than the chosen one."""
    given = _given(arguments)
    for option in dict.fromkeys(option for name in UNITS.names() for option in UNITS[name].own_options):
        units = [name for name in UNITS.names() if option in UNITS[name].own_options]
        if option not in given or unit in units:
            continue
        if option == "--mechanism" and unit in UNITS and UNITS[unit].fixed_mechanism == mechanism:
            continue  # it is what the unit does anyway
        others = " or ".join(units)
        raise UsageError(
            f"{option} belongs to the unit {others} and would be ignored in the unit {unit}: leave it out, "
            f"or choose --unit {units[0]}"
        )


def refuse_idle_training(arguments: Sequence[str], config: TrainConfig) -> None:
    """Refuse what `dpps train` would ignore as the other options stand."""
    refuse_idle(arguments, config.unit if config.noisy else "none", config.mechanism)
    own = config.node_data is not None
    algorithm, name = ALGORITHMS[config.algorithm], f"--algorithm {config.algorithm}"
    used = () if algorithm.own_sensitivity else SENSITIVITIES[config.sensitivity].own_options
    idle = {
        option: (option not in used, f"it belongs to --sensitivity {sensitivity}")
        for sensitivity in SENSITIVITIES.names()
        for option in SENSITIVITIES[sensitivity].own_options
    } | {
        "--sensitivity": (bool(algorithm.own_sensitivity), f"{name} uses {algorithm.own_sensitivity}"),
        "--sync-every": (not algorithm.synchronises, f"{name} does not synchronise"),
        "--shared": (
            algorithm.shares_all and config.shared != "all",
            f"{name} shares the whole model",
        ),
        "--norm": (
            config.model not in MODELS or not MODELS[config.model].has_norm,
            f"it belongs to --model {' or '.join(n for n in MODELS.names() if MODELS[n].has_norm)}",
        ),
        "--delta": (not config.noisy, "without noise there is no guarantee that could fail"),
        "--secure-noise": (not config.noisy, "there is no noise"),
        "--data": (own, "the nodes' own data replaces it"),
        "--data-dir": (
            own or bool(DATA_SETS[config.data].embedded),
            "the nodes' own data replaces it"
            if own
            else f"{config.data} comes with the package; --data names another",
        ),
        "--split": (own, "the nodes' own data is split already"),
    }
    for option in _given(arguments):
        useless, why = idle.get(option, (False, ""))
        if useless:
            raise UsageError(f"{option} would be ignored here ({why}): leave it out")


def _given(arguments: Sequence[str]) -> list[str]:
    """The options on a command line, in the spelling with hyphens."""
    return [word.partition("=")[0].replace("_", "-") for word in arguments if word.startswith("--")]
