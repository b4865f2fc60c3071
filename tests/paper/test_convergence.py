"""`dpps paper convergence`: slopes are found, and files and page are written."""

import numpy as np

from dpps.paper import convergence


def test_series_recovers_a_known_slope():
    x = (1.0, 2.0, 4.0, 8.0)
    wobble = np.exp(np.random.default_rng(0).normal(0, 0.05, (4, 30)))
    series = convergence.Series("made up", "b", x, np.array(x)[:, None] ** -2 * wobble, -2.0)
    low, high = series.interval()
    assert low < -2 < high
    assert high - low < 0.1
    assert series.agrees()
    assert not convergence.Series("made up", "b", x, series.values, -1.5).agrees()
    assert not convergence.Series("made up", "T", x, series.values, -2.5).agrees(), "falls too slowly"
    assert convergence.Series("made up", "T", x, series.values, -0.5).agrees(), "falls faster than the bound"


def test_convergence_writes_its_files_and_says_when_conditions_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(convergence, "QUICK", convergence.Size(3, (16, 32), (8, 16), (10.0, 20.0)))
    monkeypatch.setattr(convergence, "NOISE_ROUNDS", 16)
    summary = convergence.run(tmp_path / "new", quick=True)
    assert {p.name for p in (tmp_path / "new").iterdir()} == {
        f"convergence.{end}" for end in ("csv", "svg", "png", "html")
    }
    page = (tmp_path / "new" / "convergence.html").read_text()
    assert "<svg" in page
    assert "Theorem 2" in page
    assert not summary["conditions_hold"], "T = 16 is too small"
    assert "runs: False" in capsys.readouterr().out
    assert [s["theorem"] for s in summary["slopes"]] == [-0.5, -0.5, -0.5, 1.0, -2.0]
    lines = (tmp_path / "new" / "convergence.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * (2 * 2 + 2 + 2 + 1), "a line per run and seed"
