"""Where gradients are taken: in the unit record both at l(t), otherwise the shared one at l(t+1), as the paper has it."""

import pytest
import torch

import dpps
from dpps.privacy import Unit


def shared_after_one_round(unit: Unit, lr_local: float) -> torch.Tensor:
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(2)]
    model = dpps.models.MLP((4, 5, 3))
    algorithm = dpps.PartPSP(model, ["layer1"], batch_size=8, lr_shared=0.1, lr_local=lr_local)
    run = dpps.Run(algorithm, data, topology=dpps.Ring(2), privacy=unit, seed=3)
    run.start(epochs=1)
    run.step()
    return run.state.shared.s.clone()


@pytest.mark.parametrize(
    ("unit", "before_the_local_step"),
    [
        (dpps.Record(noise_multiplier=1e-6), True),
        (dpps.Contribution(clip=100.0, mechanism="gaussian", noise_multiplier=1e-6), False),
    ],
)
def test_the_shared_gradient_is_taken_before_or_after_the_local_step(
    unit: Unit, before_the_local_step: bool
) -> None:
    near, far = (shared_after_one_round(unit, lr_local) for lr_local in (1e-3, 3.0))
    assert torch.equal(near, far) == before_the_local_step
