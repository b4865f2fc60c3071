"""The runner: a cell is the run that `dpps train` would do; the pool keeps what worked, and a dead worker costs its cell only."""

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from dpps import data
from dpps.errors import RunError
from dpps.paper import Cell, Pool, Store, mean_real, rounds_above, run, runner
from dpps.runs import Run
from tests.support.paper import TINY


def test_a_cell_is_the_run_dpps_train_would_do(tmp_path):
    cell = TINY.but(examples=None, batch_size=200, tests=None, sensitivity="paper", track_real=True)
    result = run(cell)
    config = dataclasses.replace(cell.config(), out=tmp_path / "run")
    summary = Run.from_options(config).fit().summary
    assert result["accuracy"] == summary.test_accuracy
    assert mean_real(result) == pytest.approx(summary.real_sensitivity_mean, rel=1e-5)
    assert result["epsilon_sum"] == summary.privacy.epsilon_sum


def test_keys_tell_settings_apart_and_only_them():
    assert TINY.key == TINY.but().key
    others = [TINY.but(**change) for change in ({"seed": 8}, {"clip": 1.0}, {"certified": True})]
    assert len({c.key for c in [TINY, *others]}) == 4


def test_with_real_noise_the_estimate_is_the_real_sensitivity():
    result = run(TINY)
    assert result["real"] == result["estimated"]
    assert rounds_above(result) == []


def test_a_run_that_grows_beyond_all_numbers_is_a_result(monkeypatch):
    def broken(*_, **__):
        raise RunError("inf in round 9")

    monkeypatch.setattr("dpps.paper.runner.prepare", broken)
    assert run(TINY)["broke_off"] == "inf in round 9"


def test_rounds_above_ignores_rounding_and_finds_the_rest():
    result = {"real": [1.0, 2.0, 3.0], "estimated": [1.0, 2.0 * (1 - 1e-9), 2.9]}
    assert rounds_above(result) == [2]


# The pool


def twice_the_accuracy(cell, data_dir):
    """A result of its own for variants; worker processes import it."""
    found = run(cell.but(variant=""), data_dir)
    return found | {"accuracy": 2 * found["accuracy"]} if cell.variant == "twice" else found


def test_a_pool_keeps_what_worked_reports_what_failed_and_does_not_repeat(tmp_path):
    """With a function of its own, which makes variants."""
    bad, variant = TINY.but(batch_size=5000), TINY.but(variant="twice")
    pool = Pool(Store(tmp_path), workers=1, train=twice_the_accuracy)
    results = pool.run([TINY, bad, TINY, variant])
    assert list(results) == [TINY, variant]
    assert results[variant]["accuracy"] == 2 * results[TINY]["accuracy"]
    with pytest.raises(RunError, match=r"1 cells.*: UsageError"):
        pool.raise_errors()
    again = Pool(Store(tmp_path), workers=1)
    again._start = lambda: pytest.fail("nothing is missing")  # type: ignore[method-assign]
    assert again.run([TINY, variant]) == results
    torch.manual_seed(0)
    assert results[TINY]["real"] == run(TINY)["real"]


def test_a_dead_worker_costs_its_cell_only(tmp_path, monkeypatch):
    pool = Pool(Store(tmp_path), workers=1)
    start = Pool._start
    first = []

    def start_and_kill(self):
        worker = start(self)
        if not first:
            first.append(worker)
            worker.process.kill()
        return worker

    monkeypatch.setattr(Pool, "_start", start_and_kill)
    other = TINY.but(seed=8)
    assert list(pool.run([TINY, other])) == [other]
    assert "-9" in pool.errors[TINY]


def test_nothing_is_begun_after_the_deadline(tmp_path):
    pool = Pool(Store(tmp_path), workers=1, deadline=time.monotonic() - 1)
    assert pool.run([TINY]) == {}
    pool.raise_errors()


def test_a_half_written_result_does_not_count(tmp_path):
    store = Store(tmp_path)
    (store.folder / f"{TINY.key}.json.1.part").write_text('{"accuracy": 1')
    assert store.get(TINY) is None
    store.put(TINY, {"accuracy": 1.0})
    assert store.get(TINY) == {"accuracy": 1.0}


def test_results_of_another_version_are_not_this_one_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are neither reused nor lost."""
    Store(tmp_path).put(TINY, {"accuracy": 1.0})
    monkeypatch.setattr("dpps.paper.runner.identity", lambda: "another")
    assert Store(tmp_path).get(TINY) is None
    Store(tmp_path).put(TINY, {"accuracy": 2.0})
    monkeypatch.undo()
    assert Store(tmp_path).get(TINY) == {"accuracy": 1.0}


def test_a_warning_of_many_cells_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    growing = TINY.but(sensitivity="paper", track_real=True, epochs=5, sync_every=5, shared="all")
    cells = [growing.but(seed=seed) for seed in (1, 2)]
    assert len(Pool(Store(tmp_path), workers=1).run(cells)) == 2
    (said,) = [record.getMessage() for record in caplog.records]
    assert "--sync-every" in said
    assert said not in capfd.readouterr().err


def test_features_and_the_options_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the paper's: what `dpps train` takes, over images turned into features."""
    whole = data.load("mnist-mini")
    few = dataclasses.replace(whole, train=whole.train.part(0, 1000), test=whole.test.part(0, 200))
    monkeypatch.setattr(data, "load", lambda *_, **__: few)
    monkeypatch.setattr(runner, "_load", runner._load.__wrapped__)  # which would keep them for other tests
    cell = Cell.of(features="scattering", model="linear", shared="all", unit="record", clip=1.0, epochs=5)
    result = run(cell.but(noise_multiplier=0.5, batch_size=50, lr_shared=1.0, lr_local=1.0))
    assert 0 < result["epsilon"] < 100
    assert result["accuracy"] > 60
    assert result["real"] == []
