"""Accuracy against total epsilon with independent noise, noise that cancels, a trusted server's noise, and none.

    python scripts/draw_cancelling.py --seeds 5

Softmax regression on the embedded part of MNIST, ten nodes, unit record, options by the rule of docs/recipes.md: a minute or two on one core. Writes
benchmarks/results/cancelling-curve.csv and docs/figures/cancelling.svg.
"""

import argparse
import csv
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dpps.runs import Options, Run, planned

HOME = Path(__file__).parent.parent
TABLE, FIGURE = HOME / "benchmarks/results/cancelling-curve.csv", HOME / "docs/figures/cancelling.svg"
COLUMNS = ("noise", "epsilon", "seed", "accuracy")
EPSILONS = (0.1, 0.3, 1.0, 3.0)
PAIRS = {"trust": "pairs", "colluders": 0}
LINES = {
    "independent": ({}, "independent noise", "tab:red", "o"),
    "pairs": (PAIRS, "noise that cancels (pairs, C = 0)", "tab:blue", "s"),
    # on a complete network every row is the mean, whose noise has 1.01 times the variance of a trusted server's
    "server": (
        {**PAIRS, "mean_variance": 1.01, "topology": "complete"},
        "a trusted server's noise",
        "tab:green",
        "^",
    ),
}
NO_NOISE = {"unit": "none", "batch_size": 125, "epochs": 15, "momentum": 0.8, "lr_shared": 0.1}


def accuracy(seed: int, **options: object) -> float:
    """Of one run."""
    with tempfile.TemporaryDirectory() as folder:
        made = Options(model="linear", shared="all", seed=seed, out=Path(folder), **options)  # type: ignore[arg-type]
        config = Options(**{**vars(made), "quiet": True, "overwrite": True}).resolve()
        assert config.epochs is not None
        run = Run.from_options(config).fit()
    assert run.accuracy is not None
    return run.accuracy


def multiplier(epsilon: float) -> float:
    """The noise that all lines have at this epsilon: solved for once."""
    config = Options(model="linear", shared="all", epsilon=epsilon).resolve()
    unit = config.privacy()
    assert unit is not None
    return unit.noise(planned(config)[0])


def measure(seeds: int) -> None:
    """Every line at every epsilon, and once without noise."""
    noise = {epsilon: multiplier(epsilon) for epsilon in EPSILONS}
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for seed in range(seeds):
            for epsilon in EPSILONS:
                for name, (options, *_) in LINES.items():
                    writer.writerow(
                        (
                            name,
                            epsilon,
                            seed,
                            round(accuracy(seed, noise_multiplier=noise[epsilon], **options), 2),
                        )
                    )
            writer.writerow(("none", "", seed, round(accuracy(seed, **NO_NOISE), 2)))


def means() -> dict[tuple[str, str], float]:
    """Mean accuracy by (noise, epsilon)."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            found[row["noise"], row["epsilon"]].append(float(row["accuracy"]))
    return {key: fmean(values) for key, values in found.items()}


def draw(found: dict[tuple[str, str], float]) -> None:
    """One line for every kind of noise, and one across for none."""
    plt.rcParams["svg.hashsalt"] = "cancelling"  # the same numbers give the same file
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    axes.axhline(found["none", ""], color="gray", linestyle=":", label="no noise")
    for name, (_, label, colour, mark) in LINES.items():
        points = sorted((float(e), value) for (noise, e), value in found.items() if noise == name)
        axes.plot(*zip(*points, strict=True), color=colour, marker=mark, label=label)
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    axes.minorticks_off()
    axes.set_xlabel("total epsilon (every training example, delta 1e-5)")
    axes.set_ylabel("test accuracy, %")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    measure(parser.parse_args().seeds)
    draw(means())
