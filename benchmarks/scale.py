"""Many nodes: what a node costs among a thousand and among a hundred, and consensus of ten thousand.

Claims: a round costs per node at most 1.15 times as much with N=1000 as with N=100 (MLP, batch 20, as many examples at every
node). 100 rounds of private consensus with N=10,000, d=1,000, EXP stay below 1 GB in a process of their own.
"""

import json
import sys
import time
from collections.abc import Iterator

import torch
from learners import learner
from measure import Row, Spread, compare, in_fresh_process, main, peak_memory

import dpps


def rows(quick: bool) -> Iterator[Row]:
    """The cost per node, then the consensus."""
    many, batch, turns = (20, 2, 2) if quick else (1000, 20, 15)
    few = many // 10
    one, ten = learner(many, batch, 3 * batch), learner(few, batch, 3 * batch)
    yield compare(
        f"cost per node: a round of N={many}, MLP, batch {batch}",
        one.step,
        f"ten rounds of N={few}",
        lambda: [ten.step() for _ in range(10)],
        turns,
        1.15,
    )
    nodes, dimension, rounds = (100, 10, 3) if quick else (10_000, 1_000, 100)
    measured = in_fresh_process(__file__, "consensus", nodes, dimension, rounds, torch.get_num_threads())
    named = f"consensus, N={nodes:,}, d={dimension:,}, {rounds} rounds"
    yield Row(f"{named}: time", Spread.of([measured["seconds"]]))
    yield Row(f"{named}: peak memory", Spread.of([measured["peak"]]), target=1.0, unit="GB")


def consensus(nodes: int, dimension: int, rounds: int, threads: int) -> None:
    """Print the seconds and the peak memory of private consensus."""
    torch.set_num_threads(threads)
    mechanism, sensitivity = dpps.Laplace(5, 1e-3), dpps.Paper(0.78, 0.55)
    protocol = dpps.DPPS(dpps.Exponential(nodes), mechanism, sensitivity, noise=dpps.Seeded(0))
    state = protocol.start(torch.randn(nodes, dimension))
    begun = time.perf_counter()
    for _ in range(rounds):
        protocol.step(state)
    print(json.dumps({"seconds": time.perf_counter() - begun, "peak": peak_memory()}))


if __name__ == "__main__":
    consensus(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["consensus"] else main(rows)
