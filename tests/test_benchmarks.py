"""Every benchmark runs at its smallest size and reports well-formed rows. No time is asserted."""

import importlib
import json
import math
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
HELPERS = {"measure", "learners", "run", "profiling"}
BENCHMARKS = sorted({file.stem for file in FOLDER.glob("*.py")} - HELPERS)


@pytest.fixture
def load(monkeypatch):
    """Benchmarks import each other as scripts do: from their own folder."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def run(load):
    return load("run")


def results(run, **rows):
    plain = {name: [row.to_json() for row in own] for name, own in rows.items()}
    return {"date": "today", "quick": False, "rows": plain} | run.machine()


def test_the_one_command_runs_every_file(run):
    assert set(run.BENCHMARKS) == set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_row_is_well_formed(load, name):
    measure = load("measure")
    rows = list(load(name).rows(True))
    assert rows
    for row in rows:
        plain = json.loads(json.dumps(row.to_json(), allow_nan=False))
        assert measure.Row.from_json(plain) == row
        assert (row.ours is None) == (row.verdict == "skipped") == bool(row.ours is None and row.note)
        assert (row.beside is None) == (row.ratio is None) == (not row.beside_what)
        assert row.unit in ("s", "GB")
        for value in (row.ours, row.beside, row.ratio):
            assert value is None or 0 < value.low <= value <= value.high < math.inf


def test_one_file_with_table_plot_and_circumstances(run, tmp_path, capsys):
    file = tmp_path / "new" / "file.json"
    run.measure_and_save(["units", "growth"], True, file)
    found = run.read(file)
    assert found["quick"]
    assert found["versions"]["torch"]
    assert found["cpu"]
    assert found["cores"] >= 1
    assert set(found["rows"]) == {"units", "growth"}
    assert "<svg" in file.with_suffix(".svg").read_text()
    printed = capsys.readouterr().out
    assert "unit record" in printed
    assert "missed" not in printed  # tiny sizes are judged by nobody


def test_one_benchmark_that_fails_does_not_take_the_others_with_it(load, run, tmp_path, monkeypatch):
    measure = load("measure")
    line = json.dumps(measure.Row("one", measure.Spread.of([1.0])).to_json())
    (tmp_path / "units.py").write_text(f"print({line!r}, flush=True)\nraise RuntimeError('halfway')\n")
    (tmp_path / "round.py").write_text(f"print({line!r})\nprint({line!r})\n")
    monkeypatch.setattr(run, "HERE", tmp_path)
    file = tmp_path / "results.json"
    with pytest.raises(SystemExit, match="units") as raised:
        run.measure_and_save(["units", "round"], True, file)
    assert raised.value.code != 0
    found = run.read(file)
    assert found["failed"] == ["units"]
    assert {name: len(rows) for name, rows in found["rows"].items()} == {"units": 1, "round": 2}


def test_the_baseline_in_plain_torch_runs_torchs_own_layers(load):
    """A copy of layers of ours would be compared with itself."""
    from torch import nn

    run = load("learners").learner(2, 2, 2, model="resnet18")
    model = load("networks").Plain(run).models[0]
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 20
    assert {type(m) for m in convolutions} == {nn.Conv2d}


def test_the_models_that_opacus_needs_have_as_many_parameters_as_ours(load):
    per_example = load("per_example")
    vit = next(case for name, case in per_example.CASES.items() if name.startswith("ViT"))
    ours, theirs = (sum(p.numel() for p in make().parameters()) for make in (vit.make, vit.theirs))
    assert ours == theirs


def test_medians_quartiles_and_verdicts(load):
    measure = load("measure")
    spread = measure.Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (spread, spread.low, spread.high, spread.count) == (3.0, 2.0, 4.0, 5)
    ours, beside, ratio = measure.spreads([2.0, 9.0, 4.0], [1.0, 3.0, 4.0])
    assert (ours, beside, ratio) == (4.0, 3.0, 2.0)  # the median of the ratios, not the ratio of the medians
    assert measure.Row("", ours, "", beside, ratio, target=2.0).verdict == "met"
    assert measure.Row("", ours, "", beside, ratio, target=1.9).verdict == "missed"
    assert measure.Row("", ours, target=3.9).verdict == "missed"
    assert measure.Row("", ours).verdict == ""
    assert measure.Row("", note="no data", target=1.0).verdict == "skipped"


def test_a_row_of_a_busy_machine_says_so(load, run):
    measure = load("measure")
    row = measure.Row("one", measure.Spread.of([1.0]), target=2.0, others=0.05)
    loud = measure.replace(row, others=1.5)
    assert (row.busy, loud.busy) == (False, True)
    assert measure.cells(row)[-1] == "met"
    assert "1.5" in measure.cells(loud)[-1]
    quiet, disturbed = (run.about(results(run, a=[r])) for r in (row, loud))
    assert quiet != disturbed


def test_work_of_others_is_told_from_our_own(load, monkeypatch):
    """Seconds of the clock, of all processors, and of this process group; None where that cannot be read."""
    others = load("measure").Others()
    readings = iter([(10.0, 100.0, 50.0), (14.0, 106.0, 54.0), (15.0, 107.0, 56.0), None])
    monkeypatch.setattr(others, "_now", lambda: next(readings))
    others.cores()
    assert others.cores() == 0.5  # six seconds of work in four, of which four are ours
    assert others.cores() == 0.0  # clocks are read one after the other: never below zero
    assert others.cores() is None


def test_two_runs_are_compared_by_what_is_judged(load, run):
    measure = load("measure")

    def row(what, seconds, **more):
        return measure.Row(what, measure.Spread.of([seconds]), **more)

    before = results(run, a=[row("one", 2.0), row("gone", 1.0)])
    after = results(run, a=[row("one", 5.0, target=1.0), row("new", 1.0)])
    lines = {line.split()[0]: line.split() for line in run.comparison(before, after).splitlines()[4:]}
    assert lines["one"] == ["one", "2", "s", "5", "s", "2.50", "2", "s", "5", "s"]
    assert set(lines) == {"one", "gone", "new"}
    table = measure.markdown_table(run.lines(after)).splitlines()
    assert len({line.count("|") for line in table}) == 1
    assert "missed" in table[2]


def test_missing_data_is_said(load, monkeypatch, tmp_path):
    mnist, measure = load("mnist"), load("measure")
    monkeypatch.setenv("DPPS_DATA", str(tmp_path))
    monkeypatch.setattr(mnist.pooch, "os_cache", lambda _: tmp_path / "cache")
    (row,) = mnist.rows(False)
    assert row.verdict == "skipped"
    assert "$DPPS_DATA" in measure.cells(row)[-1]


def test_the_bare_products_are_those_of_algorithm_2(load):
    """Between linear layers alone they must agree with autograd. (Benchmarks keep W2 transposed.)"""
    import torch

    run = load("learners").learner(2, 4, 8)
    products = load("training").Products(run)
    products()
    x = run.nodes.updates.sampler.batch(0)[0].flatten(2)
    w1, w2, w3 = (w.detach().clone().requires_grad_() for w in (products.w1, products.w2, products.w3))
    out = x @ w1.mT @ w2 @ w3.mT
    expected = torch.autograd.grad((out * products.d3.mT).sum(), (w1, w2, w3))
    for found, wanted in zip((products.g1, products.g2, products.g3), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_shares_of_a_profile(load):
    profiling = load("profiling")
    seconds, kinds, operations = profiling.profiled(profiling.QUICK[0])
    assert seconds > 0
    assert set(kinds) == set(profiling.SHARES)
    assert operations["aten::baddbmm"] > 0
    assert math.isclose(kinds.total(), operations.total())
