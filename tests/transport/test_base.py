"""Fabrics: sums of rows whose bits depend on their own entries only, and rows of honest nodes within what the contract makes possible."""

import torch

from dpps.transport import average, combine, synchronised


def test_a_combined_row_does_not_depend_on_the_others() -> None:
    table, values = torch.randn(6, 50), torch.rand(5)
    indices, offsets = torch.tensor([0, 3, 5, 1, 2]), torch.tensor([0, 3, 5])
    both = combine(table, indices, offsets, values)
    alone = combine(table, indices[3:], torch.tensor([0, 2]), values[3:])
    assert torch.equal(both[1], alone[0])
    expected = (values[:3, None].double() * table[[0, 3, 5]].double()).sum(0)
    torch.testing.assert_close(both[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_half_precision_is_added_up_in_float32() -> None:
    table = torch.full((3000, 1), 1.0, dtype=torch.float16)
    total = combine(table, torch.arange(3000), torch.tensor([0, 3000]), torch.ones(3000))
    assert float(total) == 3000.0  # in float16 itself the sum stops at 2048


def test_a_mean_of_some_rows_and_who_gets_it() -> None:
    x = torch.tensor([[1.0], [9.0], [3.0]], dtype=torch.float64)
    mean = average(x, torch.tensor([0, 2]))
    assert mean.tolist() == [2.0]
    here = torch.tensor([True, False, True])
    s, a = synchronised(x, torch.tensor([1.0, 0.5, 1.0]), mean, torch.tensor([1.0]), here)
    assert s.flatten().tolist() == [2.0, 9.0, 2.0]
    assert a.tolist() == [1.0, 0.5, 1.0]
