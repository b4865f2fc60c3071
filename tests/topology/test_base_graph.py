"""The Base-(k+1) graph: the exact average in few rounds, for any number of nodes."""

import math

import numpy as np
import pytest

from dpps.topology import (
    Base,
)
from tests.support.topology import assert_sound, product


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_base_reaches_the_exact_average_for_any_number_of_nodes(k: int) -> None:
    for nodes in range(max(2, k + 1), 41):
        topology = Base(nodes, k)
        for t in range(topology.period):
            weights = topology.weights(t)
            assert_sound(weights)
            assert weights.out_degree.max() <= k
        np.testing.assert_allclose(product(topology, topology.period), 1 / nodes, atol=1e-14)
        # the length its authors prove: 2 log_{k+1}(N) + 2
        assert topology.period <= 2 * math.log(nodes, k + 1) + 2


def test_base_needs_one_round_per_side_of_a_grid() -> None:
    assert [Base(8, 1).period, Base(9, 2).period, Base(12, 3).period, Base(36, 5).period] == [3, 2, 2, 2]
    assert Base(7, 6).period == 1


def test_base_takes_the_shorter_of_its_two_constructions() -> None:
    # 24 = 8 x 3: 3 rounds for the groups of three, 3 across; by its binary digits it would be 9
    assert Base(24, 1).period == 6
    # 22 = 2 x 11, but its digits in base 5, 42, are quicker: 4 rounds, not 5
    assert Base(22, 4).period == 4
