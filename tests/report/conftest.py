"""Three small runs and their pages, made once for all tests of the report."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpps.report import RunRecord, charts, read_folder, render
from dpps.runs import Options, Run

SMALL = {"nodes": 5, "batch_size": 250, "quiet": True}


@pytest.fixture(scope="session", autouse=True)
def few_questions() -> Iterator[None]:
    """The accountant is slow: ask it at few points."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "SPENT_POINTS", 4)
        yield


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small run in each of three units."""
    base = tmp_path_factory.mktemp("runs")
    options: dict[str, dict[str, Any]] = {
        "record": {"epochs": 2, "split": "dirichlet:1"},
        "node-swap": {"epochs": 2, "unit": "node-swap", "sync_every": 3, "track_real": True},
        "none": {"epochs": 1, "unit": "none", "topology": "ring", "dropouts": 0.2},
    }
    for name, chosen in options.items():
        config = Options(out=base / name, **SMALL, **chosen)
        Run.from_options(config).fit()
    return {name: base / name for name in options}


@pytest.fixture(scope="session")
def records(runs: dict[str, Path]) -> dict[str, RunRecord]:
    return {name: read_folder(folder, name) for name, folder in runs.items()}


@pytest.fixture(scope="session")
def pages(records: dict[str, RunRecord], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each run and of their comparison."""
    base = tmp_path_factory.mktemp("pages")
    texts = {name: render([record]) for name, record in records.items()}
    texts["comparison"] = render([*records.values()])
    for name, text in texts.items():
        (base / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: base / f"{name}.html" for name in texts}


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a run that a test may damage."""
    return lambda name: Path(shutil.copytree(runs[name], tmp_path / name))
