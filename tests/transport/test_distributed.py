"""The distributed fabric gives the bits of one process, sends what it must and no more, and refuses bad rows by name."""

import math
import re
from itertools import count, islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import PeerError, RunError
from dpps.noise import NoiseSource, Seeded
from dpps.privacy import Pairs
from dpps.sensitivity import Unclipped
from dpps.topology import DOut, Exponential, Ring, Topology, parse
from dpps.transport import (
    ROWS,
    Bound,
    Cluster,
    Distributed,
    Exchange,
    Link,
    Message,
    Stacked,
    blocks,
    combine,
    rounds_until_heard,
)
from dpps.transport.distributed import HEADER_SIZE, SPREAD, Route, Wire, check_header, header
from tests.support import processes

NODES, WIDTH, ROUNDS = 10, 333, 7


def _fabric(cluster: Cluster, nodes: int = NODES) -> Distributed:
    return Distributed(nodes, cluster.join().meet({"version": "test"}))


def _perturbations(rounds: int = ROUNDS, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rounds, NODES, width, generator=torch.Generator().manual_seed(1))


def _protocol(fabric: dpps.transport.Fabric, topology: str, sensitivity: str, dropouts: float) -> dpps.DPPS:
    graph = parse(topology, NODES)
    graph = graph.with_dropouts(dropouts, seed=3) if dropouts else graph
    options: dict[str, Any] = {"sync_every": 3, "noise": Seeded(7), "fabric": fabric}
    if sensitivity == "bounded":  # rows are public: several gossip steps per message
        return dpps.DPPS(graph, dpps.Gaussian(2.0), Unclipped(0.5), mixes=3, **options)
    bound = dpps.Certified() if sensitivity == "certified" else dpps.Paper(0.78, 0.55)
    return dpps.DPPS(graph, dpps.Laplace(5, 1e-3), bound, **options)


def _states(
    fabric: dpps.transport.Fabric, topology: str, sensitivity: str, dropouts: float
) -> list[np.ndarray]:
    protocol = _protocol(fabric, topology, sensitivity, dropouts)
    state = protocol.start(torch.zeros(len(fabric.rows), WIDTH), common_start=True)
    seen = []
    for eps in _perturbations():
        record = protocol.step(state, eps[list(fabric.rows)])
        seen.append(np.concatenate([state.s.numpy().astype(np.float64), state.a.numpy()[:, None]], axis=1))
        seen.append(np.full((len(fabric.rows), 1), record.scale))
    return seen


CASES = [
    ("exp", "certified", 0.0),
    ("4-out", "paper", 0.0),
    ("4-out", "certified", 0.3),
    ("exp", "bounded", 0.0),
    ("4-out", "bounded", 0.3),
]


def _all_cases(cluster: Cluster) -> list[list[np.ndarray]]:
    fabric = _fabric(cluster)
    return [_states(fabric, *case) for case in CASES]


@pytest.mark.parametrize("size", [2, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 10))])
def test_bits_of_one_process(size: int) -> None:
    """EXP and 4-Out, synchronisation, absent nodes, one gossip step per message or three: s, a and the noise scale of every round."""
    parts = processes.run(size, _all_cases)
    for k, case in enumerate(CASES):
        alone = _states(Stacked(NODES), *case)
        for t, expected in enumerate(alone):
            together = np.concatenate([part[k][t] for part in parts])
            assert np.array_equal(together, expected), (case, t)


# Learning


def _learn(
    fabric: dpps.transport.Fabric | Cluster, model: str, topology: str, rounds: int
) -> tuple[Any, Any]:
    """Rows of s and l after a few rounds of PartPSP with Laplace noise and synchronisation."""
    nodes, shape, batch = (NODES, (1, 6, 6), 5) if model == "mlp" else (2, (3, 32, 32), 10)
    fabric = _fabric(fabric, nodes) if isinstance(fabric, Cluster) else fabric
    rng = torch.Generator().manual_seed(4)
    x, y = torch.randn(nodes, 20, *shape, generator=rng), torch.randint(3, (nodes, 20), generator=rng)
    torch.manual_seed(0)
    network, shared = dpps.models.build(model, "1", shape, 3)
    learner = dpps.Run(
        dpps.PartPSP(network, shared, batch_size=batch),
        [TensorDataset(x[n], y[n]) for n in fabric.rows],
        topology=parse(topology, nodes),
        privacy=dpps.NodeSwap(5.0, 1e-3, clip=10.0),
        sync_every=3,
        seed=7,
        deployment=dpps.Simulation(fabric),
    ).start(epochs=20)
    for _ in range(rounds):
        learner.step()
    return learner.state.shared.s.numpy(), learner.state.local.numpy()


