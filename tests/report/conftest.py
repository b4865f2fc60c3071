"""Three small runs and their pages, made once for all tests of the report."""

import shutil
from pathlib import Path

import pytest

from dpps.report import read, read_folder, render
from dpps.runs import ALONE, NO_PRIVACY, Options, Run
from dpps.tasks import Estimate, Estimates
from tests.support.report import changed

SMALL = {"nodes": 5, "batch_size": 250, "quiet": True}


@pytest.fixture(scope="session", autouse=True)
def few_questions():
    """The accountant is slow: ask it at few points."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "SPENT_POINTS", 4)
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """One small run in each of three units."""
    base = tmp_path_factory.mktemp("runs")
    options = {
        "record": {"epochs": 2, "split": "dirichlet:1"},
        "node-swap": {"epochs": 2, "unit": "node-swap", "sync_every": 3, "track_real": True},
        "none": {"epochs": 1, "unit": "none", "topology": "ring", "dropouts": 0.2},
    }
    for name, chosen in options.items():
        Run.from_options(Options(out=base / name, **SMALL, **chosen)).fit()
    return {name: base / name for name in options}


@pytest.fixture(scope="session")
def runs(folders):
    return {name: read_folder(folder, name) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def hospitals(runs):
    """The run in the unit record as one of five named hospitals with baselines: the first gained, of the others nothing is shown."""
    gained, lost, unclear = _estimate(20.0, 2.0, 50), _estimate(-1.5, 0.5, 50), _estimate(1.0, 4.0, 50)
    nodes, points = (gained, *[unclear] * 4), [90.0, *[71.0] * 4]
    one = Estimates(_estimate(4.9, 1.7, 250), _estimate(4.8, 1.6, 250), nodes)
    cost = Estimates(lost, lost, (lost,) * 5)
    levels = {
        "alone": _levels([70.0] * 5),
        "without noise": _levels([91.5, *[72.5] * 4]),
        "private": _levels(points),
    }
    return changed(
        runs["record"],
        node_names=["Westmead", "St-Mary", "Royal-General", "Charité", "Hôtel-Dieu"],
        own_accuracy=74.8,
        own_accuracy_by_node=points,
        baselines={
            NO_PRIVACY: {"own_accuracy": 76.3, "own_accuracy_by_node": [91.5, *[72.5] * 4]},
            ALONE: {"own_accuracy": 70.0, "own_accuracy_by_node": [70.0] * 5},
        },
        comparisons={"own": {**levels, "joining": one, "privacy": cost, "both": one}},
    )


def _estimate(percent, error, examples):
    return Estimate(percent / 100, error / 100, 1.96 * error / 100, examples)


def _levels(percent):
    nodes = tuple(_estimate(each, 3.0, 50) for each in percent)
    mean = _estimate(sum(percent) / len(percent), 1.5, 250)
    return Estimates(mean, mean, nodes)


@pytest.fixture(scope="session")
def pages(runs, hospitals, tmp_path_factory):
    """The page of each run and of their comparison."""
    base = tmp_path_factory.mktemp("pages")
    texts = {name: render([run]) for name, run in runs.items()}
    texts |= {"hospitals": render([hospitals]), "comparison": render([*runs.values()])}
    for name, text in texts.items():
        (base / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: base / f"{name}.html" for name in texts}


@pytest.fixture
def copied(folders, tmp_path):
    """A copy of a run that a test may damage."""
    return lambda name: Path(shutil.copytree(folders[name], tmp_path / name))
