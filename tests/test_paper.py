"""`dpps paper`: the published numbers as transcribed, cells, the scheduler, and every table and figure at its smallest."""

import csv
import dataclasses
import importlib
import time
from statistics import fmean

import pytest
import torch

from dpps.cli import paper as command
from dpps.errors import RunError, UsageError
from dpps.paper import accuracy, published, sensitivity, timing
from dpps.paper.cells import Cell, mean_real, rounds_above, run
from dpps.paper.pages import Spread, Table, spread, text
from dpps.paper.scheduler import Scheduler, Store
from dpps.paper.scope import Scope
from dpps.simulation import prepare

SMALLEST = Scope("smallest", (7,), ("mlp",))
TINY = Cell(data="mnist-mini", batch_size=5, examples=100, tests=20, epochs=1, sync_every=2, seed=7)


# The published numbers


@pytest.mark.parametrize(("pair", "said"), published.CLAIMED_IMPROVEMENT.items())
def test_accuracy_table_gives_the_improvements_the_text_claims(pair, said):
    grid = {
        (a, b, m, t): accuracy.Entry(m, a, b, t).theirs
        for (a, b, m) in published.ACCURACY
        if b
        for t in published.TOPOLOGIES
    }
    assert len(grid) == 4 * 3 * 3 * 4
    assert accuracy.improvement(grid, *pair) == pytest.approx(said, abs=0.03)
    assert accuracy.wins(grid) == f"{published.CLAIMED_WINS} of 36"


@pytest.mark.parametrize(
    ("models", "said"), [(("mlp",), "mlp"), (("resnet18",), "resnet18"), (("mlp", "resnet18"), "all")]
)
def test_real_vs_estimated_table_gives_the_decrease_the_text_claims(models, said):
    total = {"real": 0.0, "paper": 0.0}
    for (noise, _, model), row in published.REAL_VS_ESTIMATED.items():
        total[noise] += sum(row) if model in models else 0
    assert 100 * (1 - total["paper"] / total["real"]) == pytest.approx(
        published.CLAIMED_DECREASE[said], abs=0.02
    )


def test_time_table_gives_the_differences_the_text_claims_as_ratios_of_sums():
    def change(algorithm, *models):
        ours, sgp = (sum(sum(published.TIME[a, m]) for m in models) for a in (algorithm, "SGP"))
        return 100 * (ours / sgp - 1)

    claimed = published.CLAIMED_TIME
    assert change("SGPDP", "mlp", "resnet18", "vit") == pytest.approx(claimed["SGPDP, all"], abs=0.02)
    assert change("PartPSP-1", "mlp") == pytest.approx(claimed["PartPSP-1, mlp"], abs=0.02)
    assert change("PartPSP-1", "resnet18", "vit") == pytest.approx(
        claimed["PartPSP-1, resnet18 and vit"], abs=0.02
    )


def test_all_eight_curves_of_the_authors_are_shipped():
    for panel in sensitivity.panels(Scope()):
        curve = published.curve(panel.name)
        assert len(curve.real) == len(curve.estimated) == 120
    assert fmean(published.curve("mlp-1-2-out").real) == pytest.approx(64.398, abs=1e-3)
    assert fmean(published.curve("resnet18-2-exp").estimated) == pytest.approx(426.12, abs=1e-2)


# Cells


def test_a_cell_is_the_run_dpps_train_would_do(tmp_path):
    cell = dataclasses.replace(TINY, examples=None, batch_size=200, tests=None, sensitivity="paper")
    result = run(cell)
    summary = prepare(dataclasses.replace(cell.config(), out=tmp_path / "run")).run()
    assert result["accuracy"] == summary["test_accuracy"]
    assert mean_real(result) == pytest.approx(summary["real_sensitivity_mean"], rel=1e-5)
    assert result["epsilon_sum"] == summary["privacy"]["epsilon_sum"]


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


def test_growth_is_that_of_the_rounds_before_a_synchronisation():
    estimated = [1.0, 5.0, 6.0, 7.0, 14.0, 1.0, 9.0, 2.0, 3.0, 6.0]
    assert sensitivity.growth(estimated, 5) == pytest.approx(2.0)


def test_bytes_of_the_time_table_are_those_the_protocol_counts():
    for cell in (TINY, dataclasses.replace(TINY, topology="4-out", unit="none", budget=None)):
        result = run(dataclasses.replace(cell, sync_every=0))
        size, scalar = result["shared_parameters"], cell.unit != "none"
        assert result["bytes_per_round"] == timing.bytes_of_round(
            size, cell.topology, cell.nodes, scalar=scalar
        )


# Tables