def _learn_twice(cluster: Cluster) -> list[tuple[Any, Any]]:
    fabric = _fabric(cluster)
    return [_learn(fabric, "mlp", topology, 7) for topology in ("exp", "4-out")]


@pytest.mark.parametrize("size", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 10)), 5])
def test_training_of_one_process(size: int) -> None:
    """Gradients of some nodes may differ in the last bits from those of all: matrix products go by batches."""
    together = processes.run(size, _learn_twice)
    for t, topology in enumerate(("exp", "4-out")):
        alone = _learn(Stacked(NODES), "mlp", topology, 7)
        for k in range(2):
            rows = np.concatenate([part[t][k] for part in together])
            assert np.allclose(rows, alone[k], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_training_of_resnet() -> None:
    """Equal to the last bits after one round; BatchNorm enlarges such differences about a hundred times a round."""
    for rounds, tolerance in ((1, 1e-7), (3, 1e-3)):
        alone = _learn(Stacked(2), "resnet18", "exp", rounds)
        together = processes.run(2, _learn, "resnet18", "exp", rounds)
        for k in range(2):
            rows = np.concatenate([part[k] for part in together])
            assert np.linalg.norm(rows - alone[k]) <= tolerance * np.linalg.norm(alone[k])


# What is sent


def _count_bytes(cluster: Cluster) -> tuple[list[tuple[int, int]], int]:
    """What one process sends: in every round, with how many peers; and for a mean."""
    fabric, seen = _fabric(cluster), []
    fabric.gather(torch.zeros(1, dtype=torch.float64))  # as a training run does before its first round
    for topology, sensitivity in (("exp", "paper"), ("4-out", "certified")):
        protocol = _protocol(fabric, topology, sensitivity, 0.0)
        state = protocol.start(torch.zeros(1, WIDTH), common_start=True)
        for t, eps in enumerate(_perturbations()):
            before = fabric.sent_bytes
            peers = int(protocol.topology.weights(state.clock).out_degree[fabric.rows[0]])
            protocol.step(state, eps[list(fabric.rows)])
            if (t + 1) % protocol.sync_every:
                seen.append((fabric.sent_bytes - before, peers))
    for _ in range(2):  # the first mean of a kind is announced
        before = fabric.sent_bytes
        fabric.mean(torch.ones(1, LONG_ROW))
    return seen, fabric.sent_bytes - before


LONG_ROW = 64 * NODES * 3


def test_bytes_of_a_round_and_of_a_mean() -> None:
    """A row to each peer that needs it, and at most 16 N bytes for everything else; and those of an all-reduce."""
    for rounds, mean in processes.run(NODES, _count_bytes):
        for sent, peers in rounds:
            assert 0 < sent - 4 * WIDTH * peers <= 16 * NODES - (NODES - 1)  # the stop flag takes N - 1 more
        assert mean == 2 * (NODES - 1) * 4 * LONG_ROW // NODES


# Bad rows


def _one_bad_row(cluster: Cluster, verb: str, value: float) -> str:
    fabric = _fabric(cluster, 3)
    x = torch.ones(1, 200)
    link = fabric.start(x, common=False)
    if cluster.rank == 1:
        x[0, 150] = value
    if verb == "mean":
        return processes.outcome(cluster, lambda: fabric.mean(x))
    step, a = Exchange(0, parse("ring", 3).weights(0)), torch.ones(1, dtype=torch.float64)
    return processes.outcome(cluster, lambda: fabric.gossip([step], x, a, link))


@pytest.mark.parametrize(("verb", "value"), [("mix", float("nan")), ("mean", float("-inf"))])
def test_rows_that_are_not_finite_are_refused_by_name(verb: str, value: float) -> None:
    for said in processes.run(3, _one_bad_row, verb, value):
        assert "node 1 (rank 1) holds NaN" in said


def _one_other_shape(cluster: Cluster, after: int) -> str:
    fabric, weights = _fabric(cluster, 3), parse("complete", 3).weights(0)
    a = torch.ones(1, dtype=torch.float64)

    def rounds() -> None:
        link = fabric.start(torch.ones(1, 300 if cluster.rank == 2 and after == 0 else 200), common=True)
        for t in range(after + 1):
            row = torch.ones(1, 300 if cluster.rank == 2 and t == after else 200)
            link = fabric.gossip([Exchange(t, weights, ahead=weights)], row, a, link).link

    return processes.outcome(cluster, rounds)


@pytest.mark.parametrize("after", [0, 2])
def test_rows_of_another_shape_are_refused_by_name(after: int) -> None:
    said = processes.run(3, _one_other_shape, after)
    assert all(re.search(r"rank 2 .*300 float32|rank 2 stopped", s) for s in said[:2]), said
    assert "200 float32" in said[2]


@pytest.mark.parametrize(("nodes", "size"), [(10, 3), (7, 7), (1000, 16)])
def test_blocks_cover_all_nodes_in_order(nodes: int, size: int) -> None:
    parts = blocks(nodes, size)
    assert [n for part in parts for n in part] == list(range(nodes))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    with pytest.raises(dpps.errors.UsageError, match=rf"{nodes + 1} processes .*{nodes} nodes"):
        blocks(nodes, nodes + 1)


# The clock


def _restarted(cluster: Cluster) -> list[np.ndarray]:
    return _with_restarts(_fabric(cluster))


def _with_restarts(fabric: dpps.transport.Fabric) -> list[np.ndarray]:
    """The rows of a round are on their way to a round ahead when the clock restarts: other rows come instead."""
    protocol = _protocol(fabric, "exp", "certified", 0.0)
    state = protocol.start(torch.zeros(len(fabric.rows), WIDTH), common_start=True)
    seen = []
    for t, eps in enumerate(_perturbations()):
        if t in (1, 4, 5):
            protocol.restart_clock(state, 0.5)
        protocol.step(state, eps[list(fabric.rows)])
        seen.append(np.concatenate([state.s.numpy().astype(np.float64), state.a.numpy()[:, None]], axis=1))
    return seen


@pytest.mark.parametrize("size", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_bits_of_one_process_when_the_clock_restarts(size: int) -> None:
    parts, alone = processes.run(size, _restarted), _with_restarts(Stacked(NODES))
    for t, expected in enumerate(alone):
        assert np.array_equal(np.concatenate([part[t] for part in parts]), expected), t


@pytest.mark.parametrize("topology", [Ring(7), Exponential(7), DOut(7, 3)], ids=str)
@pytest.mark.parametrize("processes", [2, 3, 7])
def test_every_process_computes_its_rows_of_the_whole(topology: Topology, processes: int) -> None:
    weights, x = topology.weights(1), torch.randn(7, 4, dtype=torch.float64)
    parts = blocks(7, processes)
    routes = [Route.of(weights, parts, rank) for rank in range(processes)]
    for rank, (route, own) in enumerate(zip(routes, parts, strict=True)):
        table = torch.full((len(route.needed), 4), torch.nan, dtype=torch.float64)
        table[route.own_places] = x[own.start : own.stop][route.own_rows]
        for peer, places in route.incoming.items():
            theirs = parts[peer]
            table[places] = x[theirs.start : theirs.stop][routes[peer].outgoing[rank]]
        rows = torch.empty(len(own), 4, dtype=torch.float64)
        rows[route.inner_rows] = combine(x[own.start : own.stop], *route.inner)
        rows[route.outer_rows] = combine(table, *route.outer)
        expected = torch.from_numpy(np.asarray(weights.dense())) @ x
        torch.testing.assert_close(rows, expected[own.start : own.stop])


class Group:
    """As a process group of torch.distributed; every operation ends with what it was told to."""

    def __init__(self, error: str | None = None) -> None:
        self.error, self.log = error, []

    def _work(self, what: str, peer: int, tag: int):
        self.log.append((what, peer, tag))
        error = self.error

        class Work:
            def wait(self, limit) -> None:
                if error:
                    raise RuntimeError(error)

        return Work()

    def send(self, tensors, peer: int, tag: int):
        return self._work("send", peer, tag)

    def recv(self, tensors, peer: int, tag: int):
        return self._work("recv", peer, tag)


def test_receives_are_posted_before_sends_and_payload_is_counted() -> None:
    group = Group()
    wire = Wire(group, 1, 3)
    assert wire.peers == [2, 0]
    wire.exchange([Message(2, ROWS, torch.zeros(5))], [Message(0, ROWS, torch.zeros(7))])
    assert group.log == [("recv", 0, ROWS), ("send", 2, ROWS)]
    assert wire.sent_bytes == 20


@pytest.mark.parametrize(
    ("error", "said"),
    [("Timed out waiting 1000ms", "rank 2: .*48 s"), ("Connection closed by peer", "rank 2: ")],
)
def test_a_peer_that_is_silent_or_gone_is_named(error: str, said: str) -> None:
    wire = Wire(Group(error), 0, 3)
    with pytest.raises(RunError, match=said):
        wire.exchange([], [Message(2, ROWS, torch.zeros(1))])


def _bytes(head: bytes) -> torch.Tensor:
    return torch.tensor([*head, 7, 7], dtype=torch.uint8)


def test_what_was_announced_is_let_through() -> None:
    head = header("mix", torch.zeros(2, 5))
    assert len(head) == HEADER_SIZE
    check_header(3, _bytes(head), head)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (header("mix", torch.zeros(2, 6)), "rows of 6 float32 for mix"),
        (header("mix", torch.zeros(2, 5, dtype=torch.float64)), "rows of 5 float64 for mix"),
        (header("gather", torch.zeros(2, 5)), "rows of 5 float32 for gather"),
        (bytes([5, 0, 0, 0, 200, 200, 0, 0]), ".*unknown"),
    ],
)
def test_anything_else_is_refused_by_name(sent: bytes, said: str) -> None:
    with pytest.raises(PeerError, match=rf"rank 3 sends {said}.*rows of 5 float32 for mix"):
        check_header(3, _bytes(sent), header("mix", torch.zeros(2, 5)))


