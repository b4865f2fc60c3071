"""A run's folder and its checkpoints."""

import errno
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.errors import RunError, UsageError
from dpps.noise import gaussian
from dpps.privacy import LedgerFile, Release
from dpps.runs import (
    RunFolder,
    describe,
    fingerprint,
    load_checkpoint,
    model_facts,
    model_name,
    save_checkpoint,
    set_aside_after,
    whole_rounds,
)

# A run's folder: what it refuses, what it deletes, and what it never does


def test_a_folder_with_a_run_is_refused_and_files_of_others_are_not_ours(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    (folder.path / "notes.txt").write_text("mine")
    folder.check_new()
    folder.sign({})
    folder.write_summary({"rounds": 3})
    with pytest.raises(UsageError, match=r"summary\.json, run\.json.*--resume.*--overwrite.*Run\.open"):
        folder.check_new()
    folder.check_new(overwrite=True)
    folder.claim(overwrite=True)
    assert (folder.path / "notes.txt").read_text() == "mine"
    assert not folder.summary.exists()


def test_what_no_run_wrote_is_not_overwritten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.models.mkdir()
    (folder.models / "thesis.bin").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"--out.*models.*run\.json"):
            folder.check_new(overwrite)
    folder.sign({})
    (folder.models / model_name(0)).touch()
    folder.check_new(overwrite=True)
    folder.claim(overwrite=True)
    assert [path.name for path in folder.models.iterdir()] == ["thesis.bin"]


def test_another_run_is_refused_by_the_option_that_differs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(UsageError, match=r"--resume.*Run\.open"):
        folder.check_same("abc", {})
    folder.sign({"fingerprint": "abc", "config": {"seed": 1, "out": "x"}})
    folder.check_same("abc", {"seed": 1})
    with pytest.raises(UsageError, match=r"\(seed\)"):
        folder.check_same("abd", {"seed": 2, "out": "y"})
    for text in ("{}", "[]"):  # not what a run writes
        folder.settings.write_text(text)
        with pytest.raises(UsageError, match=r"model.*topology.*--schema"):
            folder.check_same("abc", {})


def test_a_ledger_of_messages_that_left_is_moved_and_one_of_a_simulation_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for durable, kept in ((True, 1), (False, 1)):
        _ledger(folder.ledger, durable)
        folder.claim(overwrite=True)
        assert not folder.ledger.exists()
        assert len(list(tmp_path.glob("ledger-until-*.jsonl"))) == kept


def test_models_are_found_by_node_and_a_broken_file_is_named(tmp_path: Path) -> None:
    for place, node in (("rank-0/models", 0), ("rank-1/models", 1)):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / model_name(node)).touch()
    (tmp_path / model_name("of-mine")).touch()
    assert list(RunFolder(tmp_path).model_files()) == [0, 1]
    RunFolder(tmp_path).summary.write_text("{")
    with pytest.raises(RunError, match=r"summary\.json"):
        RunFolder(tmp_path).read_summary()
    with pytest.raises(UsageError, match=r"--out .*summary\.json"):
        RunFolder(tmp_path / "summary.json").check_new()


def _ledger(path: Path, durable: bool, **more: object) -> None:
    with LedgerFile.create(path, {"rows": [0], "durable": durable, **more}, durable) as ledger:
        ledger.charge(Release(0, gaussian(1.0), "gaussian", 1.0, 1.0))


@pytest.mark.parametrize("durable", [True, False])
def test_whether_messages_left_is_read_from_the_ledgers_own_field(tmp_path: Path, durable: bool) -> None:
    """Another field of its first line that happens to be called the same decides nothing."""
    folder = RunFolder(tmp_path)
    _ledger(folder.ledger, durable, contract={"durable": not durable})
    folder.claim(overwrite=True)
    assert not folder.ledger.exists()
    assert len(list(tmp_path.glob("ledger-until-*.jsonl"))) == durable


def test_a_ledger_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    _ledger(folder.ledger, True)
    damaged = folder.ledger.read_bytes().replace(b'"durable":true', b'"durable":trve')
    folder.ledger.write_bytes(damaged)
    folder.claim(overwrite=True)
    (kept,) = tmp_path.glob("ledger-until-*.jsonl")
    assert kept.read_bytes() == damaged


# Checkpoints: the last two are kept, a damaged one is passed over, and a full disk costs none


def _save(folder: Path, *rounds: int) -> None:
    for round_ in rounds:
        save_checkpoint(folder, round_, {"s": torch.full((2,), float(round_))}, {"note": round_})


