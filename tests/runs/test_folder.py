"""A run's folder: what it refuses, what it deletes, and what it never does."""

from pathlib import Path

import pytest

from dpps.errors import RunError, UsageError
from dpps.noise import gaussian
from dpps.privacy import LedgerFile, Release
from dpps.runs import RunFolder, model_name


def test_a_folder_with_a_run_is_refused_and_files_of_others_are_not_ours(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    (folder.path / "notes.txt").write_text("mine")
    folder.check_new()
    folder.sign({})
    folder.write_summary({"rounds": 3})
    with pytest.raises(
        UsageError,
        match=r"summary\.json, run\.json.*--resume.*--overwrite.*Run\.open",
    ):
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
