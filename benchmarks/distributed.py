"""A round in 4 processes on this machine, one node each, d = 1,000,000, everything in turn in one run.

Targets: mixing at most 1.5 times a bare point-to-point exchange of the same bytes between the same processes; a whole round with
noise at most 1.2 times mixing plus drawing that noise. The round is measured in every unit: they differ in what is done beside it
(node-swap broadcasts a number, contribution clips, record does neither).
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch
from measure import in_turn

import dpps
from dpps.cluster import Cluster, Place
from dpps.fabric.distributed import Distributed
from dpps.fabric.wire import ROWS
from dpps.noise import Outgoing
from dpps.topology import Weights, parse

Work = Callable[[], object]
UNITS: dict[str, tuple[dpps.Mechanism, dpps.Sensitivity]] = {
    "node-swap": (dpps.Laplace(5, 1e-9), dpps.Paper(0.78, 0.55)),  # a rate at which the estimate stays finite
    "contribution": (dpps.Laplace(5, 1e-3), dpps.Bounded(1.0, clip=1.0)),
    "record": (dpps.Gaussian(1.0), dpps.Bounded(1e-6)),
}
PROCESSES, DIMENSION, TURNS = 4, 1_000_000, 41


class Bare:
    """Rows to and from the same peers as under `weights`, without anything else."""

    def __init__(self, fabric: Distributed, weights: Weights, row: torch.Tensor) -> None:
        rank, dense = fabric.wire.rank, weights.dense()
        self.group, self.row = fabric.wire._group, row
        self.to = [p for p in range(PROCESSES) if p != rank and dense[p, rank]]
        self.received = {p: torch.empty_like(row) for p in range(PROCESSES) if p != rank and dense[rank, p]}

    def __call__(self) -> None:
        works = [self.group.recv([tensor], peer, ROWS) for peer, tensor in self.received.items()]
        works += [self.group.send([self.row], peer, ROWS) for peer in self.to]
        for work in works:
            work.wait(timedelta(seconds=60))


def measure(place: Place) -> None:
    """Both comparisons; rank 0 prints."""
    torch.set_num_threads(1)
    fabric = Distributed(PROCESSES, Cluster(place).join().meet({}))
    row, a = torch.randn(1, DIMENSION), torch.ones(1, 1, dtype=torch.float64)
    for name in ("exp", "complete"):
        weights = parse(name, PROCESSES).weights(0)
        ours, bare, ratio = in_turn(lambda: fabric.mix(weights, row, a), Bare(fabric, weights, row), TURNS)  # noqa: B023
        say(
            place,
            f"{name:<9} mixing {1e3 * ours:7.2f} ms   bare exchange {1e3 * bare:7.2f} ms   ratio {ratio:.2f}",
        )
        for unit in UNITS:
            ours, parts, ratio = in_turn(*rounds(fabric, name, unit, row, a), TURNS)
            say(
                place,
                f"{name:<9} round  {1e3 * ours:7.2f} ms   mix and draw  {1e3 * parts:7.2f} ms   ratio {ratio:.2f}   {unit}",
            )


def rounds(
    fabric: Distributed, name: str, unit: str, row: torch.Tensor, a: torch.Tensor
) -> tuple[Work, Work]:
    """A whole round, and its mixing plus its noise."""
    (mechanism, sensitivity), noise = UNITS[unit], dpps.Seeded(1)
    protocol = dpps.DPPS(parse(name, PROCESSES), mechanism, sensitivity, noise=noise, fabric=fabric)
    state = protocol.start(torch.zeros(1, DIMENSION), common_start=True)
    weights, perturbation, message = protocol.topology.weights(0), row / DIMENSION, row.clone()

    def parts() -> None:
        noise.release(mechanism, 1e-9, Outgoing(row, row, message, fabric.rows, 0, base_is_public=True))
        fabric.mix(weights, message, a)

    return lambda: protocol.step(state, perturbation), parts


def say(place: Place, line: str) -> None:
    """One voice."""
    if place.rank == 0:
        print(line, flush=True)


def main() -> None:
    """Start the processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    places = [Place(rank, PROCESSES, "127.0.0.1", port) for rank in range(PROCESSES)]
    started = [context.Process(target=measure, args=(place,)) for place in places]
    for process in started:
        process.start()
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main()
