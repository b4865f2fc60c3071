"""A sweep: which topology for which noise? Runs every combination, prints a table, keeps every run's folder.

python examples/sweep.py [FOLDER]
"""

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

from dpps.runs import Options, Run

TOPOLOGIES, EPSILONS = ("ring", "exp", "complete"), (1.0, 3.0)


def main(folder: Path) -> None:
    """Six short runs on the embedded data."""
    epochs = 2
    base = Options(nodes=5, epochs=epochs, batch_size=200, shared="all", quiet=True, overwrite=True)
    print(f"{'topology':>10} {'epsilon':>8} {'accuracy %':>11} {'MB sent per node':>17}")
    for topology, epsilon in product(TOPOLOGIES, EPSILONS):
        config = replace(base, topology=topology, epsilon=epsilon, out=folder / f"{topology}-{epsilon:g}")
        summary = Run.from_options(config).fit().summary
        sent = summary.bytes_sent_per_node / 1e6
        print(f"{topology:>10} {summary.privacy.epsilon:>8.2f} {summary.test_accuracy:>11.1f} {sent:>17.2f}")
    print(f"compare them: dpps report {folder}/*")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sweep"))