def test_tables_write_means_and_deviations(tmp_path):
    table = Table(("a", "b"))
    table.add("x", spread([1.0, 3.0]))
    table.add("y", "not run")
    table.csv(tmp_path / "t.csv")
    rows = list(csv.reader((tmp_path / "t.csv").read_text().splitlines()))
    assert rows == [["a", "b", "b, deviation"], ["x", "2.0", str(2**0.5)], ["y", "not run", ""]]
    assert text(Spread(2.0, 0.5)) == "2 ± 0.5"
    with pytest.raises(ValueError, match="1 values for 2"):
        table.add("z")


# The scheduler


def test_scheduler_keeps_what_worked_reports_what_failed_and_does_not_repeat(tmp_path):
    bad = dataclasses.replace(TINY, batch_size=5000)
    scheduler = Scheduler(Store(tmp_path), workers=1)
    results = scheduler.run([TINY, bad, TINY])
    assert list(results) == [TINY]
    with pytest.raises(RunError, match=r"1 cells failed.*\n.*UsageError"):
        scheduler.raise_errors()
    again = Scheduler(Store(tmp_path), workers=1)
    again._start = lambda: pytest.fail("nothing is missing")  # type: ignore[method-assign]
    assert again.run([TINY]) == results
    torch.manual_seed(0)
    assert results[TINY]["real"] == run(TINY)["real"]


def test_a_dead_worker_costs_its_cell_only(tmp_path, monkeypatch):
    scheduler = Scheduler(Store(tmp_path), workers=1)
    start = Scheduler._start
    first = []

    def start_and_kill(self):
        worker = start(self)
        if not first:
            first.append(worker)
            worker.process.kill()
        return worker

    monkeypatch.setattr(Scheduler, "_start", start_and_kill)
    other = dataclasses.replace(TINY, seed=8)
    assert list(scheduler.run([TINY, other])) == [other]
    assert "ended with code" in scheduler.errors[TINY]


def test_nothing_is_begun_after_the_deadline(tmp_path):
    scheduler = Scheduler(Store(tmp_path), workers=1, deadline=time.monotonic() - 1)
    assert scheduler.run([TINY]) == {}
    scheduler.raise_errors()


def test_a_half_written_result_does_not_count(tmp_path):
    store = Store(tmp_path)
    (tmp_path / f".{TINY.key}.1.part").write_text('{"accuracy": 1')
    assert store.get(TINY) is None
    store.put(TINY, {"accuracy": 1.0})
    assert store.get(TINY) == {"accuracy": 1.0}


# Every table and figure


@pytest.mark.parametrize("name", [n for n in command.NAMES if n != "convergence"])
def test_every_experiment_writes_its_tables_figures_and_page(name, tmp_path):
    module = importlib.import_module(f"dpps.paper.{command.NAMES[name][0]}")
    store = Store(tmp_path / "cells")
    empty = command.write(name, module, store, SMALLEST, tmp_path)
    assert "not run" in empty.read_text()
    for cell in dict.fromkeys(module.cells(SMALLEST)):
        store.put(cell, run(cell))
    page = command.write(name, module, store, SMALLEST, tmp_path)
    assert module.TITLE in page.read_text()
    found = {path.suffix for path in page.parent.iterdir()}
    assert found == {".csv", ".svg", ".png", ".html"}
    rows = list(csv.DictReader((page.parent / f"{name}.csv").read_text().splitlines()))
    assert any("not run" not in row.values() for row in rows)


@pytest.mark.parametrize("name", [n for n in command.NAMES if n != "convergence"])
@pytest.mark.parametrize("size", ["full", "quick"])
def test_every_cell_is_a_valid_configuration(name, size):
    module = importlib.import_module(f"dpps.paper.{command.NAMES[name][0]}")
    for cell in module.cells(Scope(size)):
        config = cell.config()
        assert config.network().nodes == cell.nodes
        assert cell.cost > 0


def test_the_telling_cells_of_the_large_models_come_first():
    order = [e for e in accuracy.entries(Scope()) if e.model == "resnet18"]
    assert {(e.algorithm, e.budget, e.topology) for e in order[:4]} == {
        (a, b, "exp") for a in ("PartPSP-1", "SGPDP") for b in (1.0, None)
    }


# The command


def test_without_a_name_it_lists_what_there_is(capsys):
    assert command.main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in command.NAMES)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["factor"], "factors"),
        (["factors", "--models", "mpl"], "mlp"),
        (["factors", "--seeds", "0"], "--seeds"),
        (["factors", "--hours", "-1"], "--hours"),
        (["factors", "--workers", "-1"], "--workers"),
        (["time", "--bandwidth", "0"], "--bandwidth"),
    ],
)
def test_wrong_requests_say_what_is_allowed(arguments, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        command.main([*arguments, "--out", str(tmp_path)])


def test_the_page_is_written_even_with_no_time(tmp_path, capsys):
    assert command.main(["factors", "--quick", "--hours", "0", "--out", str(tmp_path)]) == 0
    assert "not run" in (tmp_path / "factors" / "index.html").read_text()
