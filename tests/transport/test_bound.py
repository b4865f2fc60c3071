"""Rows of honest nodes are within what the contract makes possible, and those far beyond are refused by name."""

import math

import pytest
import torch

import dpps
from dpps.noise import NoiseSource
from dpps.privacy import Pairs
from dpps.topology import parse
from dpps.transport import SPREAD, Bound, Cluster, Distributed, Exchange, Link, Message
from tests.support import processes

WIDTH = 300
MOMENTUM = dpps.Momentum(0.9)
CASES = {
    "gaussian": (dpps.Gaussian(3.0), dpps.Bounded(0.2, clip=0.1)),
    "laplace": (dpps.Laplace(0.5), dpps.Bounded(0.2, clip=0.1)),
}


class Listening(dpps.Stacked):
    def push(self, exchange: Exchange, s: torch.Tensor, a: torch.Tensor, link: Link) -> None:
        self.exchange = exchange
        super().push(exchange, s, a, link)


@pytest.mark.parametrize("width", [1, WIDTH])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("topology", ["exp", "column"])
@pytest.mark.parametrize("kind", ["plain", "momentum", "partners"])
def test_honest_rows_stay_within_and_not_far_below(name: str, width: int, topology: str, kind: str) -> None:
    """All perturbations in one direction, 100 rounds; with weights that are only column stochastic, too."""
    mechanism, sensitivity = CASES[name]
    graph = parse("exp", 6) if topology == "exp" else dpps.topology.Static(_columns())
    noise: NoiseSource = dpps.Seeded(1)
    if kind == "partners":
        noise, mechanism = noise.with_partners(Pairs(1).partners(6)), dpps.Gaussian(3.0)
    fabric = Listening(6)
    protocol = dpps.DPPS(graph, mechanism, sensitivity, noise=noise, fabric=fabric)
    velocity = MOMENTUM.start(torch.zeros(6, width))
    gain = MOMENTUM.gain if kind == "momentum" else 1.0
    start = torch.ones(6, width)
    state = protocol.start(start)
    bound = Bound(math.sqrt(width))
    for _ in range(100):
        a = state.a.clone()
        message = protocol.release(state, torch.ones(6, width))
        if kind == "momentum":
            change, velocity = MOMENTUM.step(velocity, message.rows - state.s)
            message = protocol.post_process(state, message, change, gain)
        protocol.exchange(state, message)
        bound = bound.after(fabric.exchange, a)
        limits = bound.limits(a, width)
        assert limits is not None
        norms = message.rows.double().norm(dim=1)
        assert bool((norms <= limits).all())
    # most of the noise that partners share cancels on the way
    loose = gain * (4 if kind == "partners" else 1)
    assert float((limits / norms).min()) < loose * (60 if width == 1 else 12)


def _columns() -> list[list[float]]:
    """Node 0 gives half of its share to each of two others, the rest go round a ring: columns sum to one, rows do not."""
    matrix = torch.eye(6, dtype=torch.float64) * 0.5
    for j in range(6):
        matrix[(j + 1) % 6, j] += 0.25
        matrix[(j + 2) % 6, j] += 0.25
    matrix[:, 0] = torch.tensor([0.4, 0.3, 0.3, 0, 0, 0], dtype=torch.float64)
    return matrix.tolist()


def test_nothing_known_means_no_limit() -> None:
    a = torch.ones(2, dtype=torch.float64)
    weights = parse("ring", 2).weights(0)
    assert Bound(1.0).after(Exchange(0, weights), a).limits(a, 5) is None
    silent = Exchange(0, weights, step=1.0, deviation=0.0).lengthened(math.inf)
    assert Bound(1.0).after(silent, a).limits(a, 5) is None
    assert Bound(math.inf).after(Exchange(0, weights, step=1.0, deviation=1.0), a).limits(a, 5) is None
    known = Bound(1.0).after(Exchange(0, weights, step=1.0, deviation=0.0), a)
    assert Bound.of(known.tensor()) == known
    assert torch.equal(known.limits(a, 5), 1.01 * 2.0 * a)  # type: ignore[arg-type]