@pytest.mark.parametrize(
    ("topology", "nodes", "size"), [("exp", 8, 8), ("ring", 6, 6), ("ring", 6, 2), ("4-out", 10, 5)]
)
@pytest.mark.parametrize("clock", [0, 1, 5])
def test_everybody_has_heard_then_and_not_before(topology: str, nodes: int, size: int, clock: int) -> None:
    """Against reachability by products of the matrices themselves."""
    graph, held = parse(topology, nodes), blocks(nodes, size)
    for rank in range(size):
        rounds = rounds_until_heard((graph.weights(clock + t) for t in count()), held, rank)
        assert rounds is not None
        reached = torch.zeros(nodes)
        reached[list(held[rank])] = 1
        steps = []
        for t in range(rounds):
            reached = torch.from_numpy(graph.weights(clock + t).dense() != 0).float() @ reached
            for block in held:  # a process passes on what any of its nodes has heard
                reached[list(block)] = float(reached[list(block)].any())
            steps.append(bool(reached.all()))
        assert steps == [False] * (rounds - 1) + [True]


def test_a_round_in_which_all_average_tells_everybody() -> None:
    ring = parse("ring", 40)
    assert rounds_until_heard([ring.weights(0), None, ring.weights(2)], blocks(40, 40), 3) == 2


