"""Cells: one setting of an experiment is the run that `dpps train` would do."""

import dataclasses

import pytest

from dpps.errors import RunError
from dpps.paper import mean_real, rounds_above, run
from dpps.runs import Run
from tests.support.paper import TINY


def test_a_cell_is_the_run_dpps_train_would_do(tmp_path):
    cell = dataclasses.replace(TINY, examples=None, batch_size=200, tests=None, sensitivity="paper")
    result = run(cell)
    config = dataclasses.replace(cell.config(), out=tmp_path / "run")
    summary = Run.from_options(config).fit().summary
    assert result["accuracy"] == summary.test_accuracy
    assert mean_real(result) == pytest.approx(summary.real_sensitivity_mean, rel=1e-5)
    assert result["epsilon_sum"] == summary.privacy.epsilon_sum


def test_keys_tell_settings_apart_and_only_them():
    assert TINY.key == dataclasses.replace(TINY).key
    others = [
        dataclasses.replace(TINY, **change) for change in ({"seed": 8}, {"clip": 1.0}, {"certified": True})
    ]
    assert len({c.key for c in [TINY, *others]}) == 4


def test_with_real_noise_the_estimate_is_the_real_sensitivity():
    result = run(TINY)
    assert result["real"] == result["estimated"]
    assert rounds_above(result) == []


def test_a_run_that_grows_beyond_all_numbers_is_a_result(monkeypatch):
    monkeypatch.setattr(
        "dpps.paper.cells._train", lambda *_: (_ for _ in ()).throw(RunError("inf in round 9"))
    )
    assert run(TINY)["broke_off"] == "inf in round 9"


def test_rounds_above_ignores_rounding_and_finds_the_rest():
    result = {"real": [1.0, 2.0, 3.0], "estimated": [1.0, 2.0 * (1 - 1e-9), 2.9]}
    assert rounds_above(result) == [2]
