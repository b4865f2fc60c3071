"""Which rows are charged at which rate, and what a round sends."""

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.protocol import bytes_of_round, rows_by_rate


def test_rows_of_one_rate_are_charged_together() -> None:
    assert rows_by_rate(0.5, range(3)) == [(0.5, "all")]
    assert rows_by_rate([0.5, 0.5], range(2)) == [(0.5, "all")]
    assert rows_by_rate([0.1, 0.2, 0.1], [4, 5, 6]) == [(0.1, (4, 6)), (0.2, (5,))]
    with pytest.raises(UsageError, match=r"2 sampling rates .*3 rows"):
        rows_by_rate([0.1, 0.2], range(3))


def test_private_start_values_are_charged_in_full_whoever_is_drawn() -> None:
    bound = dpps.Bounded(distance=1.0, clip=0.5, start_distance=1.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Gaussian(1.0), bound, sampling=0.01)
    state = protocol.start(torch.rand(3, 2) / 3, common_start=False)
    for _ in range(2):
        protocol.step(state)
    assert [charge.event.sampling for _, charge in protocol.ledger.history] == [1.0, 0.01]


def test_a_round_sends_a_row_to_every_peer_and_a_scalar_to_all_in_node_swap() -> None:
    row = 5 * 4 + 8
    plain = dpps.DPPS(dpps.DOut(6, 3))
    assert bytes_of_round(plain, plain.start(torch.zeros(6, 5))) == 2 * row
    more = dpps.DPPS(dpps.DOut(6, 3), mixes=3)
    assert bytes_of_round(more, more.start(torch.zeros(6, 5))) == 6 * row
    swap = dpps.DPPS(dpps.DOut(6, 3), dpps.Laplace(1.0), dpps.Certified(), sync_every=1)
    assert bytes_of_round(swap, swap.start(torch.zeros(6, 5))) == 2 * 5 * row // 6 + 8 * 5
