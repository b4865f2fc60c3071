"""Tables and pages of the experiments."""

import csv

import pytest

from dpps.paper import Cell, Scope, Spread, Table, spread, text

SMALLEST = Scope("smallest", (7,), ("mlp",))
TINY = Cell(data="mnist-mini", batch_size=5, examples=100, tests=20, epochs=1, sync_every=2, seed=7)


def test_tables_write_means_and_deviations(tmp_path):
    table = Table(("a", "b"))
    table.add("x", spread([1.0, 3.0]))
    table.add("y", "not run")
    table.csv(tmp_path / "t.csv")
    rows = list(csv.reader((tmp_path / "t.csv").read_text().splitlines()))
    assert rows == [["a", "b", "b, deviation"], ["x", "2.0", str(2**0.5)], ["y", "not run", ""]]
    assert text(Spread(2.0, 0.5)) == "2 ± 0.5"
    with pytest.raises(ValueError, match=r"1 .*2"):
        table.add("z")
