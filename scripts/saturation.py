"""Why SGPDP learns nothing under the paper's noise: how many activations are saturated, and how large gradients are, round by round.

python scripts/saturation.py --data-dir DIR        MNIST, EXP, b = 3, period 7, real sensitivity; about a minute
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from dpps.learning import Chained
from dpps.paper import Cell, dataset_of, paper_cell, prepare

LOOK = (0, 5, 6, 7, 13, 14, 20, 30, 60)
SATURATED = 0.9999


@dataclass(frozen=True)
class Settings:
    """Where MNIST is, and how much noise."""

    data_dir: Path | None = None
    """Folder with one sub-folder per data set (default: $DPPS_DATA, then the user cache)."""
    budget: float = 3.0
    """b of the paper."""


def looks(cell: Cell, data_dir: Path | None) -> Iterator[tuple[int, list[float], float, float]]:
    """Round, share of saturated activations per layer, mean L1 norm of the shared gradients, largest shared parameter."""
    run = prepare(cell, dataset_of(cell, data_dir)).start(cell["epochs"])
    engine = run.nodes.engine
    assert isinstance(engine, Chained)
    for round_ in range(max(LOOK) + 1):
        if round_ in LOOK:
            x, target, _ = run.nodes.updates.sampler.batch(round_)
            *_, gradients = engine.step(
                run.state.shared.y, run.local, x, target, lambda _, rows: run.local[rows], round_
            )
            shares = [float((out.abs() > SATURATED).float().mean()) for out in engine.chain.unfolded()[1:]]
            yield round_, shares, float(gradients.abs().sum(1).mean()), float(run.state.shared.s.abs().max())
        run.step()


def main() -> None:
    """Print both algorithms side by side."""
    settings = tyro.cli(Settings, description=__doc__)
    for algorithm, shared in (("sgpdp", "all"), ("partpsp", "1")):
        print(
            f"{algorithm}, shared {shared}: round, saturated share of layers 1-3, gradient L1, largest parameter"
        )
        cell = paper_cell(algorithm=algorithm, shared=shared, budget=settings.budget, sync_every=7)
        for round_, shares, gradient, largest in looks(cell, settings.data_dir):
            print(
                f"{round_:>5}  {' '.join(f'{share:.3f}' for share in shares)}  {gradient:10.3g}  {largest:8.4g}"
            )


if __name__ == "__main__":
    main()
