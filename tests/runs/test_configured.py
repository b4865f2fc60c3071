"""From options to a run: what is dealt to whom, and what is refused before data is read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dpps.data import DataSet, Images
from dpps.errors import UsageError
from dpps.runs import Options, Run, RunFolder, Simulation, deal

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

    def folder(self, out: Path) -> RunFolder:
        return RunFolder(out / "rank-3")


def test_a_process_finds_its_own_part_of_a_run(tmp_path) -> None:
    Run.from_options(Options(**SMALL, out=tmp_path / "run"), deployment=Third()).fit(1)
    assert Run.open(tmp_path / "run", deployment=Third()).folder.path == tmp_path / "run" / "rank-3"
    with pytest.raises(UsageError, match="--resume"):
        Run.open(tmp_path / "run")
