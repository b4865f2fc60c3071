"""What every algorithm refuses, and the plan it makes of sizes and epochs."""

import pytest
import torch
from torch import nn

import dpps
from dpps.errors import UsageError
from dpps.privacy import Pairs


def _algorithm(**options) -> dpps.PartPSP:
    return dpps.PartPSP(nn.Linear(4, 2), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr_shared": -1.0}, r"lr_shared.*-1\.0"),
        ({"lr_local": float("nan")}, "lr_local.*nan"),
        ({"lr_shared": "0.1"}, r"lr_shared.*'0\.1'"),
        ({"loss": "mse"}, r"loss.*'mse'.*\(outputs, targets\)"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"lr_step": -1}, "lr_step is -1"),
        ({"lr_step": 1.5}, "lr_step is 1.5"),
        ({"local_steps": 1.5}, "local_steps is 1.5"),
        ({"schedule": "cosine"}, r"schedule.*'cosine'.*dpps\.schedules\.Cosine"),
        ({"optimizer": "adam"}, r"optimizer.*'adam'.*dpps\.Momentum"),
        ({"optimizer": torch.optim.Adam}, "local_optimizer="),
        ({"lr_step": 2, "schedule": dpps.schedules.Cosine()}, "lr_step.*schedule cosine"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _algorithm(**options)


@pytest.mark.parametrize("model", ["mlp", nn.Linear])
def test_a_model_is_a_module(model) -> None:
    with pytest.raises(UsageError, match=r"model.*nn\.Module"):
        dpps.PartPSP(model)


def test_rounds_and_sampling_rates_follow_from_the_declared_sizes() -> None:
    plan = _algorithm(batch_size=10, lr_step=2).plan([100, 50], epochs=4, spare_rounds=3)
    assert dict(plan.rounds) == {1.0: 7, 0.1: 14, 0.01: 7}
    assert plan.sampling == (0.1, 0.2)
    assert (plan.count, plan.paid, plan.coordinates) == (28, 31, 10)
    with pytest.raises(UsageError, match=r"epochs.*0"):
        _algorithm().plan([100], epochs=0)


def test_noise_that_cancels_needs_an_optimizer_that_is_linear() -> None:
    unit = dpps.Record(epsilon=3, trust=Pairs(1))
    assert _algorithm(optimizer=dpps.Momentum(0.9)).unit(unit) is unit
    with pytest.raises(UsageError, match=r"Adam.*Momentum.*trust=Pairs"):
        _algorithm(optimizer=dpps.Adam()).unit(unit)
