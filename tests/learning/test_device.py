"""A run on another device computes there, and its test sets are there as well."""

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import dpps
from dpps.errors import UsageError
from dpps.runs.run import as_device
from tests.support.elsewhere import NAME, Elsewhere
from tests.support.learning import toy_data

MODELS = {
    "normalised": lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    ),
}
UNITS = {
    "none": None,
    "contribution": dpps.Contribution(clip=1.0, round_epsilon=1.0),
    "record": dpps.Record(noise_multiplier=1.0),
    "partners": dpps.Record(noise_multiplier=1.0, trust=dpps.Pairs(colluders=0)),
    "node-swap": dpps.NodeSwap(budget=5.0, sensitivity=dpps.Paper(0.78, 0.55)),
}


def _fit(device: str, model: str, unit: str) -> dpps.Run:
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(MODELS[model](), lambda name: name[0] in "01", batch_size=10)
    options: dict[str, Any] = {"topology": "ring", "privacy": UNITS[unit], "metrics": ["f1"], "seed": 0}
    sets = {"test": toy_data(1, seed=9)[0], "held_out": toy_data(3, seed=8)}
    return dpps.Run(algorithm, toy_data(3), device=device, **sets, **options).fit(epochs=2)


def test_the_device_of_these_tests_keeps_what_is_here_apart_from_what_is_there():
    with Elsewhere():
        there = torch.ones(3).to(NAME)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        assert (there + torch.tensor([1, 2, 3], device=NAME)).tolist() == [2, 3, 4]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("model", MODELS)
def test_training_and_evaluation_give_the_same_there(model, unit, monkeypatch):
    here = _fit("cpu", model, unit)
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which knows no such device
    with Elsewhere():
        there = _fit(NAME, model, unit)
        assert there.shared.device.type == there.local.device.type == NAME
        assert torch.allclose(there.shared.cpu(), here.shared)
        assert there.accuracy_by_epoch == here.accuracy_by_epoch
        assert there.own_accuracy_by_node == here.own_accuracy_by_node
        assert there.metrics_by_node == here.metrics_by_node
        other = toy_data(1, seed=3)[0]
        assert there.evaluate(other) == here.evaluate(other)
        assert next(there.models()[0].parameters()).device.type == NAME


def test_the_options_of_a_run_choose_its_device():
    options = dpps.runs.Options(nodes=3, epochs=1, batch_size=1000, unit="none", shared="all", device=NAME)
    with Elsewhere():
        there = dpps.Run.from_options(options).fit()
        assert there.shared.device.type == NAME
    here = dpps.Run.from_options(dataclasses.replace(options, device="cpu")).fit()
    assert there.accuracy == here.accuracy


@pytest.mark.parametrize(
    ("cards", "rank", "chosen"), [(0, "0", "cpu"), (1, "0", "cuda:0"), (2, "1", "cuda:1"), (2, "2", "cuda:0")]
)
def test_auto_is_a_card_of_its_own_for_every_process_or_the_processor(cards, rank, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert as_device("auto") == chosen


def test_a_card_that_is_not_there_is_refused_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert as_device("cuda") == "cuda"
    with pytest.raises(UsageError, match="'cuda:1'"):
        as_device("cuda:1")
