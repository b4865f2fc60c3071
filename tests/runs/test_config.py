"""The defaults of the command line and those of the library agree."""

import dataclasses

import pytest
from torch import nn

import dpps
from dpps.learning import as_unit
from dpps.runs import Options, Run


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({"unit": "contribution", "epsilon": 8.0}, dpps.Contribution(epsilon=8)),
        (
            {"unit": "contribution", "epsilon": 8.0, "mechanism": "gaussian"},
            dpps.Contribution(epsilon=8, mechanism="gaussian"),
        ),
        ({"unit": "record", "epsilon": 8.0}, dpps.Record(epsilon=8)),
        ({"unit": "record", "noise_multiplier": 1.0}, dpps.Record(noise_multiplier=1)),
        ({"unit": "node-swap"}, dpps.NodeSwap()),
        ({"unit": "node-swap", "epsilon": 8.0}, dpps.NodeSwap(epsilon=8)),
        ({"unit": "node-swap", "budget": 2.0}, dpps.NodeSwap(budget=2)),
        ({"unit": "record"}, as_unit("record")),
        ({"unit": "contribution"}, as_unit("contribution")),
        ({"unit": "node-swap"}, as_unit("node-swap")),
    ],
)
def test_units(options, unit):
    told = Options(**options).resolve().privacy()
    names = [f.name for f in dataclasses.fields(unit) if f.name not in ("sensitivity", "trust")]
    assert [getattr(told, name) for name in names] == [getattr(unit, name) for name in names]
    for name in ("sensitivity", "trust"):
        assert repr(getattr(told, name, None)) == repr(getattr(unit, name, None))


@pytest.mark.parametrize("unit", ["contribution", "node-swap", "none"])
def test_algorithms_and_runs(unit):
    """The learning rates of the unit record are the exception: there the command line takes 1, for clipped gradients."""
    told = Options(unit=unit).resolve()
    library = {f.name: f.default for f in dataclasses.fields(dpps.PartPSP)}
    # without them the algorithm chooses, and its plan says what
    open_ = (
        "lr_shared",
        "lr_local",
        "batch_size",
    )
    rates = told.rates()
    assert {n: v for n, v in rates.items() if n not in open_} == {
        n: library[n] for n in rates if n not in open_
    }
    model = nn.Linear(2, 2)
    plans = [dpps.PartPSP(model, "all", **given).plan([1000] * 3, 2) for given in (rates, {})]
    assert plans[0] == plans[1]
    options = Run.__init__.__kwdefaults__
    for name in (
        "sync_every",
        "mixes",
        "secure_noise",
        "spare_rounds",
        "checkpoint_every",
        "track_real",
        "overwrite",
    ):
        assert getattr(told, name) == options[name]
