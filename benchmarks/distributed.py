"""A round in 4 processes on this machine, one node each, d = 1,000,000, everything in turn in one run.

Claims: mixing at most 1.5 times a bare point-to-point exchange of the same bytes between the same processes; a whole round with
noise at most 1.2 times mixing plus drawing that noise. The round is measured in every unit: they differ in what is done beside it
(node-swap broadcasts a number, contribution clips, record does neither).

In node-swap the noise cannot be drawn before the largest S_i of all nodes is known: all processes have to meet once more in a
round, which mixing and drawing alone need not. So the claim for this round is relative to mixing, drawing and a bare exchange of one
number between all, which is as little as that meeting can cost.
"""

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch
from measure import Row, compare, main

import dpps
from dpps.noise import Outgoing
from dpps.sensitivity import Unclipped
from dpps.topology import Weights, parse
from dpps.transport import ROWS, SMALL, Cluster, Distributed, Exchange, Link, Rendezvous

Work = Callable[[], object]
UNITS: dict[str, tuple[dpps.Mechanism, dpps.Sensitivity]] = {
    "node-swap": (dpps.Laplace(5, 1e-9), dpps.Paper(0.78, 0.55)),  # a rate at which the estimate stays finite
    "contribution": (dpps.Laplace(5, 1e-3), dpps.Bounded(clip=0.5)),
    "record": (dpps.Gaussian(1.0), Unclipped(1e-6)),
}
FULL, QUICK = (4, 1_000_000, 41), (2, 1_000, 2)
"""Processes, parameters, turns."""
MIXING, ROUND = 1.5, 1.2
"""Targets."""


class Bare:
    """A tensor to some peers and one like it from others, without anything else."""

    def __init__(
        self, fabric: Distributed, tensor: torch.Tensor, to: list[int], of: list[int], tag: int
    ) -> None:
        self.group, self.tensor, self.to, self.tag = fabric.wire._group, tensor, to, tag
        self.received = {peer: torch.empty_like(tensor) for peer in of}

    @classmethod
    def rows(cls, fabric: Distributed, weights: Weights, row: torch.Tensor) -> "Bare":
        """To and from the same peers as under `weights`."""
        rank, dense = fabric.wire.rank, weights.dense()
        to = [p for p in fabric.wire.peers if dense[p, rank]]
        return cls(fabric, row, to, [p for p in fabric.wire.peers if dense[rank, p]], ROWS)

    @classmethod
    def number(cls, fabric: Distributed) -> "Bare":
        """One to everybody."""
        number = torch.ones(1, dtype=torch.float64)
        return cls(fabric, number, fabric.wire.peers, fabric.wire.peers, SMALL)

    def __call__(self) -> None:
        works = [self.group.recv([tensor], peer, self.tag) for peer, tensor in self.received.items()]
        works += [self.group.send([self.tensor], peer, self.tag) for peer in self.to]
        for work in works:
            work.wait(timedelta(seconds=60))


def measure(place: Rendezvous, sizes: tuple[int, int, int], out: Connection) -> None:
    """All comparisons, in every process alike; rank 0 reports the rows."""
    torch.set_num_threads(1)
    processes, dimension, turns = sizes
    fabric = Distributed(processes, Cluster(place).join().meet({}))
    row, a = torch.randn(1, dimension), torch.ones(1, dtype=torch.float64)

    def report(what: str, ours: Work, beside_what: str, beside: Work, target: float | None) -> None:
        found = compare(f"{what}, {processes} processes", ours, beside_what, beside, turns, target)
        if place.rank == 0:
            out.send(found)

    for name in ("exp", "complete"):
        weights = parse(name, processes).weights(0)
        mixing = partial(mix, fabric, weights, row, a, fabric.start(row, common=False))
        report(f"mixing, {name}", mixing, "bare exchange", Bare.rows(fabric, weights, row), MIXING)
        for unit in UNITS:
            whole, parts = rounds(fabric, name, unit, row, a)
            meets = unit == "node-swap"
            report(f"round, {name}, {unit}", whole, "mix and draw", parts, None if meets else ROUND)
            if meets:
                meeting = partial(one_after_another, Bare.number(fabric), parts)
                report(f"round, {name}, {unit}", whole, "bare number, mix and draw", meeting, ROUND)


def mix(fabric: Distributed, weights: Weights, row: torch.Tensor, a: torch.Tensor, link: Link) -> None:
    """One round of the network without anything else."""
    fabric.push(Exchange(0, weights, ahead=weights), row, a, link)
    fabric.collect()


def one_after_another(*works: Work) -> None:
    """Do all of them."""
    for work in works:
        work()


def rounds(
    fabric: Distributed, name: str, unit: str, row: torch.Tensor, a: torch.Tensor
) -> tuple[Work, Work]:
    """A whole round, and its mixing plus its noise."""
    (mechanism, sensitivity), noise, dimension = UNITS[unit], dpps.Seeded(1), row.shape[1]
    protocol = dpps.DPPS(parse(name, fabric.nodes), mechanism, sensitivity, noise=noise, fabric=fabric)
    state = protocol.start(torch.zeros(1, dimension), common_start=True)
    weights, perturbation, message = protocol.topology.weights(0), row / dimension, row.clone()

    def parts() -> None:
        noise.release(mechanism, 1e-9, Outgoing(row, row, message, fabric.rows, 0, base_is_public=True))
        mix(fabric, weights, message, a, state.link)

    return lambda: protocol.step(state, perturbation), parts


def rows(quick: bool) -> Iterator[Row]:
    """Start the processes, and pass on what rank 0 reports."""
    sizes = QUICK if quick else FULL
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    places = [Rendezvous(rank, sizes[0], "127.0.0.1", port) for rank in range(sizes[0])]
    started = [context.Process(target=measure, args=(place, sizes, theirs)) for place in places]
    for process in started:
        process.start()
    theirs.close()
    try:
        while True:
            yield ours.recv()
    except EOFError:  # all have ended
        pass
    for process in started:
        process.join()
    if any(process.exitcode for process in started):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main(rows, threads=1)
