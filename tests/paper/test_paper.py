"""Every table and figure of the paper at its smallest, and every cell of all sizes."""

import csv
import importlib
import re
from pathlib import Path

import pytest

from dpps.cli import paper as command
from dpps.paper import Scope, Store, run
from tests.support.paper import SMALLEST


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


@pytest.mark.parametrize("name", [n for n in command.NAMES if n != "convergence"])
def test_a_quick_page_says_so_wherever_it_stands_compared_with_the_authors(name: str, tmp_path: Path) -> None:
    """On the page, at every table and figure, and in every file that somebody may pass on alone."""
    module = importlib.import_module(f"dpps.paper.{command.NAMES[name][0]}")
    for size in ("quick", "full"):
        scope = Scope(size, (7,), ("mlp",))  # type: ignore[arg-type]
        page = command.write(name, module, Store(tmp_path / "cells"), scope, tmp_path / size)
        files = [path.read_text() for path in page.parent.iterdir() if path.suffix in (".csv", ".svg")]
        headings = re.findall(r"<h[12][^>]*>(.*?)</h[12]>", page.read_text(), re.DOTALL)
        files = [
            text for text in files if text.count("\n") > 1
        ]  # a table without rows has nothing to compare
        assert len(files) > 1
        assert headings
        for text in (*files, *headings):
            assert ("quick" in text and "mnist-mini" in text) == (size == "quick"), text
