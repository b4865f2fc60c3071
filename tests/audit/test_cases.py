"""The claims under test: leaks are found by who looks for them, and a quick case sees what a slow one would."""

import numpy as np
import pytest
import torch
from torch import nn

from dpps.audit import Case, LocalRecordCase, NoiseNormCase, attack
from dpps.audit.cases import cases
from dpps.noise import SecureNoise, Seeded
from dpps.privacy import NodeSwap
from dpps.sensitivity import Paper, WorstCase

LEAKS = [c for c in cases() if isinstance(c, NoiseNormCase)]
LOCAL_RECORD = next(c for c in cases() if isinstance(c, LocalRecordCase))


@pytest.mark.parametrize("case", LEAKS, ids=lambda case: case.kind)
def test_noise_norms_in_the_scalar_give_the_sender_away(case: Case) -> None:
    bound = attack(case, Seeded, 500, seed=1)
    assert (bound.hits, bound.false) == (500, 0)
    assert bound.epsilon > 4


@pytest.mark.parametrize("sensitivity", [Paper(0.78, 0.55), WorstCase()])
@pytest.mark.parametrize("noise", [Seeded, lambda _: SecureNoise()], ids=["seeded", "secure"])
def test_every_pick_is_right_at_a_nominal_epsilon_of_a_twentieth(sensitivity, noise) -> None:
    case = NoiseNormCase(NodeSwap(epsilon=0.05, sensitivity=sensitivity), "node-swap", "leak", claim=0.05)
    zero, one = case.scores(200, noise, 5)
    assert (zero > 0).all()
    assert (one < 0).all()


def test_models_that_are_no_chain_of_layers_give_the_observer_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The local part is audited in a chain, whose gradients are computed for all networks at once."""

    class WeightAndBias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight, self.bias)

    chain = LOCAL_RECORD.scores(20, Seeded, 3)
    monkeypatch.setattr(type(LOCAL_RECORD), "_model", lambda _: (WeightAndBias(), ["weight"]))
    other = LOCAL_RECORD.scores(20, Seeded, 3)
    np.testing.assert_allclose(chain, other, atol=1e-5)
