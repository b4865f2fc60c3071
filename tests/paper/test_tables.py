"""Every table and figure of the paper: its cells at both sizes, its files, and what the published numbers say."""

import csv
import re
from itertools import cycle
from pathlib import Path
from statistics import fmean

import pytest

from dpps.errors import UsageError
from dpps.paper import (
    EXPERIMENTS,
    Cell,
    Scope,
    Spread,
    Store,
    Table,
    paper_cell,
    published,
    run,
    spread,
    tables,
    text,
)
from tests.support.paper import QUICK, TINY, solve_nothing


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_writes_its_tables_figures_and_page(name, tmp_path):
    experiment = EXPERIMENTS[name]
    store = Store(tmp_path / "cells")
    empty = experiment.page(store, QUICK, tmp_path)
    assert "not run" in empty.read_text()
    cells = experiment.cells(QUICK)
    tiny = [cell.but(batch_size=5, tests=20, epochs=1, examples=10 * cell["nodes"]) for cell in cells]
    for cell, result in zip(cells, cycle([run(tiny[0]), run(tiny[-1])]), strict=False):
        store.put(cell, result)
    page = experiment.page(store, QUICK, tmp_path)
    assert experiment.title in page.read_text()
    found = {path.suffix for path in page.parent.iterdir()}
    assert found == {".csv", ".svg", ".png", ".html"}
    rows = list(csv.DictReader((page.parent / f"{name}.csv").read_text().splitlines()))
    assert all("not run" not in row.values() for row in rows)
    _check_marks(page, quick=True)


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("size", ["full", "quick"])
def test_every_cell_is_a_valid_configuration(name, size, monkeypatch):
    solve_nothing(monkeypatch)
    experiment = EXPERIMENTS[name]
    for cell in experiment.cells(Scope(size)):
        config = cell.config()
        assert config.network().nodes == cell["nodes"]
        assert cell.cost > 0


def _check_marks(page: Path, *, quick: bool) -> None:
    """A quick run says so on the page, at every table and figure, and in every file that somebody may pass on alone."""
    files = [path.read_text() for path in page.parent.iterdir() if path.suffix in (".csv", ".svg")]
    files = [text for text in files if text.count("\n") > 1]  # a table without rows has nothing to compare
    headings = re.findall(r"<h[12][^>]*>(.*?)</h[12]>", page.read_text(), re.DOTALL)
    assert len(files) > 1
    assert headings
    for words in (*files, *headings):
        assert ("quick" in words and "mnist-mini" in words) == quick, words


def test_a_full_page_is_not_marked(tmp_path: Path) -> None:
    page = EXPERIMENTS["factors"].page(
        Store(tmp_path / "cells"), Scope("full", (7,), ("mlp",)), tmp_path / "full"
    )
    _check_marks(page, quick=False)


# How much is asked for

CELLS = [
    paper_cell(),
    paper_cell(model="resnet18", data="fashion-mnist"),
    paper_cell(model="vit", data="cifar-10", tests=0),
]


def test_the_full_size_is_the_papers() -> None:
    assert [Scope().fit(cell) for cell in CELLS] == CELLS