def test_a_run_that_is_over_first_is_not_stopped() -> None:
    ring = parse("ring", 40)
    assert rounds_until_heard(islice(map(ring.weights, count()), 3), blocks(40, 40), 0) is None


def test_a_single_process_stops_at_once_and_the_earliest_request_counts() -> None:
    control = Stacked(1)
    assert control.rounds_until_heard([]) == 0
    assert control.everybody(3.5) == [3.5]
    for after in (7, 5, 9):
        control.ask_to_stop(after)
    assert control.stop_after == 5


def _ask_in_rounds(cluster: Cluster, asked: dict[int, int], sync_every: int) -> tuple[int | None, int]:
    """Rank r asks after round asked[r]; the round after which it stops, and how many rounds it has done."""
    nodes = cluster.rendezvous.size
    fabric = Distributed(nodes, cluster.join().meet({"version": "test"}))
    protocol = dpps.DPPS(parse("exp", nodes), dpps.NoNoise(), fabric=fabric, sync_every=sync_every)
    state = protocol.start(torch.zeros(1, 5), common_start=True)
    for round_ in range(40):
        protocol.step(state)
        if asked.get(cluster.rank) == round_:
            coming = (protocol.weights(clock) for clock in count(state.clock))
            rounds = fabric.rounds_until_heard(coming)
            assert rounds is not None
            fabric.ask_to_stop(round_ + rounds)
        if fabric.stop_after is not None and round_ >= fabric.stop_after:
            break
    return fabric.stop_after, state.round


