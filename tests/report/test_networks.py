"""The drawing of a network shows the topology's links."""

import dataclasses

import numpy as np

import dpps
from dpps.report import ALL_EDGES, SHOWN_EDGES, Network, RunRecord, network
from dpps.report.networks import networks


def shown(record: RunRecord, topology: dpps.Topology) -> Network:
    return network(dataclasses.replace(record, topology=topology))


def test_network_is_the_topologys(records: dict[str, RunRecord]) -> None:
    topology = dpps.Exponential(10)
    drawn = shown(records["record"], topology)
    assert len(drawn.phases) == topology.period
    for t, phase in enumerate(drawn.phases):
        dense = topology.weights(t).dense()
        np.fill_diagonal(dense, 0)
        rebuilt = np.zeros_like(dense)
        for edge in phase.edges:
            rebuilt[edge.receiver, edge.sender] = edge.weight
        np.testing.assert_array_equal(rebuilt, dense)
    assert drawn.phases[0].spelled.startswith("0 → 1; 1 → 2")


def test_network_of_many_nodes_is_thinned_and_says_so(records: dict[str, RunRecord]) -> None:
    drawn = shown(records["record"], dpps.Complete(300))
    assert 0 < len(drawn.phases[0].edges) <= SHOWN_EDGES
    assert "links" in drawn.note


def test_phases_are_left_out_before_the_page_gets_too_large(records: dict[str, RunRecord]) -> None:
    drawn = shown(records["record"], dpps.Exponential(1024))
    assert 0 < sum(len(phase.edges) for phase in drawn.phases) <= ALL_EDGES
    assert f"{len(drawn.phases)} of 10 phases" in drawn.note


def test_absent_nodes_are_marked(records: dict[str, RunRecord]) -> None:
    record = records["none"]
    drawn = network(record)
    for t, phase in enumerate(drawn.phases):
        present = record.topology.present(t)
        assert phase.away == ([] if present is None else [k for k in range(5) if not present[k]])
    assert any(phase.away for phase in drawn.phases)
    assert "12 rounds" in drawn.note


def test_runs_with_the_same_network_share_a_drawing(records: dict[str, RunRecord]) -> None:
    drawn = networks([*records.values()])
    assert [each.name for each in drawn] == ["record, node-swap", "none"]
    assert drawn[0].note.startswith("node-swap: ")
    assert " 3 rounds " in drawn[0].note
