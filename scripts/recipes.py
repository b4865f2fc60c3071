"""Accuracy of the recipe over data sets, epsilons and seeds, one line per run in a CSV file; runs that are there are not repeated.

    python scripts/recipes.py --data mnist --epsilon 0.5 1 3 8 --seeds 5 --out benchmarks/results/recipes.csv
    python scripts/recipes.py --data mnist --epsilon 3 --seeds 5 --out benchmarks/results/ablation.csv -- --momentum 0

Each run is that of `dpps train --data D --features scattering --model linear --shared all --unit record --epsilon E --seed K` with the
options behind `--`, but the features are read once for all seeds and the test set is looked at once, at the end.
"""

import argparse
import csv
import functools
import itertools
import sys
import time
from pathlib import Path

from dpps import data as datasets
from dpps import features, models
from dpps.cli import parse_options
from dpps.learning import ALGORITHMS
from dpps.runs import Options, Run, deal

COMMON = ["--model", "linear", "--shared", "all", "--unit", "record"]
COLUMNS = ("data", "epsilon", "seed", "options", "accuracy", "rounds", "batch", "clip", "rate", "seconds")


@functools.lru_cache(maxsize=1)
def _read(data: str, chosen: str) -> datasets.DataSet:
    found = datasets.load(data)
    if chosen == "none":
        return found
    return features.of_data_set(found, chosen, datasets.folder_beside(data, None))


def one(data: str, epsilon: str, seed: int, options: list[str]) -> dict[str, object]:
    """Train, and test once."""
    start = [*COMMON, "--data", data, "--epsilon", epsilon, "--seed", str(seed)]
    if "--features" not in options:
        start += ["--features", "scattering"]
    config = parse_options(Options, [*start, *options], "dpps train").resolve()
    dataset = _read(data, config.features)
    model, shared = models.build(
        config.model, "all", dataset.train.shape, dataset.classes, norm=config.norm, dropout=0.0
    )
    begun = time.process_time()
    run = Run(
        ALGORITHMS[config.algorithm](model, shared, **config.rates()),
        deal(dataset, config)[0],
        topology=config.network(),
        privacy=config.privacy(),
        mixes=config.mixes,
        seed=seed,
    ).fit(config.epochs or 1)
    accuracy = run.evaluate((dataset.test.inputs(), dataset.test.labels))
    return {
        "data": data,
        "epsilon": epsilon,
        "seed": seed,
        "options": " ".join(options),
        "accuracy": round(sum(accuracy) / len(accuracy), 2),
        "rounds": len(run.log),
        "batch": config.batch_size,
        "clip": config.clip,
        "rate": config.lr_shared,
        "seconds": round(time.process_time() - begun, 1),
    }


def main() -> None:
    """Run what is missing."""
    mine, _, rest = " ".join(sys.argv[1:]).partition(" -- ")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", default=["mnist"])
    parser.add_argument("--epsilon", nargs="+", default=["1", "3"])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(mine.split())
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    done = {(r["data"], r["epsilon"], int(r["seed"]), r["options"]) for r in rows}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not rows:
            writer.writeheader()
        for seed, data, epsilon in itertools.product(range(given.seeds), given.data, given.epsilon):
            if (data, epsilon, seed, " ".join(rest.split())) not in done:
                writer.writerow(one(data, epsilon, seed, rest.split()))
                file.flush()


if __name__ == "__main__":
    main()
