"""Epsilon by round."""

from itertools import pairwise

import numpy as np
import pytest
from torch import nn

import dpps
from dpps.privacy import Charge, total
from dpps.report import RunRecord, by_round, read_run
from tests.support.learning import toy_data


def spent(record: RunRecord) -> list[tuple[int, float]]:
    return by_round(record.unit, record.charges, record.privacy.epsilon)


def test_epsilon_by_round_adds_up_in_node_swap(records: dict[str, RunRecord]) -> None:
    record = records["node-swap"]
    sums = np.cumsum([log.epsilon for log in record.rounds])
    np.testing.assert_allclose([epsilon for _, epsilon in spent(record)], sums, rtol=1e-12)
    assert spent(record)[-1][1] == record.privacy.epsilon


def test_epsilon_by_round_is_the_accountants_in_the_unit_record(
    records: dict[str, RunRecord],
) -> None:
    record = records["record"]
    found = spent(record)
    at, epsilon = found[len(found) // 2]
    log = record.rounds[0]
    assert log.used is not None
    sampling = record.charges[0][1].event.sampling
    kind = Charge.gaussian(log.scale / log.used, sampling, at + 1)
    assert epsilon == pytest.approx(total([kind], 1e-5).epsilon, rel=1e-9)
    assert all(a[1] < b[1] for a, b in pairwise(found))
    assert found[-1] == (len(record.rounds) - 1, record.privacy.epsilon)


def test_the_node_that_paid_most_is_followed_where_nodes_draw_at_rates_of_their_own() -> None:
    """Three nodes, three lines a round: what the others paid is not added to what one has spent."""
    algorithm = dpps.PartPSP(nn.Linear(6, 3), batch_size=[20, 10, 4], lr_shared=0.1)
    unit = dpps.Record(noise_multiplier=1.0)
    run = dpps.Run(algorithm, toy_data(3), topology="ring", privacy=unit, seed=0).fit(epochs=2)
    record = read_run(run, "own rates")
    assert len(record.charges) == len(run.log)
    found = spent(record)
    at, epsilon = found[len(found) // 2]
    dearest = Charge.gaussian(1.0, 0.5, at + 1)
    assert epsilon == pytest.approx(total([dearest], 1e-5).epsilon, rel=1e-6)
    assert all(a[1] < b[1] for a, b in pairwise(found))


def test_nothing_is_spent_without_a_unit(records: dict[str, RunRecord]) -> None:
    assert spent(records["none"]) == []
