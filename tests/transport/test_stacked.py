"""All rows in one process: a round is a product with the weights, or a mean of those present."""

import numpy as np
import torch

from dpps.topology import Exponential
from dpps.transport import Exchange, Stacked


def test_a_round_is_a_product_with_the_weights() -> None:
    fabric, weights = Stacked(4), Exponential(4).weights(1)
    s, a = torch.randn(4, 3, dtype=torch.float64), torch.arange(1.0, 5.0, dtype=torch.float64)
    fabric.push(Exchange(1, weights), s, a, {})
    arrived = fabric.collect()
    dense = torch.from_numpy(np.asarray(weights.dense()))
    torch.testing.assert_close(arrived.s, dense @ s)
    torch.testing.assert_close(arrived.a, dense @ a)
    assert arrived.took_part == {0, 1, 2, 3}


def test_without_weights_those_who_are_present_average_and_the_others_keep_their_row() -> None:
    fabric, present = Stacked(3), np.array([True, False, True])
    s, a = torch.tensor([[1.0], [5.0], [3.0]]), torch.ones(3, dtype=torch.float64)
    fabric.push(Exchange(0, None, present), s, a, {})
    arrived = fabric.collect()
    assert arrived.s.flatten().tolist() == [2.0, 5.0, 2.0]
    assert arrived.took_part == {0, 2}
    assert fabric.max(torch.tensor([1.0, 4.0, 2.0])) == 4.0
