"""Learn together without a server and without trusting each other: differentially private push-sum.

`DPPS` is the protocol (Algorithm 1 of the paper), `PartPSP` the learning algorithm on top of it (Algorithm 2). Start with
`dpps --help` or the README.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpps import data, models
    from dpps.errors import DppsError, RunError, UsageError
    from dpps.fabric import Stacked
    from dpps.learning import PartPSP, Run, Stopped
    from dpps.mechanisms import Gaussian, Laplace, Mechanism, NoNoise
    from dpps.noise import NoiseSource, Seeded
    from dpps.privacy.accountant import Charge, label, total
    from dpps.privacy.units import Contribution, NodeSwap, Record
    from dpps.protocol import DPPS, State
    from dpps.sensitivity import Bounded, Certified, Oracle, Paper, Sensitivity, WorstCase
    from dpps.topology import (
        Base,
        Complete,
        DOut,
        Exponential,
        OnePeerRandom,
        Ring,
        Sequence,
        Static,
        Topology,
        from_networkx,
    )
    from dpps.version import __version__

_HOMES = {
    "dpps.errors": ("DppsError", "RunError", "UsageError"),
    "dpps.fabric": ("Stacked",),
    "dpps.learning": ("PartPSP", "Run", "Stopped"),
    "dpps.mechanisms": ("Gaussian", "Laplace", "Mechanism", "NoNoise"),
    "dpps.noise": ("NoiseSource", "Seeded"),
    "dpps.privacy.accountant": ("Charge", "label", "total"),
    "dpps.privacy.units": ("Contribution", "NodeSwap", "Record"),
    "dpps.protocol": ("DPPS", "State"),
    "dpps.sensitivity": ("Bounded", "Certified", "Oracle", "Paper", "Sensitivity", "WorstCase"),
    "dpps.topology": (
        "Base",
        "Complete",
        "DOut",
        "Exponential",
        "OnePeerRandom",
        "Ring",
        "Sequence",
        "Static",
        "Topology",
        "from_networkx",
    ),
    "dpps.version": ("__version__",),
}
"""Where the names below come from. Each is loaded when first asked for: `dpps --help` need not wait for torch."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value
    try:
        return importlib.import_module(f"dpps.{name}")  # a folder of ours, such as dpps.data
    except ModuleNotFoundError as error:
        if error.name != f"dpps.{name}":
            raise
        raise AttributeError(f"module 'dpps' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "DPPS",
    "Base",
    "Bounded",
    "Certified",
    "Charge",
    "Complete",
    "Contribution",
    "DOut",
    "DppsError",
    "Exponential",
    "Gaussian",
    "Laplace",
    "Mechanism",
    "NoNoise",
    "NodeSwap",
    "NoiseSource",
    "OnePeerRandom",
    "Oracle",
    "Paper",
    "PartPSP",
    "Record",
    "Ring",
    "Run",
    "RunError",
    "Seeded",
    "Sensitivity",
    "Sequence",
    "Stacked",
    "State",
    "Static",
    "Stopped",
    "Topology",
    "UsageError",
    "WorstCase",
    "__version__",
    "data",
    "from_networkx",
    "label",
    "models",
    "total",
]