def _one_liar(cluster: Cluster, lie: str, sync_every: int, momentum: bool = False) -> str:
    """Rank 1 sends something else than it should in round 2."""
    fabric = Distributed(3, cluster.join().meet({"version": "test"}))
    mechanism, sensitivity = dpps.Gaussian(1.0), dpps.Bounded(0.002, clip=0.001)
    protocol = dpps.DPPS(
        parse("exp", 3),
        mechanism,
        sensitivity,
        noise=dpps.Seeded(cluster.rank),
        fabric=fabric,
        sync_every=sync_every,
    )
    state = protocol.start(torch.ones(1, WIDTH), common_start=True)
    push = fabric.push

    def lying(exchange: Exchange, s: torch.Tensor, a: torch.Tensor, link: object) -> None:
        if cluster.rank == 1 and exchange.round == 2:
            s.mul_(-10.0) if lie == "-10 times" else s.fill_(float(lie))
        push(exchange, s, a * -100, link)  # type: ignore[arg-type]

    fabric.push = lying  # type: ignore[assignment]
    velocity = MOMENTUM.start(state.s)
    try:
        for _ in range(6):
            message = protocol.release(state)
            if momentum:
                change, velocity = MOMENTUM.step(velocity, message.rows - state.s)
                message = protocol.post_process(state, message, change, MOMENTUM.gain)
            protocol.exchange(state, message)
            assert torch.equal(state.a, torch.ones(1, dtype=torch.float64)), "a is not what anybody says"
    except dpps.errors.RunError as error:
        with pytest.raises(dpps.errors.RunError, match="round"):  # nobody waits for it any more
            protocol.step(state)
        cluster.give_up(error)
        return str(error)
    return "accepted"


@pytest.mark.parametrize("sync_every", [0, 3])
@pytest.mark.parametrize("lie", ["1e30", "-10 times"])
def test_a_row_that_is_too_long_is_refused_with_the_name_of_its_node(lie: str, sync_every: int) -> None:
    found = processes.run(3, _one_liar, lie, sync_every)
    for said in (found[0], found[2]):
        assert "node 1 (rank 1) has norm" in said, found


def _one_false_part(cluster: Cluster) -> str:
    """Rank 1 averages its columns of the mean to something else than they are."""
    fabric = Distributed(3, cluster.join().meet({"version": "test"}))
    protocol = dpps.DPPS(
        parse("exp", 3),
        dpps.Gaussian(1.0),
        dpps.Bounded(0.002, clip=0.001),
        noise=dpps.Seeded(cluster.rank),
        fabric=fabric,
        sync_every=1,
    )
    state = protocol.start(torch.ones(1, WIDTH), common_start=True)
    post = fabric.wire.post

    def lying(outgoing: list[Message], incoming: list[Message]) -> object:
        for message in outgoing:
            if message.tag == SPREAD and cluster.rank == 1:
                message.tensor.fill_(1e20)
        return post(outgoing, incoming)

    fabric.wire.post = lying  # type: ignore[assignment, method-assign]
    try:
        protocol.step(state)
    except dpps.errors.RunError as error:
        cluster.give_up(error)
        return str(error)
    return "accepted"


def test_a_part_of_the_mean_that_cannot_be_is_refused_with_the_name_of_its_rank() -> None:
    found = processes.run(3, _one_false_part)
    for said in (found[0], found[2]):
        assert "from rank 1 has norm" in said, found


def test_with_momentum_too() -> None:
    found = processes.run(3, _one_liar, "1e30", 0, True)
    for said in (found[0], found[2]):
        assert "node 1 (rank 1) has norm" in said, found


@pytest.mark.parametrize("momentum", [False, True])
def test_honest_processes_are_not_refused(momentum: bool) -> None:
    """The liar says the start row itself."""
    assert processes.run(3, _one_liar, "1.0", 0, momentum) == ["accepted"] * 3
