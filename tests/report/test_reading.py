"""What is read of a run: whole, unfinished, distributed, damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpps import report
from dpps.errors import RunError, UsageError
from dpps.privacy import LedgerFile, Release
from dpps.report import Accuracy, RunRecord, by_round, read_folder, render


def spent(record: RunRecord) -> list[tuple[int, float]]:
    return by_round(record.unit, record.charges, record.privacy.epsilon)


def charge_again(ledger: Path, count: int) -> None:
    """Charge the first messages once more, as a run does that repeats rounds after a crash."""
    header = LedgerFile.read_header(ledger)
    lines = [json.loads(line) for line in ledger.read_text().splitlines()[1 : 1 + count]]
    with LedgerFile.open(ledger, header, durable=True) as opened:
        for line in lines:
            opened.charge(Release.from_json(line, opened.rows))


def test_rounds_charged_twice_count_twice(copied: Callable[[str], Path]) -> None:
    folder = copied("node-swap")
    (folder / "summary.json").unlink()
    before = read_folder(folder, "run")
    charge_again(folder / "ledger.jsonl", 1)
    after = read_folder(folder, "run")
    assert spent(after)[0][1] == pytest.approx(2 * spent(before)[0][1])
    assert after.privacy.epsilon == pytest.approx(spent(after)[-1][1])


def test_distributed_run(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Rank 0 writes the summary of all; every process has records of its own, and one has paid more."""
    out = tmp_path / "out"
    for rank in (10, 9):
        shutil.copytree(copied("node-swap"), out / f"rank-{rank}")
        shutil.rmtree(tmp_path / "node-swap")
    charge_again(out / "rank-10" / "ledger.jsonl", 2)
    summary = json.loads((out / "rank-9" / "summary.json").read_text())
    summary |= {
        "test_accuracy": None,
        "accuracy_by_epoch": [],
        "accuracy_by_node": [],
        "bytes_sent_by_rank": [1] * 3,
    }
    (out / "summary.json").write_text(json.dumps(summary))
    record = read_folder(out, "run")
    assert record.part == "rank-9"
    assert record.private_noise
    assert not record.simulated
    assert spent(record)[0][1] == pytest.approx(2 * record.rounds[0].epsilon)
    assert record.command is not None
    assert record.command.startswith("torchrun --nproc-per-node 3 -m dpps train --out again --nodes 5")
    page = render([record])
    assert "rank-9" in page
    assert "not private" not in page.split('id="privacy"')[0]
    (out / "summary.json").unlink()  # as on the machine of another rank
    assert read_folder(out, "run").accuracy == read_folder(out / "rank-9", "run").accuracy != Accuracy()


def test_unfinished_run_is_shown_as_such(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("node-swap")
    finished = read_folder(folder, "run")
    (folder / "summary.json").unlink()
    lines = (folder / "rounds.csv").read_text().splitlines()
    cut = "4,0.1,0.2,0.2,0.1,5000.0,1.5"  # killed while writing
    (folder / "rounds.csv").write_text("\n".join(lines[:5]) + f"\n{cut}")
    record = read_folder(folder, "run")
    assert len(record.rounds) == 4
    # the ledger has all that was sent
    assert record.privacy.epsilon == pytest.approx(finished.privacy.epsilon)
    page = report.write([folder], tmp_path / "page.html").read_text()
    assert "unfinished" in page


def test_unfinished_run_takes_accuracy_from_its_checkpoint(copied: Callable[[str], Path]) -> None:
    folder = copied("node-swap")
    (folder / "summary.json").unlink()
    kept = folder / "checkpoint" / "round-000000004"
    kept.mkdir(parents=True)
    rounds = [[0, 1.0, 2.0, 2.0, 0.1, 5.0, 1.5, 100, {"paper": 3.0}]]
    (kept / "meta.json").write_text(
        json.dumps({"accuracy_by_epoch": [12.5], "seconds": {}, "rounds": rounds})
    )
    record = read_folder(folder, "run")
    assert record.accuracy.latest == 12.5
    assert record.rounds[0].watched == {"paper": 3.0}


def test_what_is_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing .*run\.json"):
        report.write([tmp_path / "nothing"], tmp_path / "page.html")
    with pytest.raises(UsageError, match="--out"):
        report.write([], tmp_path / "page.html")
    folder = copied("none")
    with pytest.raises(UsageError, match="same run"):
        report.write([folder, folder], tmp_path / "page.html")
    with pytest.raises(RunError, match=r"no/such/page\.html"):
        report.write([folder], tmp_path / "no" / "such" / "page.html")
    (folder / "rounds.csv").write_text("round,real,estimated,used,scale,epsilon,loss\n")
    with pytest.raises(UsageError, match=r"none/rounds\.csv"):
        report.write([folder], tmp_path / "page.html")
    (folder / "rounds.csv").unlink()
    with pytest.raises(UsageError, match=r"none/rounds\.csv .*No such file"):
        report.write([folder], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("summary.json", '{"a":', "summary.json .*line 1"),
        ("summary.json", "[]", "summary.json"),
        (
            "rounds.csv",
            "round,real,estimated,used,scale,epsilon,loss\n0,,x,,,,\n1,,,,0,0,1\n",
            "rounds.csv .*line 2",
        ),
        ("ledger.jsonl", "{}\n{}\n", "ledger.jsonl"),
    ],
)
def test_damaged_files(
    copied: Callable[[str], Path], tmp_path: Path, file: str, text: str, message: str
) -> None:
    folder = copied("node-swap")
    (folder / file).write_text(text)
    with pytest.raises(RunError, match=message):
        report.write([folder], tmp_path / "page.html")


def test_options_of_another_version(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("none")
    summary = json.loads((folder / "summary.json").read_text())
    summary["config"]["warp"] = 9
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UsageError, match="option warp"):
        report.write([folder], tmp_path / "page.html")


def test_baselines_have_the_names_of_the_summary(copied: Callable[[str], Path]) -> None:
    folder = copied("record")
    summary = json.loads((folder / "summary.json").read_text())
    summary["baselines"] = {
        "no privacy": {"test_accuracy": 91.5, "accuracy_by_epoch": [85.0, 91.5]},
        "alone": {"test_accuracy": 70.0, "accuracy_by_node": [60.0, 65.0, 70.0, 75.0, 80.0]},
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    record = read_folder(folder, "run")
    assert record.baselines["no privacy"] == Accuracy(91.5, [85.0, 91.5])
    assert record.baselines["alone"].by_node[-1] == 80.0
    assert read_folder(folder, "run").labels == summary["split"]
