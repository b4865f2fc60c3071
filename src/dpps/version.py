"""The version, and what a bug report needs."""

import platform
from functools import cache
from importlib.metadata import version

__version__ = version("dpps")


def versions() -> dict[str, str]:
    """Versions of this package and of what its numbers depend on."""
    return dict(_versions())


@cache  # a thousand models each say it
def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "numpy", "dp-accounting")}
    return {
        "dpps": __version__,
        "python": platform.python_version(),
        **packages,
        "platform": platform.platform(),
    }
