"""Four members that learn: real runs on a simulated network."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.peers import Member
from dpps.runs import Run
from tests.support.bare import membership_of
from tests.support.simulated import Network, SimulatedPost

N, EXAMPLES, FEATURES = 4, 40, 6
NAMES = tuple(f"m{k}" for k in range(N))


def examples(seed: int, count: int = EXAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes that a linear model tells apart."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=make)
    return x, (x @ torch.arange(1.0, FEATURES + 1) > 0).long()


def make_run(post: SimulatedPost, k: int, folder: Path, **more: Any) -> Run:
    """Member k's part of a small run."""
    torch.manual_seed(0)
    topology = dpps.Exponential(N)
    where = Member(
        membership_of(NAMES, k, topology, **more.pop("membership", {})),
        post,
        clock=post.clock,
        heart=False,
        seeded_noise=True,
    )
    options: dict[str, Any] = {
        "privacy": dpps.Record(noise_multiplier=1.0, clip=1.0),
        "declared_sizes": EXAMPLES,
    } | more
    learning = {"lr_shared": 0.5, "lr_local": 0.5, "batch_size": 10} | options.pop("learning", {})
    algorithm = dpps.PartPSP(nn.Linear(FEATURES, 2), **learning)
    data = [TensorDataset(*examples(k + 1))]
    return Run(algorithm, data, topology=topology, deployment=where, folder=folder, seed=k, **options)


class Federation:
    """Four members and what became of their runs."""

    def __init__(self, folder: Path, epochs: int = 3, pace: float = 0.05, **more: Any) -> None:
        self.folder, self.epochs, self.pace, self.more = folder, epochs, pace, more
        self.runs: dict[str, Run] = {}
        self.network = Network({name: self._main(k) for k, name in enumerate(NAMES)})

    def _main(self, k: int) -> Callable[[SimulatedPost], None]:
        def main(post: SimulatedPost) -> None:
            run = make_run(post, k, self.folder / NAMES[k], **dict(self.more))
            self.runs[NAMES[k]] = run
            try:
                for _ in run.rounds(self.epochs):
                    run.deployment.fabric.wait(self.pace)
            finally:
                run.close()

        return main

    def models(self, names: Sequence[str] = NAMES) -> list[torch.Tensor]:
        return [self.runs[name].shared for name in names]