@pytest.mark.parametrize(("sync_every", "stop"), [(0, 7), pytest.param(1, 5, marks=pytest.mark.slow), (3, 5)])
def test_all_processes_stop_after_the_same_round(sync_every: int, stop: int) -> None:
    """Five of them, and two ask at different times. The exponential graph takes 3 rounds to reach 5 nodes."""
    found = processes.run(5, _ask_in_rounds, {3: 4, 1: 5}, sync_every)
    assert found == [(stop, stop + 1)] * 5


def _numbers(cluster: Cluster) -> list[float]:
    return _fabric(cluster, 6).everybody(10.0 + cluster.rank)


def _no_number(cluster: Cluster) -> str:
    fabric = _fabric(cluster, 6)
    try:
        fabric.everybody(float("nan") if cluster.rank == 1 else 5.0)
    except dpps.errors.PeerError as error:
        return str(error)
    return "believed"


def test_what_is_no_number_is_refused_by_name() -> None:
    for said in processes.run(2, _no_number):
        assert "rank 1 says nan " in said


def test_numbers_of_all_processes() -> None:
    assert processes.run(3, _numbers) == [[10.0, 11.0, 12.0]] * 3


LENGTH = 300
MOMENTUM = dpps.Momentum(0.9)
MECHANISMS = {
    "gaussian": (dpps.Gaussian(3.0), dpps.Bounded(0.2, clip=0.1)),
    "laplace": (dpps.Laplace(0.5), dpps.Bounded(0.2, clip=0.1)),
}


class Listening(dpps.Stacked):
    def push(self, exchange: Exchange, s: torch.Tensor, a: torch.Tensor, link: Link) -> None:
        self.exchange = exchange
        super().push(exchange, s, a, link)


@pytest.mark.parametrize("width", [1, LENGTH])
@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("topology", ["exp", "column"])
@pytest.mark.parametrize("kind", ["plain", "momentum", "partners"])
def test_honest_rows_stay_within_and_not_far_below(name: str, width: int, topology: str, kind: str) -> None:
    """All perturbations in one direction, 100 rounds; with weights that are only column stochastic, too."""
    mechanism, sensitivity = MECHANISMS[name]
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
    state = protocol.start(torch.ones(1, LENGTH), common_start=True)
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


@pytest.mark.parametrize(
    ("lie", "sync_every", "momentum"), [("1e30", 3, False), ("-10 times", 0, False), ("1e30", 0, True)]
)
def test_a_row_that_is_too_long_is_refused_with_the_name_of_its_node(
    lie: str, sync_every: int, momentum: bool
) -> None:
    found = processes.run(3, _one_liar, lie, sync_every, momentum)
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
    state = protocol.start(torch.ones(1, LENGTH), common_start=True)
    post = fabric.wire.post

    def lying(outgoing: list[Message], incoming: list[Message]) -> object:
        for message in outgoing:
            if message.tag == SPREAD and cluster.rank == 1:
                message.tensor.fill_(1e20)
        return post(outgoing, incoming)

    fabric.wire.post = lying  # type: ignore[assignment, method-assign]
    return processes.outcome(cluster, lambda: protocol.step(state))


def test_a_part_of_the_mean_that_cannot_be_is_refused_with_the_name_of_its_rank() -> None:
    found = processes.run(3, _one_false_part)
    for said in (found[0], found[2]):
        assert "from rank 1 has norm" in said, found


@pytest.mark.parametrize("momentum", [pytest.param(False, marks=pytest.mark.slow), True])
def test_honest_processes_are_not_refused(momentum: bool) -> None:
    """The liar says the start row itself."""
    assert processes.run(3, _one_liar, "1.0", 0, momentum) == ["accepted"] * 3
