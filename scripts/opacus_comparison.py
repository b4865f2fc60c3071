"""Opacus, central, beside ours over N nodes: same features, model, clip, epochs, sampling rate, momentum and accountant.

    python scripts/opacus_comparison.py --data mnist --epsilon 1 3 --seeds 3 --out benchmarks/results/opacus.csv

One line per run: accuracy in percent, and examples per second of one processor core's time in training (drawing, gradients, clipping, noise, and mixing; without
reading the data and without evaluation). Needs opacus (pip install "dpps[benchmarks]"). Opacus holds all examples in one place; ours
deals them to N nodes, each of which adds noise for itself, so the mean has sqrt(N) times the noise. Rates follow the rule of
docs/recipes.md for each N. Runs that are in the file already are not repeated.
"""

import argparse
import csv
import itertools
import time
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpps
from dpps import data, features
from dpps.data import split
from dpps.learning import Momentum, Suggestion, suggest
from dpps.topology import Topology, Weights

COLUMNS = (
    "data",
    "who",
    "nodes",
    "epsilon",
    "seed",
    "accuracy",
    "examples_per_second",
    "rate",
    "noise_multiplier",
)
PIECE = 1000  # examples whose gradients Opacus holds at a time


class Alone(Topology):
    """One node and nobody else, which the library offers to no user: central training on our code."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.nodes = 1

    def build(self, t: int) -> Weights:
        return Weights.from_matrix([[1.0]])

    def check_connected(self) -> None:
        """It is."""


def opacus(
    train: data.FeatureSet, test: tuple[torch.Tensor, torch.Tensor], chosen: Suggestion, seed: int
) -> tuple[float, float]:
    """Accuracy, and examples per second."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(train.features[0].numel(), 10))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer: Any = torch.optim.SGD(model.parameters(), chosen.rate, momentum=chosen.momentum)
    examples = TensorDataset(train.features.float(), train.labels)
    loader: Any = DataLoader(examples, batch_size=chosen.batch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=chosen.noise_multiplier,
            max_grad_norm=chosen.clip,
        )
        begun = time.process_time()
        for _ in range(chosen.epochs):
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=PIECE, optimizer=optimizer
            ) as pieces:
                for x, labels in pieces:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), labels).backward()
                    optimizer.step()
        seconds = time.process_time() - begun
    with torch.no_grad():
        right = (model(test[0]).argmax(1) == test[1]).float().mean()
    return 100 * float(right), chosen.epochs * len(examples) / seconds


def ours(
    train: data.FeatureSet,
    test: tuple[torch.Tensor, torch.Tensor],
    chosen: Suggestion,
    seed: int,
    nodes: int,
    epsilon: float,
) -> tuple[float, float]:
    """The same over `nodes` nodes."""
    parts = split(train.labels.numpy(), nodes, "iid", seed)
    model, shared = dpps.models.build("linear", "all", train.shape, 10, norm="group", dropout=0.0)
    algorithm = dpps.PartPSP(
        model,
        shared,
        lr_shared=chosen.rate,
        lr_local=chosen.rate,
        batch_size=chosen.batch_size,
        optimizer=Momentum(chosen.momentum),
    )
    run = dpps.Run(
        algorithm,
        [train.ordered(part) for part in parts],
        topology=Alone() if nodes == 1 else dpps.Exponential(nodes),
        privacy=dpps.Record(epsilon=epsilon, clip=chosen.clip),
        seed=seed,
    ).start(chosen.epochs)
    begun = time.process_time()
    run.fit(chosen.epochs)
    seconds = time.process_time() - begun
    return fmean(run.evaluate(test)), chosen.epochs * len(train) / seconds


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 10, 100])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    done = {(r["data"], r["who"], int(r["nodes"]), float(r["epsilon"]), int(r["seed"])) for r in rows}
    found = features.of_data_set(data.load(given.data), "scattering", data.folder_beside(given.data, None))
    train = found.train
    assert isinstance(train, data.FeatureSet)
    test = found.test.inputs(), found.test.labels
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not rows:
            writer.writeheader()
        who = [("opacus", 1), *(("dpps", n) for n in given.nodes)]
        for seed, epsilon, (name, nodes) in itertools.product(range(given.seeds), given.epsilon, who):
            if (given.data, name, nodes, epsilon, seed) in done:
                continue
            chosen = suggest([len(train) // nodes] * nodes, train.features[0].numel(), epsilon=epsilon)
            accuracy, speed = (
                opacus(train, test, chosen, seed)
                if name == "opacus"
                else ours(train, test, chosen, seed, nodes, epsilon)
            )
            values = (
                given.data,
                name,
                nodes,
                epsilon,
                seed,
                round(accuracy, 2),
                round(speed),
                chosen.rate,
                round(chosen.noise_multiplier, 4),
            )
            writer.writerow(dict(zip(COLUMNS, values, strict=True)))
            file.flush()


if __name__ == "__main__":
    main()
