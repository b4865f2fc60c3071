"""The rule for batch, epochs and rate against a grid of 24, over five data sets.

    python scripts/grid.py --data breast-cancer digits mnist fashion-mnist cifar-10 --epsilon 1 3 --out benchmarks/results/grid.csv

Ten nodes of equal size in the unit record, softmax regression (images: on scattering features; tables of scikit-learn: on standardised
columns, over 24 random splits), clip 0.1, momentum 0.8, delta 1e-5. The grid: two batches, two numbers of epochs and six steps
rate x clip / (1 - momentum). To be quick enough the nodes average exactly in every round, and all steps and epsilons that share a batch
go over the data side by side. One line per setting in the file, and one line per data set and epsilon on the screen.
"""

import argparse
import csv
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor

from dpps import data, features
from dpps.learning import CLIP, MOMENTUM, suggest

TABLES = {"breast-cancer": load_breast_cancer, "digits": load_digits}
IMAGES = ("mnist", "fashion-mnist", "cifar-10")
NODES, SPLITS, PIECE = 10, 24, 4096
COLUMNS = ("data", "epsilon", "who", "batch", "epochs", "step", "accuracy")


@dataclass(frozen=True)
class Examples:
    """Training and test examples, inputs as a matrix without the column of ones."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def size(self) -> int:
        """Of a node."""
        return len(self.y) // NODES


@dataclass(frozen=True)
class Setting:
    """One run."""

    epsilon: float
    who: str
    batch: int
    epochs: int
    step: float
    noise_multiplier: float


def read(name: str) -> Iterator[Examples]:
    """Every split of a data set: of images the published one."""
    if name in IMAGES:
        found = features.of_data_set(data.load(name), "scattering", data.folder_beside(name, None))
        train, test = found.train, found.test
        assert isinstance(train, data.FeatureSet)
        assert isinstance(test, data.FeatureSet)
        yield Examples(train.features.flatten(1), train.labels, test.inputs().flatten(1), test.labels)
        return
    table = TABLES[name]()
    for seed in range(SPLITS):
        order = np.random.default_rng(seed).permutation(len(table.target))
        x, y = table.data[order].astype(np.float32), torch.from_numpy(table.target[order])
        cut = int(0.8 * len(y)) // NODES * NODES
        scaled = torch.from_numpy(((x - x[:cut].mean(0)) / (x[:cut].std(0) + 1e-6)).clip(-5, 5))
        yield Examples(scaled[:cut], y[:cut], scaled[cut:], y[cut:])


def settings(examples: Examples, name: str, epsilons: list[float]) -> list[Setting]:
    """The rule's and the 24 of the grid, for every epsilon."""
    size, inputs = examples.size, examples.x.shape[1]
    if name in IMAGES:
        parts, passes, steps = (4, 16), (8, 30), (1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
    else:
        parts, passes, steps = (2, 8), (15, 60), (0.1, 0.3, 0.6, 1.2, 2.5, 5.0)
    found = []
    for epsilon in epsilons:
        rule = suggest([size] * NODES, inputs, epsilon=epsilon)
        assert isinstance(rule.batch_size, int)
        found.append(Setting(epsilon, "rule", rule.batch_size, rule.epochs, rule.step, rule.noise_multiplier))
        for part, epochs in itertools.product(parts, passes):
            batch = max(1, size // part)
            noise = suggest([size] * NODES, inputs, epsilon=epsilon, batch_size=batch, epochs=epochs)
            found += [Setting(epsilon, "grid", batch, epochs, s, noise.noise_multiplier) for s in steps]
    return found


def accuracies(examples: Examples, together: list[Setting], seed: int) -> list[float]:
    """Percent right of settings that share batch and epochs, side by side on the same batches."""
    batch, epochs = together[0].batch, together[0].epochs
    noise, classes = torch.Generator().manual_seed(seed), int(examples.y.max()) + 1
    inputs, runs = examples.x.shape[1], len(together)
    rates = torch.tensor([s.step * (1 - MOMENTUM) / CLIP for s in together])[:, None]
    scales = torch.tensor([s.noise_multiplier * CLIP / (batch * math.sqrt(NODES)) for s in together])[:, None]
    weights = torch.zeros(inputs + 1, runs, classes)
    velocity = torch.zeros_like(weights)
    for _ in range(epochs * (examples.size // batch)):
        drawn = torch.rand(len(examples.y), generator=noise) < batch / examples.size
        total = torch.zeros_like(weights)
        for piece in drawn.nonzero().flatten().split(PIECE):
            x = _with_one(examples.x[piece])
            error = torch.softmax((x @ weights.flatten(1)).unflatten(1, (runs, classes)), 2)
            error[torch.arange(len(piece)), :, examples.y[piece]] -= 1
            norms = error.norm(dim=2, keepdim=True) * x.norm(dim=1)[:, None, None]
            error *= (CLIP / norms.clamp(min=1e-12)).clamp(max=1)
            total += (x.T @ error.flatten(1)).unflatten(1, (runs, classes))
        released = total / (batch * NODES) + scales * torch.randn(weights.shape, generator=noise)
        velocity = MOMENTUM * velocity - rates * released
        weights += velocity
    outputs = (_with_one(examples.test_x) @ weights.flatten(1)).unflatten(1, (runs, classes))
    right = outputs.argmax(2) == examples.test_y[:, None]
    return [100 * float(share) for share in right.float().mean(0)]


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x.float(), torch.ones(len(x), 1)], 1)


def measure(name: str, epsilons: list[float]) -> dict[Setting, float]:
    """The accuracy of every setting, mean over the splits."""
    found: dict[Setting, list[float]] = {}
    for seed, examples in enumerate(read(name)):
        wanted = settings(examples, name, epsilons)
        key = lambda s: (s.batch, s.epochs)  # noqa: E731 - used twice in the next line
        for _, group in itertools.groupby(sorted(wanted, key=key), key=key):
            together = list(group)
            for setting, accuracy in zip(together, accuracies(examples, together, seed), strict=True):
                found.setdefault(setting, []).append(accuracy)
    return {setting: fmean(values) for setting, values in found.items()}


def main() -> None:
    """One line per data set and epsilon."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=[*TABLES], choices=[*TABLES, *IMAGES])
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    rows = [row for row in rows if row["data"] not in given.data]
    for name in given.data:
        found = measure(name, given.epsilon)
        for s, accuracy in found.items():
            values = (name, f"{s.epsilon:g}", s.who, s.batch, s.epochs, f"{s.step:.3g}", f"{accuracy:.2f}")
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        with given.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        for epsilon in given.epsilon:
            (rule,) = (s for s in found if s.who == "rule" and s.epsilon == epsilon)
            tried = [s for s in found if s.who == "grid" and s.epsilon == epsilon]
            best = max(tried, key=lambda s: found[s])
            print(
                f"{name}, epsilon {epsilon:g}: rule {found[rule]:.2f} (step {rule.step:.2f}), best of {len(tried)} {found[best]:.2f} "
                f"(batch {best.batch}, {best.epochs} epochs, step {best.step:g})",
                flush=True,
            )


if __name__ == "__main__":
    main()
