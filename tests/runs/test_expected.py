"""What accuracy `dpps plan` expects: from measurements, and only of runs like those that were measured."""

import json
from itertools import pairwise

import pytest

from dpps.cli import main
from dpps.runs import TrainConfig, curves
from dpps.runs.expected import expected

RECIPE = {"data": "mnist", "features": "scattering", "model": "linear", "shared": "all"}


def test_every_curve_rises_and_every_point_lies_in_its_range():
    assert len(curves()) >= 2
    for points in curves().values():
        assert all(
            below.epsilon < above.epsilon and below.mean < above.mean for below, above in pairwise(points)
        )
        assert all(p.lowest <= p.mean <= p.highest for p in points)
        assert all(len(p.commit) == 7 and p.seeds >= 1 for p in points)


def test_at_a_measured_epsilon_it_is_what_was_measured_and_between_two_it_lies_between():
    one, two, three = (expected(TrainConfig(**RECIPE), e) for e in (1.0, 2.0, 3.0))
    assert (two.low, two.high) == (one.low, three.high)
    assert one.high < three.low
    assert "commit" in one.why


def test_beyond_what_was_measured_only_one_side_is_known():
    assert expected(TrainConfig(**RECIPE), 0.01).low == 0
    assert expected(TrainConfig(**RECIPE), 1000.0).high == 100


@pytest.mark.parametrize(
    "other",
    [
        {"nodes": 7},
        {"clip": 1.0},
        {"model": "mlp"},
        {"split": "label:2"},
        {"trust": "pairs"},
        {"unit": "contribution"},
    ],
)
def test_other_runs_were_not_measured(other):
    assert expected(TrainConfig(**{**RECIPE, **other}), 1.0) is None


def test_plan_tells_it(capsys):
    options = [f"--{name}={value}" for name, value in RECIPE.items()]
    assert main(["plan", *options, "--noise-multiplier", "5.3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 90 < found["expected_accuracy"]["low"] < found["expected_accuracy"]["high"] <= 100
    assert found["signal_to_noise_of_run"] == pytest.approx(
        found["signal_to_noise_averaged"] * found["rounds"] ** 0.5
    )
