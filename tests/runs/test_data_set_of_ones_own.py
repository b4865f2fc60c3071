"""A data set is one registered recipe: `dpps train` and `dpps plan` take it as one that comes with the package."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dpps.cli import DONE, WRONG, main
from dpps.data import DATA_SETS, Layout, Recipe
from dpps.errors import UsageError
from dpps.runs import Options, Run, planned, shape

FACTS = {"examples": 200, "shape": (1, 8, 8)}


def _read(files):
    found = np.load(files[0])
    return found["images"], found["labels"]


@pytest.fixture(params=[{}, FACTS], ids=["read", "described"])
def folder(request, tmp_path: Path) -> Iterator[Path]:
    """Holds the data set "stripes", with what is known of it before it is read, or without."""
    place = tmp_path / "data" / "stripes"
    place.mkdir(parents=True)
    labels = np.arange(200, dtype=np.uint8) % 2
    images = np.where(labels[:, None, None, None] == 1, 255, 0) * np.ones((200, 1, 8, 8), dtype=np.uint8)
    for part in ("train", "test"):
        np.savez(place / f"{part}.npz", images=images.astype(np.uint8), labels=labels)
    layout = Layout(("train.npz",), ("test.npz",))
    DATA_SETS.names()  # whatever comes with the package is loaded first
    DATA_SETS.register("stripes")(Recipe((layout,), _read, citation="nobody", classes=2, **request.param))
    yield place.parent
    del DATA_SETS._entries["stripes"]


@pytest.mark.parametrize("unit", ["record", "contribution", "none"])
@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_a_registered_data_set_trains_with_the_defaults(folder, tmp_path, unit, model):
    options = {"nodes": 4, "unit": unit, "model": model, "delta": 1e-3, "batch_size": None}
    if unit != "record":
        options["batch_size"] = 10
    config = Options(data="stripes", data_dir=folder, out=tmp_path / "run", **options)
    run = Run.from_options(config)
    run.fit(2)
    assert run.state.local.shape[0] == 4
    assert run.summary.config["data"] == "stripes"
    assert run.algorithm.model(run.results.tests[0][:1]).shape == (1, 2)
    assert run.plan.declared_sizes == (50,) * 4


def test_what_is_left_open_is_the_same_whether_the_data_set_was_described_or_read(folder, tmp_path):
    """Fifty examples a node: batches of 25, and as many epochs as make 120 rounds."""
    config = Options(data="stripes", data_dir=folder, nodes=4, delta=1e-3, out=tmp_path / "run")
    run = Run.from_options(config).start()
    assert (run.plan.batch_size, run.epochs, run.plan.count) == (25, 60, 120)


def test_a_plan_needs_what_is_known_before_reading(folder, capsys):
    described = DATA_SETS["stripes"].examples is not None
    arguments = ["plan", "--data", "stripes", "--nodes", "4", "--delta", "1e-3"]
    assert main(arguments) == (DONE if described else WRONG)
    if described:
        plan, parameters = planned(Options(data="stripes", nodes=4, model="linear", shared="all").resolve())
        assert plan.declared_sizes == (50,) * 4
        assert parameters == 2 * (64 + 1)
        with pytest.raises(UsageError, match="201"):
            Options(data="stripes", nodes=201).check()
    else:
        assert "stripes" in (said := capsys.readouterr().err)
        assert len(said.splitlines()) == 1
        assert shape(Options(data="stripes")) is None


@pytest.mark.parametrize("half", [{"examples": 3}, {"shape": (1, 2, 2)}])
def test_half_a_description_is_refused(half):
    with pytest.raises(UsageError, match="examples"):
        Recipe((), _read, "nobody", **half)
