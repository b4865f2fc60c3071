"""Members learn a number or a time together: the contract carries the task, and each member predicts, evaluates and reports with it."""

import csv
import io
import json
import shlex
import statistics
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from dpps.cli import DONE, main
from dpps.data import read_schema
from dpps.peers import join
from tests.support.hospitals import CLINICS, write_clinics
from tests.support.processes import PATIENCE, context, free_port

TARGETS = {
    "regression": ("--label stay", "rmse", "prediction"),
    "survival": ("--time stay --event died", "c-index", "risk"),
}


def dpps(words: str) -> None:
    """One command, in the folder of the test."""
    assert main(shlex.split(words)) == DONE, words


def convened(task: str, members: int) -> None:
    """Tables, keys and a signed contract, in the current folder."""
    write_clinics(Path())
    dpps(f"data describe clinic-0/train.csv --task {task} {TARGETS[task][0]} --out schema.toml")
    sizes = ",".join(map(str, CLINICS[:members]))
    words = (
        f"train --nodes {members} --declared-sizes {sizes} --model linear --shared all --topology complete"
    )
    words += " --schema schema.toml --epsilon 8 --batch-size 1/2 --epochs 6 --print-config"
    Path("plan.toml").write_text(printed(words))
    for k in range(members):
        dpps(f"federation key --name clinic-{k} --listen 127.0.0.1:{free_port()} --out member-{k}")
    requests = " ".join(f"--member member-{k}/member.csr" for k in range(members))
    dpps(f"federation create plan.toml {requests} --soft-deadline 60 --hard-deadline 300 --out f")


def printed(words: str) -> str:
    """What a command prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        dpps(words)
    return out.getvalue()


def predicted(task: str, members: int) -> None:
    """What every member can do with its own folder afterwards."""
    _, headline, column = TARGETS[task]
    risks = []
    for k in range(members):
        run = Path(f"run-{k}")
        summary = json.loads((run / "summary.json").read_text())
        assert summary["task"] == task
        assert summary["privacy"]["epsilon"] <= 8
        own = summary["scores"]["own"][headline]["pooled"]
        assert own["examples"] == 60  # its own test file
        dpps(f"predict {run} --input clinic-0/test.csv --output predicted-{k}.csv")
        rows = list(csv.DictReader(Path(f"predicted-{k}.csv").read_text().splitlines()))
        risks.append([float(row[column]) for row in rows])
        measured = json.loads(printed(f"evaluate {run} --input clinic-{k}/test.csv --json"))
        assert measured["nodes"][str(k)][headline] == pytest.approx(own["value"], abs=1e-6)
        dpps(f"report {run}")
        assert headline in (run / "report.html").read_text().lower()
    for other in risks[1:]:
        assert other == pytest.approx(risks[0], rel=1e-3, abs=1e-3)  # all of the model is shared
    assert len(set(risks[0])) > 1


def test_members_learn_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three members in threads of this process, by gRPC."""
    monkeypatch.chdir(tmp_path)
    convened("regression", 3)
    errors: list[BaseException] = []

    def member(k: int) -> None:
        try:
            join("f/federation.toml", f"member-{k}", f"run-{k}", node_data=f"clinic-{k}")
        except BaseException as error:  # noqa: BLE001 - for the test
            errors.append(error)

    threads = [threading.Thread(target=member, args=(k,), daemon=True) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert errors == []
    predicted("regression", 3)
    rows = csv.DictReader(Path("clinic-0/test.csv").read_text().splitlines(), delimiter=";")
    constant = statistics.pstdev(float(row["stay"].replace(",", ".")) for row in rows)
    own = json.loads(Path("run-0/summary.json").read_text())["scores"]["own"]["rmse"]["pooled"]["value"]
    assert own < 0.9 * constant
    assert read_schema("run-0/schema.toml").task == read_schema("schema.toml").task


def _joins(k: int) -> None:
    words = f"--member member-{k} --node-data clinic-{k} --out run-{k} --quiet"
    sys.exit(main(shlex.split(f"federation join f/federation.toml {words}")))


def test_members_learn_a_time_by_commands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members, each in a process of its own."""
    monkeypatch.chdir(tmp_path)
    convened("survival", 2)
    processes = [context.Process(target=_joins, args=(k,)) for k in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [DONE] * 2
    predicted("survival", 2)
