"""Accuracy with noise that cancels, one line per run in a CSV file; runs that are there are not repeated.

    python scripts/cancelling.py mlp scattering contribution --seeds 5 --out benchmarks/results/cancelling.csv

Each name is a group of settings below; docs/cancelling-noise.md has the means. They need the full data sets, and ten to thirty minutes of one core.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

COLUMNS = ("group", "setting", "epsilon", "seed", "accuracy", "rounds", "seconds", "options")

MLP = "--data mnist --shared all --lr-shared 1"  # the rate of the rows without partners, not the rule's
SCATTERING = "--features scattering --model linear --shared all"
MANY = (
    "--data mnist --features scattering --model linear --shared all --nodes 1000 --unit contribution --mechanism gaussian "
    "--trust pairs --colluders 10 --batch-size 60 --epochs 20 --clip 0.1 --momentum 0.8 --mixes 10 --lr-shared"
)
"""Whole-node protection: 20 rounds in which every node takes one clipped step on all its examples, and ten exchanges a round."""
PAIRS = "--trust pairs --colluders"

Setting = tuple[str, str, str]
"""What it is called, its epsilon ("" without noise), its options."""

GROUPS: dict[str, list[Setting]] = {
    "mlp": [
        ("pairs, C = 0", "1", f"{MLP} {PAIRS} 0"),
        ("pairs, C = 0", "0.3", f"{MLP} {PAIRS} 0 --mixes 2"),
        ("pairs, C = 3", "1", f"{MLP} {PAIRS} 3"),
        ("pairs, C = 3", "0.3", f"{MLP} {PAIRS} 3 --mixes 2"),
    ],
    "scattering": [
        (data, "1", f"--data {data} {SCATTERING} {PAIRS} 0") for data in ("mnist", "fashion-mnist")
    ],
    "contribution": [("1,000 nodes", "8", f"{MANY} 3"), ("1,000 nodes", "3", f"{MANY} 2")],
}


def one(group: str, setting: Setting, seed: int) -> dict[str, object]:
    """Train, and read the summary."""
    name, epsilon, options = setting
    with tempfile.TemporaryDirectory() as folder:
        given = [*options.split(), *(["--epsilon", epsilon] if epsilon else [])]
        command = [sys.executable, "-m", "dpps", "train", *given, "--seed", str(seed), "--out", folder]
        subprocess.run([*command, "--overwrite", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    return {
        "group": group,
        "setting": name,
        "epsilon": epsilon,
        "seed": seed,
        "accuracy": round(summary["test_accuracy"], 2),
        "rounds": summary["rounds"],
        "seconds": round(summary["seconds"]["total"], 1),
        "options": options,
    }


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="+", choices=sorted(GROUPS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    rows = list(csv.DictReader(given.out.open())) if given.out.exists() else []
    done = {(r["options"], r["epsilon"], int(r["seed"])) for r in rows}
    with given.out.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if not rows:
            writer.writeheader()
        for seed in range(given.seeds):
            for group in given.groups:
                for setting in GROUPS[group]:
                    if (setting[2], setting[1], seed) not in done:
                        writer.writerow(one(group, setting, seed))
                        file.flush()


if __name__ == "__main__":
    main()
