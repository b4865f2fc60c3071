"""The figure of shared layers and connectivity: its cells, and what the page says of results."""

import csv

import pytest

from dpps.paper import Page, Scope, factors, published


def test_27_points_seed_by_seed() -> None:
    cells = factors.cells(Scope())
    assert len(set(cells)) == len(cells) == 3 * 27
    assert {cell.seed for cell in cells[:27]} == {2024}
    assert {(cell.shared, cell.topology) for cell in cells[:27]} == {
        (s, f"{d}-out") for s in ("1", "2", "all") for d in range(2, 11)
    }
    assert {(cell.c_prime, cell.decay, cell.sync_every) for cell in cells} == {(0.95, 0.55, 4)}


def test_ours_stand_beside_the_authors_numbers(tmp_path) -> None:
    scope = Scope("smallest", (7, 8), ("mlp",))
    results = {
        cell: {
            "real": [published.FACTORS[2] * (0.9 if cell.seed == 7 else 1.1)],
            "estimated": [1e6],
            "rounds": 1,
        }
        for cell in factors.cells(scope)
    }
    page = Page(tmp_path, factors.TITLE, ())
    factors.write(results, scope, page)
    rows = list(csv.DictReader((tmp_path / "factors.csv").read_text().splitlines()))
    first = next(row for row in rows if (row["shared layers"], row["d"]) == ("1", "2"))
    assert float(first["difference %"]) == pytest.approx(0, abs=0.1)  # the mean over the seeds is theirs
    assert (first["seeds"], first["real above estimated"]) == ("2", "0")
    assert all(row["authors"] == "" for row in rows if row["shared layers"] != "1")
