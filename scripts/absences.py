"""What nodes that stay away do to accuracy with noise that cancels, when it was announced and when it was not.

    python scripts/absences.py --seeds 3 --out benchmarks/results/absences.csv

An absence that is announced is known before the round's noise is drawn: pairs are drawn among those present. One that is not
leaves the noise that the others share with the absent node in the sum. Privacy is the same in both cases; this is about accuracy.
Softmax regression on the embedded part of MNIST, ten nodes on EXP, unit record, total epsilon 1, rates by the rule of docs/recipes.md but without momentum.
"""

import argparse
import csv
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import dpps
from dpps.noise import Mechanism, NoiseSource, Outgoing, Partners, Seeded, SeededPairs
from dpps.runs import Options, deal, planned

COLUMNS = ("noise", "away", "seed", "accuracy")
CHANCES = (0.0, 0.02, 0.1, 0.3)
LINEAR = {"model": "linear", "shared": "all", "momentum": 0.0}


class Unannounced(Seeded):
    """Noise whose partners expect everybody, whoever comes."""

    def with_partners(self, partners: Partners) -> NoiseSource:
        return _ExpectsAll(partners, self.seed)


class _ExpectsAll(SeededPairs):
    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        return super().release(mechanism, scale, replace(out, present=None))


def accuracy(noise: str, away: float, seed: int, multiplier: float) -> float:
    """Of one run."""
    options = {} if noise == "independent" else {"trust": "pairs", "colluders": 0}
    config = Options(**LINEAR, seed=seed, noise_multiplier=multiplier, **options).resolve()  # type: ignore[arg-type]
    assert config.epochs is not None
    dataset = dpps.data.load(config.data, None, progress=False)
    nodes, _, _ = deal(dataset, config)
    torch.manual_seed(seed)
    model, prefixes = dpps.models.build("linear", "all", dataset.train.shape, dataset.classes)
    topology = dpps.Exponential(10)
    run = dpps.Run(
        dpps.PartPSP(model, prefixes, **config.rates()),
        nodes,
        topology=topology.with_dropouts(away, seed) if away else topology,
        privacy=config.privacy(),
        test=(dataset.test.inputs(), dataset.test.labels),
        noise=Unannounced(seed) if noise == "pairs, unannounced" else Seeded(seed),
        seed=seed,
    ).fit(epochs=config.epochs)
    assert run.accuracy is not None
    return run.accuracy


def main() -> None:
    """Every kind of noise, every chance of being away, every seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    config = Options(**LINEAR, epsilon=1.0).resolve()  # type: ignore[arg-type]
    unit = config.privacy()
    assert unit is not None
    multiplier = unit.noise(planned(config)[0])  # the same for all
    with given.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for seed in range(given.seeds):
            for noise in ("independent", "pairs, announced", "pairs, unannounced"):
                for away in CHANCES[0 if noise != "pairs, unannounced" else 1 :]:
                    found = round(accuracy(noise, away, seed, multiplier), 2)
                    writer.writerow({"noise": noise, "away": away, "seed": seed, "accuracy": found})
                    file.flush()


if __name__ == "__main__":
    main()
