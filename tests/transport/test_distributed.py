"""The distributed fabric gives the bits of one process, sends what it must and no more, and refuses bad rows by name."""

import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import dpps
from dpps.noise import Seeded
from dpps.sensitivity import Unclipped
from dpps.topology import parse
from dpps.transport import Cluster, Distributed, Exchange, Rendezvous, Stacked, blocks
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


@pytest.mark.parametrize("size", [1, 2, 5, 10])
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


def _count_bytes(cluster: Cluster, topology: str, sensitivity: str) -> list[tuple[int, int]]:
    fabric = _fabric(cluster)
    fabric.gather(torch.zeros(1, dtype=torch.float64))  # as a training run does before its first round
    protocol = _protocol(fabric, topology, sensitivity, 0.0)
    state = protocol.start(torch.zeros(1, WIDTH), common_start=True)
    seen = []
    for t, eps in enumerate(_perturbations()):
        before = fabric.sent_bytes
        peers = int(protocol.topology.weights(state.clock).out_degree[fabric.rows[0]])
        protocol.step(state, eps[list(fabric.rows)])
        if (t + 1) % protocol.sync_every:
            seen.append((fabric.sent_bytes - before, peers))
    return seen


@pytest.mark.parametrize(("topology", "sensitivity"), [("exp", "paper"), ("4-out", "certified")])
def test_bytes_of_a_round(topology: str, sensitivity: str) -> None:
    """A row to each peer that needs it, and at most 16 N bytes for everything else."""
    for rank in processes.run(NODES, _count_bytes, topology, sensitivity):
        for sent, peers in rank:
            assert 0 < sent - 4 * WIDTH * peers <= 16 * NODES - (NODES - 1)  # the stop flag takes N - 1 more


def _count_mean(cluster: Cluster, width: int) -> int:
    fabric = _fabric(cluster)
    x = torch.ones(1, width)
    fabric.mean(x)
    before = fabric.sent_bytes
    fabric.mean(x)
    return fabric.sent_bytes - before


