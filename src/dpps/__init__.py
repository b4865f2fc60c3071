"""Learn together without a server and without trusting each other: differentially private push-sum.

`DPPS` is the protocol (Algorithm 1 of the paper), `PartPSP` the learning algorithm on top of it (Algorithm 2). Start with
`dpps --help` or the README.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpps.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Names are loaded when one is first asked for: `dpps --help` need not wait for torch."""
    if name.startswith("__") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module 'dpps' has no attribute {name!r}")
    api = importlib.import_module("dpps.api")
    for place in (globals(), vars(api)):  # a folder of ours, such as dpps.topology, or a name
        if name in place:
            return place[name]
    raise AttributeError(f"module 'dpps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("dpps.api").__all__})
