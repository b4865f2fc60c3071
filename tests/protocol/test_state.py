"""The state of a protocol: y is s over a."""

import pytest
import torch

import dpps
from tests.support.protocol import column_stochastic


def test_y_is_s_itself_where_a_is_one_and_the_quotient_otherwise() -> None:
    state = dpps.DPPS(dpps.Ring(3)).start(torch.randn(3, 2))
    assert state.y is state.s
    state.a[:] = torch.tensor([0.5, 1.0, 2.0])
    torch.testing.assert_close(state.y, state.s / torch.tensor([[0.5], [1.0], [2.0]]))


def test_the_sum_of_a_stays_the_number_of_nodes_when_only_columns_sum_to_one() -> None:
    protocol = dpps.DPPS(column_stochastic(4))
    state = protocol.start(torch.arange(4.0)[:, None])
    for _ in range(60):
        protocol.step(state)
    assert float(state.a.sum()) == pytest.approx(4, rel=1e-12)
    torch.testing.assert_close(state.y, torch.full((4, 1), 1.5), atol=1e-4, rtol=0)
