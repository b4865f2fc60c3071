"""Pairs that do not hear each other are named before anything private moves; what a stranger answers on a connection is refused."""

import time

import pytest
import torch

import dpps
from dpps.transport import Cluster, Distributed, Identity, Message, Rendezvous, Report
from tests.support import processes

SECRET = b"0123456789abcdef" * 4


def _met(cluster: Cluster) -> str:
    try:
        cluster.join().meet({"version": "test"})
    except dpps.errors.DppsError as error:
        cluster.give_up(error)
        return str(error)
    return "met"


def _blocked(cluster: Cluster) -> str:
    """Rank 1 gets no answer from rank 2, as a firewall between the two would have it."""
    reach = cluster._unreachable_of

    def without_two(ranks: list[int], seconds: float) -> dict[int, str]:
        found = reach(ranks, seconds)
        return found | {2: "no answer for 5 s"} if cluster.rank == 1 else found

    cluster._unreachable_of = without_two  # type: ignore[assignment, method-assign]
    return _met(cluster)


def test_a_blocked_pair_is_named_by_everybody_and_nobody_is_accused() -> None:
    for said in processes.run(3, _blocked):
        assert said.startswith("rank 1 "), said
        assert "rank 2 (127.0.0.1) (no answer for 5 s);" in said
        assert "failed" not in said
        assert "rank 0" not in said


@pytest.mark.parametrize("garbage", ["no JSON", '{"7": "x"}'])
def test_garbage_about_who_is_reached_is_refused_by_name(garbage: str) -> None:
    for said in processes.run(2, _garbled, garbage):
        assert "rank 1 says" in said


def _garbled(cluster: Cluster, garbage: str) -> str:
    cluster.join()
    put = cluster.store.set

    class Store:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            put(key, garbage if key == "reach/1" else value)

    store, cluster.store = cluster.store, Store()
    cluster.join = lambda: cluster  # type: ignore[method-assign]
    return _met(cluster)


def _blocked_later(cluster: Cluster) -> str:
    """From round 2 on nothing that rank 1 sends to rank 2 arrives, and neither can connect to the other."""
    fabric = Distributed(4, cluster.join().meet({"version": "test"}))
    protocol = dpps.DPPS(dpps.Exponential(4), dpps.NoNoise(), fabric=fabric)
    state = protocol.start(torch.zeros(1, 5), common_start=True)
    reach, post, other = cluster._unreachable_of, fabric.wire.post, {1: 2, 2: 1}.get(cluster.rank)

    def blocked(ranks: list[int], seconds: float) -> dict[int, str]:
        if other in ranks:
            time.sleep(0.5)  # an attempt to connect takes a while, and the others have long noticed
        return reach([r for r in ranks if r != other], seconds) | {
            r: "no answer" for r in ranks if r == other
        }

    def dropping(outgoing: list[Message], incoming: list[Message]) -> object:
        lost = cluster.rank == 1 and state.round >= 2
        return post([m for m in outgoing if not (lost and m.peer == 2)], incoming)

    cluster._unreachable_of = blocked  # type: ignore[assignment, method-assign]
    fabric.wire.post = dropping  # type: ignore[assignment, method-assign]
    try:
        for _ in range(20):
            protocol.step(state)
    except dpps.errors.RunError as error:
        return str(error)
    return "went on"


def test_a_pair_that_is_blocked_during_the_run_is_named_by_everybody() -> None:
    """Who runs out of time closes all its connections at once; it is not accused for that."""
    for said in processes.run(4, _blocked_later, timeout=20):
        assert said.startswith("rank 2 "), said
        assert "rank 1 (127.0.0.1) (no answer for 11 s)" in said
        assert "failed" not in said


class Slow:
    """A meeting point whose last guest comes, and whose first one reads all and gives up, while this process looks twice."""

    def __init__(self) -> None:
        self.looked = 0

    def check(self, keys: list[str]) -> bool:
        self.looked += 1
        return self.looked > 1 and "report/1" not in keys

    def get(self, key: str) -> bytes:
        return Report("its request is wrong").encoded().encode() if key.startswith("report") else b"here"


def test_who_is_slow_reads_for_itself_what_the_others_have_read() -> None:
    """Otherwise it would say no more than that another process has stopped."""
    cluster = Cluster(Rendezvous(1, 2, "127.0.0.1", 5), store=Slow())
    assert cluster._collect("hello", 60.0, "hurry") == ["here", "here"]


def _impostor(cluster: Cluster) -> str:
    """Rank 1 has come through the meeting point, and then somebody without the secret answers on its connections."""
    cluster.secret = SECRET
    connect = cluster._prove_connections

    def stranger(wire: object, identity: Identity, addresses: str) -> None:
        connect(wire, Identity(b"another", []) if cluster.rank == 1 else identity, addresses)  # type: ignore[arg-type]

    cluster._prove_connections = stranger  # type: ignore[assignment, method-assign]
    return _met(cluster)


def test_somebody_else_on_a_connection_is_refused() -> None:
    found = processes.run(3, _impostor)
    for said in (found[0], found[2]):
        assert "rank 1 was refused" in said