def test_the_last_two_are_kept_and_the_newest_is_read(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    _save(tmp_path, 5, 10, 15)
    assert whole_rounds(tmp_path) == [10, 15]
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert (found.round, found.meta, found.tensors["s"].tolist()) == (15, {"note": 15}, [15.0, 15.0])
    older = load_checkpoint(tmp_path, at=10)
    assert older is not None
    assert older.round == 10


def test_it_is_on_disk_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr("os.fsync", lambda f: (calls.append("fsync"), sync(f))[1])
    monkeypatch.setattr(Path, "rename", lambda self, to: (calls.append("rename"), rename(self, to))[1])
    _save(tmp_path, 5)
    assert calls == [*["fsync"] * 3, "rename", "fsync"], "two files, their folder; the one above"


def test_a_damaged_one_is_passed_over_and_only_damaged_ones_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path, 5, 10)
    tensors = tmp_path / "round-000000010" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.round == 5
    assert "checksum" in caplog.text
    (tmp_path / "round-000000005" / "meta.json").unlink()
    with pytest.raises(RunError, match="--overwrite"):
        load_checkpoint(tmp_path)


def test_a_copy_that_somebody_made_beside_them_is_left_alone(tmp_path: Path) -> None:
    _save(tmp_path, 5, 10)
    shutil.copytree(tmp_path / "round-000000010", tmp_path / "round-000000010.before")
    shutil.copytree(tmp_path / "round-000000010", tmp_path / "aside-round-of-mine")
    assert whole_rounds(tmp_path) == [5, 10]
    _save(tmp_path, 15, 20)
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found.round == 20
    set_aside_after(tmp_path, 15)
    assert (tmp_path / "round-000000010.before").is_dir()
    assert (tmp_path / "aside-round-of-mine").is_dir()


@pytest.mark.parametrize("text", ["null", "[]", "{}", "{"])
def test_what_is_no_description_of_a_checkpoint_is_a_damaged_one(tmp_path: Path, text: str) -> None:
    _save(tmp_path, 5, 10)
    (tmp_path / "round-000000010" / "meta.json").write_text(text)
    assert whole_rounds(tmp_path) == [5]


def test_a_full_disk_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path, 5)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dpps.runs.folder.write_synced", full)
    with pytest.raises(RunError, match=r"round 10 .*No space.*round-000000005"):
        _save(tmp_path, 10)
    assert whole_rounds(tmp_path) == [5]


def test_later_ones_are_renamed_and_not_deleted(tmp_path: Path) -> None:
    _save(tmp_path, 5, 10)
    set_aside_after(tmp_path, 5)
    assert whole_rounds(tmp_path) == [5]
    assert (tmp_path / "aside-round-000000010").is_dir()


# What tells one run from another


def _algorithm(seed: int = 0, width: int = 3) -> dpps.PartPSP:
    torch.manual_seed(seed)
    return dpps.PartPSP(nn.Linear(4, width), batch_size=5)


def test_what_changes_a_result_changes_the_fingerprint_and_start_weights_do_not() -> None:
    unit, options = dpps.Record(epsilon=3), {"seed": 1}
    one = describe(_algorithm(), dpps.Ring(3), unit, options)
    assert one.fingerprint == describe(_algorithm(seed=1), dpps.Ring(3), unit, options).fingerprint
    others = [
        describe(_algorithm(width=4), dpps.Ring(3), unit, options),
        describe(_algorithm(), dpps.Ring(4), unit, options),
        describe(_algorithm(), dpps.Ring(3), replace(unit, clip=2.0), options),
        describe(_algorithm(), dpps.Ring(3), None, options),
        describe(_algorithm(), dpps.Ring(3), unit, {"seed": 2}),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 6
    assert one.config["algorithm"] == "partpsp"
    assert one.config["batch-size"] == 5


def test_checksums_of_shape_and_start() -> None:
    first, second = model_facts(_algorithm().model), model_facts(_algorithm(seed=1).model)
    assert first["model"] == second["model"]
    assert first["start weights"] != second["start weights"]
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


class Weighted:
    """A loss of a user's own, without a name for the object."""

    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


class Own(dpps.Topology):
    """A topology of a user's own, without a name for the object."""

    def build(self, t: int) -> dpps.topology.Weights:
        return dpps.Ring(self.nodes).weights(0)


@pytest.mark.parametrize(
    "loss",
    [
        Weighted,
        lambda: dpps.ModelLoss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
        lambda: partial(Weighted()),
    ],
)
def test_where_objects_lie_in_memory_tells_no_two_runs_apart(loss) -> None:
    """Another process has them elsewhere: a run must be found again there, and must fit the others of torchrun."""
    losses, graphs = [loss(), loss()], [Own(3, 1), Own(3, 1)]
    assert str(losses[0]) != str(losses[1])
    assert str(graphs[0]) != str(graphs[1])
    made = [replace(_algorithm(), loss=each) for each in losses]
    one, other = (describe(a, g, dpps.Record(epsilon=3), {}) for a, g in zip(made, graphs, strict=True))
    assert (one.config, one.fingerprint) == (other.config, other.fingerprint)


def test_two_matrices_are_two_networks() -> None:
    even, other = np.full((3, 3), 1 / 3), np.full((3, 3), 0.25) + 0.25 * np.eye(3)
    one, two = (describe(_algorithm(), dpps.Static(matrix), None, {}) for matrix in (even, other))
    assert one.config == two.config
    assert one.fingerprint != two.fingerprint
