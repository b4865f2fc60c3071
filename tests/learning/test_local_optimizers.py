"""Every node has an optimizer of its own, whose memory can be taken out and put back."""

from functools import partial

import pytest
import torch

from dpps.learning import LocalOptimizers

MAKES = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.1),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_steps_are_those_of_torch_for_every_row_by_itself(make) -> None:
    local, gradient = torch.randn(2, 3), torch.randn(2, 3)
    optimizers = LocalOptimizers(make, local)
    found = local.clone()
    for _ in range(3):
        found = optimizers.rows(found, gradient, slice(0, 2), away=())
    for k in range(2):
        parameter = torch.nn.Parameter(local[k].clone())
        own = make([parameter])
        for _ in range(3):
            parameter.grad = gradient[k].clone()
            own.step()
        torch.testing.assert_close(found[k], parameter.detach())


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_what_was_taken_out_is_put_back(make) -> None:
    local, gradient = torch.zeros(3), torch.tensor([1.0, -2.0, 0.5])
    optimizers = LocalOptimizers(make, local[None])
    optimizers.step(0, local, -3 * gradient)
    kept = optimizers.state()
    once = optimizers.step(0, local, gradient)
    again = optimizers.step(0, local, gradient)
    assert ((again - once).abs() > 0.01).all()  # the memory has moved on
    optimizers.load_state(kept)
    torch.testing.assert_close(optimizers.step(0, local, gradient), once)


def test_who_is_away_keeps_row_and_memory() -> None:
    local = torch.ones(2, 3)
    optimizers = LocalOptimizers(MAKES["momentum"], local)
    found = optimizers.rows(local, torch.ones(2, 3), slice(0, 2), away={1})
    assert torch.equal(found[1], local[1])
    assert not any(name.startswith("1.") for name in optimizers.state())
