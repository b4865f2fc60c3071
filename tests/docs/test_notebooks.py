"""Every notebook runs, from its first cell to its last, and what is kept in it has the lines that it prints."""

import json
from pathlib import Path

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def printed(notebook):
    """How many lines stand below each cell: numbers differ a little between machines, and words grow better."""
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    return [sum(len(output["text"]) for output in cell["outputs"]) for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_notebook(path):
    if path.stem == "adapters":
        pytest.importorskip("transformers")
        pytest.importorskip("peft")
    kept = json.loads(path.read_text(encoding="utf-8"))
    again = load_script("run_notebooks").run(json.loads(path.read_text(encoding="utf-8")))
    assert printed(again) == printed(kept)
    assert any(printed(kept)), "python scripts/run_notebooks.py keeps what they print"


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["adapters", "first_run"]
