"""A run that ends before its last planned round guarantees what was promised; what it has spent so far is no guarantee."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpps
from dpps.privacy import Charge, total
from dpps.report import read_folder
from dpps.runs import Saved
from tests.support.learning import tiny, toy_data

EPSILON, DELTA = 2.0, 1e-5
UNITS = [
    dpps.Record(epsilon=EPSILON, delta=DELTA),
    dpps.Contribution(clip=1.0, epsilon=EPSILON, mechanism="gaussian"),
]


def made(folder: Path | None = None, unit: Any = UNITS[0], **options: Any) -> dpps.Run:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    return dpps.Run(
        algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0, folder=folder, **options
    )


def by_callback(folder: Path | None, unit: Any) -> dpps.Run:
    return made(folder, unit, callbacks=[lambda run, log: log.round == 2]).fit(epochs=2)


def by_stop(folder: Path | None, unit: Any) -> dpps.Run:
    def callback(run: dpps.Run, log: Any) -> None:
        if log.round == 2:
            run.stop()

    return made(folder, unit, callbacks=[callback]).fit(epochs=2)


def by_leaving(folder: Path | None, unit: Any) -> dpps.Run:
    run = made(folder, unit)
    for log in run.rounds(epochs=2):
        if log.round == 2:
            break
    return run


def by_failing(error: type[BaseException]) -> Callable[[Path | None, Any], dpps.Run]:
    def end(folder: Path | None, unit: Any) -> dpps.Run:
        def callback(run: dpps.Run, log: Any) -> None:
            if log.round == 2:
                raise error

        run = made(folder, unit, callbacks=[callback])
        with pytest.raises(error):
            run.fit(epochs=2)
        return run

    return end


def by_steps(folder: Path | None, unit: Any) -> dpps.Run:
    run = made(folder, unit).start(epochs=2)
    for _ in range(3):
        run.step()
    return run


ENDS = [by_callback, by_stop, by_leaving, by_failing(KeyboardInterrupt), by_failing(ValueError), by_steps]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.parametrize("end", ENDS)
def test_the_guarantee_is_what_was_promised(end: Callable[..., dpps.Run], unit: Any) -> None:
    privacy = end(None, unit).privacy
    assert privacy.epsilon == EPSILON
    assert privacy.epsilon_spent is not None
    assert 0 < privacy.epsilon_spent < 0.9 * EPSILON
    assert privacy.to_json()["epsilon_spent"] == privacy.epsilon_spent
    assert "epsilon 2," in privacy.statement


@pytest.mark.parametrize("end", [by_callback, by_leaving])
def test_so_say_summary_and_models(end: Callable[..., dpps.Run], tmp_path: Path) -> None:
    run = end(tmp_path / "run", UNITS[0])
    if end is by_leaving:
        run.finish()  # a loop that is left stops the run; its results are written on request
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert summary["privacy"]["epsilon"] == EPSILON
    assert summary["privacy"]["epsilon_spent"] == run.privacy.epsilon_spent
    saved = Saved.read(tmp_path / "run" / "models" / "node-0.safetensors")
    assert saved.facts["privacy"]["epsilon"] == EPSILON


def test_a_run_that_went_to_its_end_guarantees_what_it_spent() -> None:
    run = made().fit(epochs=2)
    assert run.privacy.epsilon == run.privacy.epsilon_spent
    assert 0.99 * EPSILON < run.privacy.epsilon <= EPSILON * (1 + 1e-9)


def test_a_run_that_goes_on_to_its_end_does_too(tmp_path: Path) -> None:
    by_leaving(tmp_path / "run", UNITS[0])
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    options: dict[str, Any] = {"topology": dpps.Ring(3), "privacy": UNITS[0], "seed": 0}
    again = dpps.Run.open(tmp_path / "run", algorithm, toy_data(3), **options).fit(epochs=2)
    assert again.privacy.epsilon == again.privacy.epsilon_spent


def test_where_the_noise_was_given_the_guarantee_is_that_of_all_planned_rounds() -> None:
    unit = dpps.Record(noise_multiplier=1.5, delta=DELTA)
    whole, ended = made(unit=unit).fit(epochs=2).privacy, by_callback(None, unit).privacy
    assert ended.epsilon == pytest.approx(whole.epsilon, rel=1e-6)
    assert ended.epsilon_spent is not None
    assert whole.epsilon is not None
    assert ended.epsilon_spent < 0.9 * whole.epsilon


def test_node_swap_promises_no_total_in_either_case() -> None:
    privacy = by_callback(None, dpps.NodeSwap(epsilon=1000.0)).privacy
    assert privacy.epsilon == privacy.epsilon_spent
    assert privacy.epsilon == pytest.approx(1000.0 * 3 / 8)


def test_nothing_sent_is_nothing_spent_and_nothing_to_guarantee() -> None:
    privacy = made().start(epochs=1).privacy
    assert (privacy.epsilon, privacy.epsilon_spent) == (0.0, 0.0)


def test_a_report_of_an_unfinished_folder_says_the_same(tmp_path: Path) -> None:
    from dpps.cli import main

    out = tmp_path / "run"
    options = ["--nodes", "3", "--epochs", "2", "--batch-size", "500", "--quiet", "--epsilon", "2"]
    assert main(["train", *options, "--checkpoint-every", "1", "--out", str(out)]) == 0
    (out / "summary.json").unlink()
    ledger = (out / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    assert len(ledger) > 4
    for name, kept in (("ledger.jsonl", 4), ("rounds.csv", 4)):
        lines = (out / name).read_bytes().splitlines(keepends=True)
        (out / name).write_bytes(b"".join(lines[:kept]))
    (out / "ledger.jsonl.witness").unlink()
    privacy = read_folder(out, "run").privacy
    assert privacy.epsilon == EPSILON
    assert privacy.epsilon_spent is not None
    assert privacy.epsilon_spent < EPSILON


def test_stopping_on_released_results_breaks_what_was_spent_and_not_what_was_promised() -> None:
    """Gaussian rounds of an honest node, and somebody who stops as soon as the messages point at the data strongly enough.

    The true delta at an epsilon that depends on the round t of the end is E[max(0, 1 - exp(epsilon_t - loss))] over runs on the data.
    """
    rounds, sigma, delta, runs = 60, 8.0, 1e-3, 200_000
    spent = np.array([total([Charge.gaussian(sigma, count=t)], delta).epsilon for t in range(1, rounds + 1)])
    random = np.random.default_rng(0)
    steps = np.cumsum(1 + sigma * random.standard_normal((runs, rounds)), axis=1)
    losses = (steps - np.arange(1, rounds + 1) / 2) / sigma**2
    suspicious = losses > spent + 0.1
    ends = np.where(suspicious.any(1), suspicious.argmax(1), rounds - 1)
    at_end = losses[np.arange(runs), ends]

    def true_delta(epsilon: np.ndarray | float) -> tuple[float, float]:
        found = np.maximum(0, -np.expm1(np.minimum(0, epsilon - at_end)))
        return float(found.mean()), 6 * float(found.std()) / math.sqrt(runs)

    broken, margin = true_delta(spent[ends])
    assert broken - margin > 1.5 * delta
    kept, margin = true_delta(spent[-1])
    assert kept - margin <= delta
