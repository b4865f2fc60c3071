"""From options to a run: data dealt, models built, data sets of one's own."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dpps.cli import DONE, WRONG, main
from dpps.data import DATA_SETS, DataSet, Images, Layout, Recipe
from dpps.errors import UsageError
from dpps.runs import Options, Run, RunFolder, Simulation, deal, planned, shape

# From options to a run: what is dealt to whom, and what is refused before data is read


SMALL = {"nodes": 4, "epochs": 1, "batch_size": 500, "quiet": True}


def data_set(examples: int = 60) -> DataSet:
    pixels = torch.arange(examples, dtype=torch.uint8)[:, None, None, None].repeat(1, 1, 2, 2)
    images = Images(pixels, torch.arange(examples) % 3)
    return DataSet("stripes", images, images, 3, "nobody")


def test_every_example_is_dealt_once_and_those_held_out_to_nobody() -> None:
    config = Options(nodes=4, batch_size=5, hold_out=0.2)
    nodes, held_out, split = deal(data_set(), config)
    dealt = torch.cat([node.pixels[:, 0, 0, 0] for node in nodes])
    kept = torch.cat([(x[:, 0, 0, 0] * 255).round().to(torch.uint8) for x, _ in held_out])
    assert sorted(torch.cat([dealt, kept]).tolist()) == list(range(60))
    assert [sum(row) for row in split] == [len(node) for node in nodes]
    assert np.array(split).shape == (4, 3)


def test_a_process_gets_the_nodes_it_holds() -> None:
    config = Options(nodes=4, batch_size=5, hold_out=0.0)
    everybody, some = deal(data_set(), config)[0], deal(data_set(), config, range(1, 3))[0]
    assert [node.pixels.tolist() for node in some] == [node.pixels.tolist() for node in everybody[1:3]]


def test_too_few_examples_are_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError, match=r"mnist-mini.*60.*4 nodes.*batch 20.*80"):
        deal(data_set(), Options(nodes=4, batch_size=20, hold_out=0.0))


def test_the_run_is_what_the_options_say(tmp_path) -> None:
    config = Options(**SMALL, topology="ring", algorithm="sgpdp", noise_multiplier=2.0, out=tmp_path / "run")
    run = Run.from_options(config)
    assert repr(run.topology) == "Ring(4)"
    assert run.algorithm.partition.local == []
    assert run.unit.noise_multiplier == 2.0
    assert not (tmp_path / "run").exists()  # nothing is written before it starts


def test_a_run_is_made_again_from_its_folder_and_only_there(tmp_path) -> None:
    config = Options(**SMALL, out=tmp_path / "run")
    Run.from_options(config).fit(1)
    again = Run.open(tmp_path / "run")
    assert again.resumed
    assert (
        again.description.fingerprint
        == Run.from_options(Options(**SMALL, out=tmp_path / "other")).description.fingerprint
    )
    with pytest.raises(UsageError, match="--overwrite"):
        Run.from_options(config)
    with pytest.raises(UsageError, match="nothing"):
        Run.open(tmp_path / "nothing")


class Third(Simulation):
    """As one of several processes, each of which has a folder of its own."""

    rank = 3

    def folder(self, out: Path) -> RunFolder:
        return RunFolder(out / "rank-3")


def test_a_process_finds_its_own_part_of_a_run(tmp_path) -> None:
    Run.from_options(Options(**SMALL, out=tmp_path / "run"), deployment=Third()).fit(1)
    assert Run.open(tmp_path / "run", deployment=Third()).folder.path == tmp_path / "run" / "rank-3"
    with pytest.raises(UsageError, match="dpps resume"):
        Run.open(tmp_path / "run")


# A data set is one registered recipe: `dpps train` and `dpps plan` take it as one that comes with the package


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
    assert run.algorithm.model(run.tests[0][:1]).shape == (1, 2)
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