def test_bytes_of_a_mean_are_those_of_an_all_reduce() -> None:
    width = 64 * NODES * 3
    assert processes.run(NODES, _count_mean, width) == [2 * (NODES - 1) * 4 * width // NODES] * NODES


# Bad rows


def _one_bad_row(cluster: Cluster, verb: str, value: float) -> str:
    fabric = _fabric(cluster, 3)
    x = torch.ones(1, 200)
    link = fabric.start(x, common=False)
    if cluster.rank == 1:
        x[0, 150] = value
    try:
        if verb == "mix":
            fabric.push(Exchange(0, parse("ring", 3).weights(0)), x, torch.ones(1, dtype=torch.float64), link)
            fabric.collect()
        else:
            fabric.mean(x)
    except dpps.errors.RunError as error:
        cluster.give_up(error)
        return str(error)
    return "accepted"


@pytest.mark.parametrize(("verb", "value"), [("mix", float("nan")), ("mean", float("-inf"))])
def test_rows_that_are_not_finite_are_refused_by_name(verb: str, value: float) -> None:
    for said in processes.run(3, _one_bad_row, verb, value):
        assert "node 1 (rank 1) holds NaN" in said


def _one_other_shape(cluster: Cluster, after: int) -> str:
    fabric, weights, a = (
        _fabric(cluster, 3),
        parse("complete", 3).weights(0),
        torch.ones(1, dtype=torch.float64),
    )
    try:
        link = fabric.start(torch.ones(1, 300 if cluster.rank == 2 and after == 0 else 200), common=True)
        for t in range(after + 1):
            row = torch.ones(1, 300 if cluster.rank == 2 and t == after else 200)
            fabric.push(Exchange(t, weights, ahead=weights), row, a, link)
            link = fabric.collect().link
    except dpps.errors.RunError as error:
        cluster.give_up(error)
        return str(error)
    return "accepted"


@pytest.mark.parametrize("after", [0, 2])
def test_rows_of_another_shape_are_refused_by_name(after: int) -> None:
    said = processes.run(3, _one_other_shape, after)
    assert all(re.search(r"rank 2 .*300 float32|rank 2 stopped", s) for s in said[:2]), said
    assert "200 float32" in said[2]


# The handshake


def _handshake(cluster: Cluster, facts: list[dict[str, object]], secrets: list[str]) -> tuple[str, str]:
    cluster.secret = secrets[cluster.rank].encode()
    try:
        cluster.join().meet(facts[cluster.rank])
    except dpps.errors.DppsError as error:
        cluster.give_up(error)
        return type(error).__name__, str(error)
    return "in", ""


OURS, THEIRS = "0123456789abcdef" * 4, "fedcba9876543210" * 4
GOOD = {"version": "1", "configuration": {"epochs": 2}, "model": "abc"}


@pytest.mark.parametrize(
    ("odd", "secret", "expected"),
    [
        ({**GOOD, "version": "2"}, OURS, "rank 2.* version: '2'.* '1'"),
        (
            {**GOOD, "configuration": {"epochs": 3}},
            OURS,
            "rank 2.* configuration: epochs is 3.* 2",
        ),
        ({**GOOD, "model": "abd"}, OURS, "rank 2.* model: 'abd'.* 'abc'"),
        (GOOD, "", "rank 2.* secret: 'not set'.* 'set'"),
        (GOOD, THEIRS, "rank 2.* $DPPS_SECRET "),
    ],
)
def test_strangers_are_named_on_both_sides(odd: dict[str, object], secret: str, expected: str) -> None:
    found = processes.run(3, _handshake, [GOOD, GOOD, odd], [OURS, OURS, secret])
    for kind, said in found:
        assert kind != "in"
        assert re.search(re.escape(expected).replace(r"\.\*", ".*"), said), found
        assert "\n" not in said


def test_the_secret_lets_everybody_in() -> None:
    assert processes.run(3, _handshake, [GOOD] * 3, [OURS] * 3) == [("in", "")] * 3


def test_nobody_comes_twice_and_who_is_missing_is_named() -> None:
    place = Rendezvous(0, 2, "127.0.0.1", processes.free_port())
    cluster = Cluster(place).join()
    cluster.join_timeout = 1.0
    with pytest.raises(dpps.errors.RunError, match=r"rank 1 .*1 s: .*--join-timeout"):
        cluster.meet(GOOD)
    with pytest.raises(dpps.errors.UsageError, match=r"rank 0 .*RANK"):
        cluster.meet(GOOD)


@processes.needs_proc
def test_the_meeting_point_listens_on_one_address_only() -> None:
    port = processes.free_port()
    cluster = Cluster(Rendezvous(0, 1, "127.0.0.1", port), timeout=60).join()
    cluster.meet(GOOD)
    tables = [
        path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()
    ]  # the latter needs IPv6
    sockets = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    listening = [words[1] for words in sockets if words[3] == "0A"]
    assert [a for a in listening if a.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


class Replaying:
    """A meeting point that answers with what it heard at an earlier start."""

    def __init__(self, store: object, heard: bytes) -> None:
        self._store, self._heard = store, heard

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        return self._heard if key == "hello/0" else self._store.get(key)


def test_a_meeting_point_cannot_bring_an_earlier_start_back() -> None:
    """Its random numbers would bring the keys of pair noise back, and the same noise under other messages."""
    first, second = (
        Cluster(Rendezvous(0, 1, "127.0.0.1", processes.free_port()), timeout=60).join() for _ in range(2)
    )
    first.meet(GOOD)
    second.store = Replaying(second.store, first.store.get("hello/0"))
    with pytest.raises(dpps.errors.PeerError, match="rank 0"):
        second.meet(GOOD)
    assert second.attempt != first.attempt


def test_a_meeting_point_that_is_not_there() -> None:
    with pytest.raises(dpps.errors.RunError, match=r"rank 0, .*127\.0\.0\.1:\d+, .*rank 1"):
        Cluster(Rendezvous(1, 2, "127.0.0.1", processes.free_port()), timeout=1.0).join()
    with pytest.raises(
        dpps.errors.UsageError, match=r"rank 0 .*192\.0\.2\.1:\d+ .*MASTER_ADDR .*MASTER_PORT"
    ):
        Cluster(Rendezvous(0, 2, "192.0.2.1", processes.free_port())).join()


def test_a_meeting_point_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(dpps.errors.UsageError, match=r"rank 0 .*nowhere:5 .*MASTER_ADDR"):
        Cluster(Rendezvous(0, 2, "nowhere", 5)).join()


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


@pytest.mark.parametrize("size", [3, 10])
def test_bits_of_one_process_when_the_clock_restarts(size: int) -> None:
    parts, alone = processes.run(size, _restarted), _with_restarts(Stacked(NODES))
    for t, expected in enumerate(alone):
        assert np.array_equal(np.concatenate([part[t] for part in parts]), expected), t
