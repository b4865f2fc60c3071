"""A request to stop travels on the rows, and everybody stops after the same round."""

from itertools import count, islice

import pytest
import torch

import dpps
from dpps.topology import parse
from dpps.transport import Alone, Cluster, Distributed, blocks, rounds_until_heard
from tests.support import processes


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
    control = Alone()
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
    control = fabric.control
    for round_ in range(40):
        protocol.step(state)
        if asked.get(cluster.rank) == round_:
            coming = (protocol.weights(clock) for clock in count(state.clock))
            rounds = control.rounds_until_heard(coming)
            assert rounds is not None
            control.ask_to_stop(round_ + rounds)
        if control.stop_after is not None and round_ >= control.stop_after:
            break
    return control.stop_after, state.round


@pytest.mark.parametrize(("sync_every", "stop"), [(0, 7), (1, 5), (3, 5)])
def test_all_processes_stop_after_the_same_round(sync_every: int, stop: int) -> None:
    """Five of them, and two ask at different times. The exponential graph takes 3 rounds to reach 5 nodes."""
    found = processes.run(5, _ask_in_rounds, {3: 4, 1: 5}, sync_every)
    assert found == [(stop, stop + 1)] * 5


def _numbers(cluster: Cluster) -> list[float]:
    control = Distributed(6, cluster.join().meet({"version": "test"})).control
    return control.everybody(10.0 + cluster.rank)


def _no_number(cluster: Cluster) -> str:
    control = Distributed(6, cluster.join().meet({"version": "test"})).control
    try:
        control.everybody(float("nan") if cluster.rank == 1 else 5.0)
    except dpps.errors.PeerError as error:
        return str(error)
    return "believed"


def test_what_is_no_number_is_refused_by_name() -> None:
    for said in processes.run(2, _no_number):
        assert "rank 1 says nan " in said


def test_numbers_of_all_processes() -> None:
    assert processes.run(3, _numbers) == [[10.0, 11.0, 12.0]] * 3