def test_a_quick_run_takes_the_embedded_data_and_costs_less() -> None:
    fitted = [Scope("quick").fit(cell) for cell in CELLS]
    assert {cell["data"] for cell in fitted} == {"mnist-mini"}
    assert [cell["model"] for cell in fitted] == [cell["model"] for cell in CELLS]
    assert all(small.cost < full.cost for small, full in zip(fitted, CELLS, strict=True))
    assert fitted[0]["epochs"] * 10_000 == 2 * 60_000, "as many rounds as two epochs of the full one"
    assert fitted[2].tests == 0, "what is not tested stays so"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": ("mpl",)}, "'mpl'.*'mlp'"),
        ({"seeds": ()}, "--seeds is 0"),
        ({"bandwidth": 0.0}, "--bandwidth is 0"),
        ({"bandwidth": float("inf")}, "--bandwidth is inf"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Scope(**options)  # type: ignore[arg-type]


# Single tables


def test_all_eight_curves_of_the_authors_are_shipped():
    for point in EXPERIMENTS["sensitivity"].points(Scope()):
        curve = published.curve("-".join(point.labels))
        assert len(curve.real) == len(curve.estimated) == 120
    assert fmean(published.curve("mlp-1-2-out").real) == pytest.approx(64.398, abs=1e-3)
    assert fmean(published.curve("resnet18-2-exp").estimated) == pytest.approx(426.12, abs=1e-2)


def test_growth_is_that_of_the_rounds_before_a_synchronisation():
    estimated = [1.0, 5.0, 6.0, 7.0, 14.0, 1.0, 9.0, 2.0, 3.0, 6.0]
    assert tables.growth(estimated, 5) == pytest.approx(2.0)


def test_27_points_seed_by_seed() -> None:
    cells = EXPERIMENTS["factors"].cells(Scope())
    assert len(set(cells)) == len(cells) == 3 * 27
    assert {cell["seed"] for cell in cells[:27]} == {2024}
    assert {(cell["shared"], cell["topology"]) for cell in cells[:27]} == {
        (s, f"{d}-out") for s in ("1", "2", "all") for d in range(2, 11)
    }
    assert {(cell["c_prime"], cell["decay"], cell["sync_every"]) for cell in cells} == {(0.95, 0.55, 4)}


def test_ours_stand_beside_the_authors_numbers(tmp_path) -> None:
    scope, factors = Scope("quick", (7, 8), ("mlp",)), EXPERIMENTS["factors"]
    store = Store(tmp_path / "cells")
    for cell in factors.cells(scope):
        real = published.FACTORS[2] * (0.9 if cell["seed"] == 7 else 1.1)
        store.put(cell, {"real": [real], "estimated": [1e6], "rounds": 1})
    factors.page(store, scope, tmp_path)
    rows = list(csv.DictReader((tmp_path / "factors" / "factors.csv").read_text().splitlines()))
    first = next(row for row in rows if (row["shared layers"], row["d"]) == ("1", "2"))
    assert float(first["difference %"]) == pytest.approx(0, abs=0.1)  # the mean over the seeds is theirs
    assert (first["seeds"], first["real above estimated"]) == ("2", "0")
    assert all(row["authors"] == "" for row in rows if row["shared layers"] != "1")


def scale_cells(model: str, size: str = "full") -> list[Cell]:
    return [p.cells[0] for p in EXPERIMENTS["scale"].points(Scope(size)) if p.labels[0] == model]


def test_all_runs_of_the_mlp_are_at_the_same_stage_of_training() -> None:
    rounds = {
        c["nodes"]: c["epochs"] * (60_000 // (c["nodes"] * c["batch_size"])) for c in scale_cells("mlp")
    }
    assert rounds.pop(1000) == 40
    assert set(rounds.values()) == {120}


def test_the_networks_of_the_paper_come_first_and_larger_ones_only_in_full() -> None:
    full, quick = ([c["nodes"] for c in scale_cells("mlp", size)] for size in ("full", "quick"))
    assert sorted(set(full)) == [10, 20, 30, 40, 50, 100, 300, 1000]
    assert full == sorted(full)
    assert max(quick) == 50


def test_resnet_runs_have_ten_rounds() -> None:
    cells = scale_cells("resnet18")
    assert {c.examples // (c["nodes"] * c["batch_size"]) for c in cells} == {tables.RESNET_ROUNDS}


@pytest.mark.parametrize(("pair", "said"), published.CLAIMED_IMPROVEMENT.items())
def test_accuracy_table_gives_the_improvements_the_text_claims(pair, said):
    grid = tables.published_grid()
    assert len(grid) == 4 * 3 * 3 * 4
    assert tables.improvement(grid, *pair) == pytest.approx(said, abs=0.03)
    assert tables.wins(grid) == f"{published.CLAIMED_WINS} of 36"


def test_the_telling_cells_of_the_large_models_come_first():
    order = [c for c in EXPERIMENTS["accuracy"].cells(Scope()) if c["model"] == "resnet18"]
    assert {(c["algorithm"], c["budget"], c["topology"]) for c in order[:4]} == {
        (a, b, "exp") for a in ("partpsp", "sgpdp") for b in (1.0, None)
    }


@pytest.mark.parametrize(
    ("models", "said"), [(("mlp",), 7.76), (("resnet18",), 0.41), (("mlp", "resnet18"), 3.93)]
)
def test_real_vs_estimated_table_gives_the_decrease_the_text_claims(models, said):
    total = {"real": 0.0, "paper": 0.0}
    for (noise, _, model), row in published.REAL_VS_ESTIMATED.items():
        total[noise] += sum(row) if model in models else 0
    assert 100 * (1 - total["paper"] / total["real"]) == pytest.approx(said, abs=0.02)


def test_time_table_gives_the_differences_the_text_claims_as_ratios_of_sums():
    def change(algorithm, *models):
        ours, sgp = (sum(sum(published.TIME[a, m]) for m in models) for a in (algorithm, "SGP"))
        return 100 * (ours / sgp - 1)

    assert change("SGPDP", "mlp", "resnet18", "vit") == pytest.approx(16.58, abs=0.02)
    assert change("PartPSP-1", "mlp") == pytest.approx(8.16, abs=0.02)
    assert change("PartPSP-1", "resnet18", "vit") == pytest.approx(-83.15, abs=0.02)


def test_bytes_of_the_time_table_are_those_the_protocol_counts():
    for cell in (TINY, TINY.but(topology="4-out", unit="none", budget=None)):
        result = run(cell.but(sync_every=0))
        size, scalar = result["shared_parameters"], cell["unit"] != "none"
        assert result["bytes_per_round"] == tables.bytes_of_round(
            size, cell["topology"], cell["nodes"], scalar=scalar
        )


def test_tables_write_means_and_deviations(tmp_path):
    table = Table("a | b")
    table.add("x", spread([1.0, 3.0]))
    table.add("y", "not run")
    table.csv(tmp_path / "t.csv")
    rows = list(csv.reader((tmp_path / "t.csv").read_text().splitlines()))
    assert rows == [["a", "b", "b, deviation"], ["x", "2.0", str(2**0.5)], ["y", "not run", ""]]
    assert text(Spread(2.0, 0.5)) == "2 ± 0.5"
    with pytest.raises(ValueError, match=r"1 .*2"):
        table.add("z")
