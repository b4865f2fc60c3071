"""torch's losses may be given as functions or as modules: `nn.CrossEntropyLoss()` is `F.cross_entropy`, everywhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.errors import UsageError
from tests.support.learning import toy_data

UNITS = {
    "none": None,
    "record": dpps.Record(epsilon=3, delta=1e-3),
    "contribution": dpps.Contribution(clip=1.0, round_epsilon=1.0),
}


def _started(loss: Any, unit: str = "record", data: Any = None) -> dpps.Run:
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(nn.Linear(6, 3), loss=loss, **({} if unit == "record" else {"batch_size": 10}))
    options = {"topology": dpps.Ring(3), "privacy": UNITS[unit], "seed": 0}
    return dpps.Run(algorithm, toy_data(3) if data is None else data, **options).start(2)


@pytest.mark.parametrize("unit", UNITS)
def test_the_module_trains_as_the_function_does(unit):
    """The same rate, batch and, bit for bit, the same parameters."""
    runs = [_started(loss, unit) for loss in (F.cross_entropy, nn.CrossEntropyLoss())]
    assert runs[0].plan == runs[1].plan
    first, second = (run.fit(2).shared for run in runs)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (nn.CrossEntropyLoss(), F.cross_entropy),
        (nn.MSELoss(), F.mse_loss),
        (nn.L1Loss(), F.l1_loss),
        (nn.SmoothL1Loss(), F.smooth_l1_loss),
        (nn.HuberLoss(), F.huber_loss),
        (nn.BCEWithLogitsLoss(), F.binary_cross_entropy_with_logits),
        (nn.BCELoss(), F.binary_cross_entropy),
    ],
)
def test_a_loss_module_with_default_settings_is_its_function(module, function):
    assert dpps.PartPSP(nn.Linear(2, 2), loss=module).loss is function


class Doubled(nn.CrossEntropyLoss):
    """Somebody's own."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(outputs, targets)


def _hooked() -> nn.Module:
    module = nn.CrossEntropyLoss()
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0])),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.SmoothL1Loss(beta=0.5),
        nn.HuberLoss(delta=2.0),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])),
        Doubled(),
        _hooked(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_one_with_settings_of_its_own_stays_itself(module):
    assert dpps.PartPSP(nn.Linear(2, 2), loss=module).loss is module


LABELLED: list[Callable[[], nn.Module]] = [
    nn.CrossEntropyLoss,
    lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]), reduction="none"),
    lambda: nn.CrossEntropyLoss(ignore_index=0, reduction="none"),
]


@pytest.mark.parametrize("loss", LABELLED)
def test_labels_are_checked_and_converted_for_every_spelling(loss):
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(20) % 3
    with pytest.raises(UsageError, match="1 to 3"):
        _started(loss(), "none", [(x, labels + 1)] * 3)
    with pytest.raises(UsageError, match=r"0\.5"):
        _started(loss(), "none", [(x, labels + 0.5)] * 3)
    run = _started(loss(), "none", [(x, labels.double())] * 3)
    assert run.nodes.data.datasets[0].tensors[1].dtype == torch.int64


def test_labels_that_a_loss_ignores_are_no_mistake():
    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(20) % 3
    labels[3] = 255
    _started(nn.CrossEntropyLoss(ignore_index=255), "none", [(x, labels)] * 3).fit(2)
    with pytest.raises(UsageError, match="255"):
        _started(nn.CrossEntropyLoss(), "none", [(x, labels)] * 3)


def test_smoothed_labels_have_the_rule_of_the_unit_record_too():
    """What is special about a softmax regression is not the smoothing."""
    plain, smooth = (
        _started(loss).plan for loss in (F.cross_entropy, nn.CrossEntropyLoss(label_smoothing=0.1))
    )
    assert (plain.lr_shared, plain.batch_size) == (smooth.lr_shared, smooth.batch_size)


def test_a_mean_over_examples_that_are_not_ignored_is_refused_in_the_unit_record():
    with pytest.raises(UsageError, match="reduction"):
        _started(nn.CrossEntropyLoss(ignore_index=0))
