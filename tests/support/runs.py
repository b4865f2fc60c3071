"""A small run: three nodes in a ring, four rounds an epoch."""

from pathlib import Path
from typing import Any

import dpps
from tests.support.learning import tiny, toy_data


def make(
    folder: Path | None = None,
    unit: Any = None,
    *,
    opened: bool = False,
    algorithm: Any = None,
    data: Any = None,
    **options: Any,
) -> dpps.Run:
    """A new one; `opened`: the one in the folder, continued."""
    algorithm = algorithm or dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    options = {"topology": "ring", "privacy": unit, "seed": 0} | options
    data = toy_data(3) if data is None else data
    if opened:
        assert folder is not None
        return dpps.Run.open(folder, algorithm, data, **options)
    return dpps.Run(algorithm, data, folder=folder, **options)


def left(run: dpps.Run, at: int, epochs: int | None = 2) -> dpps.Run:
    """After this round somebody leaves the loop."""
    for log in run.rounds(epochs):
        if log.round == at:
            break
    return run
