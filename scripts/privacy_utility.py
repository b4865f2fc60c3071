"""Accuracy against total epsilon for the units contribution and record: the table and figure of docs/privacy-utility.md.

python scripts/privacy_utility.py --data-dir DIR      (full MNIST, five seeds; about half an hour of one core)
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from dpps.runs import Options, Run

DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Curve:
    """One line of the figure."""

    name: str
    options: dict[str, object]
    epsilons: tuple[float, ...]


PAPER = {"unit": "contribution", "budget": 1.0, "noise_rate": 1e-3, "clip": 30.0, "epochs": 3}
FIXED = {"lr_shared": 1.0, "lr_local": 1.0, "batch_size": 100, "epochs": 12, "clip": 1.0}  # not the rule's
CURVES = [
    Curve(
        "contribution, Laplace, 1 layer",
        {"unit": "contribution", "clip": 30.0, "epochs": 3},
        (8, 50, 1e3, 1e5),
    ),
    Curve(
        "contribution, Gaussian, 1 layer",
        {"unit": "contribution", "mechanism": "gaussian", "clip": 1.0, "epochs": 3},
        (8, 50, 1e3, 1e5),
    ),
    Curve("record, 1 layer", {"unit": "record", **FIXED}, (0.5, 1, 3, 8)),
    Curve("record, all layers", {"unit": "record", "shared": "all", **FIXED}, (0.5, 1, 3, 8)),
]


@dataclass(frozen=True)
class Runs:
    """Runs of every setting with several seeds; kept in a folder, so that an interrupted script goes on where it was."""

    cache: Path
    data_dir: Path
    seeds: int

    def accuracy(self, name: str, **options: object) -> tuple[float, float]:
        """Mean test accuracy and total epsilon."""
        found = [self._one(f"{name} {seed}", options | {"seed": seed}) for seed in range(self.seeds)]
        return fmean(accuracy for accuracy, _ in found), found[0][1]

    def _one(self, name: str, options: dict[str, object]) -> tuple[float, float]:
        out = self.cache / name.replace(" ", "-").replace(",", "")
        if not (out / "summary.json").exists():
            config = Options(
                data="mnist",
                data_dir=self.data_dir,
                out=out,
                overwrite=True,
                quiet=True,
                **options,  # type: ignore[arg-type]
            ).resolve()
            assert config.epochs is not None
            Run.from_options(config).fit()
        summary = json.loads((out / "summary.json").read_text())
        return summary["test_accuracy"], summary["privacy"]["epsilon"]


def main() -> None:
    """Run everything that has not run yet, then draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("out/privacy-utility"))
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    runs = Runs(given.cache, given.data_dir, given.seeds)
    lines = ["| unit | " + "total epsilon: accuracy % |", "|---|---|"]
    axis = plt.figure(figsize=(7, 4)).subplots()
    for curve in CURVES:
        points = [runs.accuracy(f"{curve.name} {e:g}", **curve.options, epsilon=e)[0] for e in curve.epsilons]
        shown = ", ".join(f"{e:g}: **{a:.1f}**" for e, a in zip(curve.epsilons, points, strict=True))
        lines.append(f"| {curve.name} | {shown} |")
        axis.semilogx(curve.epsilons, points, marker="o", label=curve.name)
    for shared, published in (("1", 41.57), ("2", 21.66), ("all", 29.23)):
        ours, total = runs.accuracy(f"paper semantics {shared}", **PAPER, shared=shared)
        lines.append(
            f"| contribution at the paper's noise (b=1, rate .001), shared {shared} | {total:,.0f}: **{ours:.1f}** (the paper: {published}) |"
        )
    axis.axvspan(20, 2e5, color="grey", alpha=0.15, label="no meaningful protection")
    axis.axhline(10, color="grey", linewidth=0.8, linestyle=":")
    axis.set(xlabel="total epsilon (delta 1e-5)", ylabel="test accuracy %", ylim=(0, 100), xlim=(0.4, 2e5))
    axis.legend(fontsize=8)
    (DOCS / "figures").mkdir(exist_ok=True)
    axis.figure.savefig(
        DOCS / "figures" / "privacy-utility.svg", bbox_inches="tight", metadata={"Date": None}
    )
    print("\n".join(lines))  # the table of docs/privacy-utility.md


if __name__ == "__main__":
    main()
