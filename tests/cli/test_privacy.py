"""dpps audit, attack and ledger."""

import json
import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest

from dpps.audit import Bound, Case, Finding, cases, leaks, pair_cases
from dpps.cli import FAILED, WRONG, main
from dpps.cli import privacy as command
from dpps.runs import STATE
from dpps.sensitivity import Bounded

# `dpps audit`: its table, its exit code, and what it refuses


def _name(value):
    return f"{value.name}-{value.kind}" if isinstance(value, Case) else str(value)


def few(monkeypatch):
    """One claim of the unit contribution of each kind; tests/audit has them all."""
    found = [
        next(c for c in each() if c.name == "contribution" and not c.leaks) for each in (cases, pair_cases)
    ]
    for name, case in zip(("cases", "pair_cases"), found, strict=True):
        monkeypatch.setattr(command, name, lambda case=case: (case,))
    return found


def test_command_prints_a_table_and_judges(capsys, monkeypatch):
    chosen = few(monkeypatch)
    assert main(["audit", "--unit", "contribution", "--samples", "5000", "--epsilon", "5000"]) == 0
    text = capsys.readouterr().out
    noises = sum(1 if case.secure_only else 2 for case in chosen)
    assert text.count("holds") == noises
    assert text.count("caught") >= noises
    assert "5000" in text


def test_command_for_programs_and_exit_code(capsys, monkeypatch):
    quick = [few(monkeypatch)[0], *(replace(c, leak_trials=300) for c in cases() if c.leaks)]
    monkeypatch.setattr(command, "cases", lambda: quick)
    assert main(["audit", "--sensitivity", "paper", "--json", "--no-secure-noise"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["verdict"].startswith("leaks")
    assert finding["epsilon_lower"] > 3
    monkeypatch.setattr(Bounded, "admit", lambda self, eps, norms, rate: (eps, norms))
    assert main(["audit", "--unit", "contribution", "--samples", "2000", "--no-secure-noise", "--json"]) == 1
    assert "VIOLATED" in capsys.readouterr().out


def test_thorough_runs_every_claim_more_often(capsys, monkeypatch):
    asked = []

    def counted(case, *, trials, **_):
        asked.append((case, trials))
        logging.getLogger("dpps.learning").warning("advice for a run of the user's")
        bound = Bound(0.5, 1, 1, trials)
        twin = None if case.leaks else Bound(2.0, 1, 1, trials)
        return Finding(case, "secure", Bound(2.0, 1, 1, trials) if case.leaks else bound, twin)

    monkeypatch.setattr(command, "audit_case", counted)
    for options, trials in (([], 10_000), (["--thorough"], 100_000)):
        asked.clear()
        assert main(["audit", *options]) == 0
        told = capsys.readouterr().err
        assert f"{len(asked)} audits" in told
        assert "advice" not in told
        assert {each for _, each in asked} == {trials}
        assert {_name(case) for case, _ in asked} == {*map(_name, (*cases(), *pair_cases()))}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--samples", "0"], "--samples is 0"),
        (["--samples", "-5"], "--samples is -5"),
        (["--attack", "--unit", "record"], "--unit"),
        (["--attack", "--samples", "2000"], "--samples"),
        (["--attack", "--thorough"], "--thorough"),
        (["--attack", "--sensitivity", "paper"], "--sensitivity"),
        (["--attack", "--no-secure-noise"], "--secure-noise"),
        (["--attack", "--epsilon", "3"], "--epsilon"),
        (["--attack", "--plot", "images.txt"], "images.txt"),
        (["--attack", "--plot", "nowhere/images.png"], "nowhere"),
    ],
)
def test_nothing_is_computed_for_a_request_that_is_wrong(options, named, capsys, monkeypatch):
    """Also not for one that would be ignored in part."""
    monkeypatch.setattr(command, "invert", None)
    monkeypatch.setattr(command, "audit_case", None)
    assert main(["audit", *options]) == 2
    assert named in capsys.readouterr().err


def test_too_few_runs_are_said_with_the_number_that_would_do(capsys, monkeypatch):
    """A twin that so few runs cannot catch says nothing about the code; so many more would have caught it."""
    few(monkeypatch)
    options = ["audit", "--unit", "contribution", "--no-secure-noise", "--json", "--samples"]
    assert main([*options, "1000"]) == 1
    missed = [f for f in json.loads(capsys.readouterr().out)["findings"] if not f["twin_caught"]]
    assert missed
    assert all(f["samples_needed"] > 1000 for f in missed)
    assert main([*options, str(max(f["samples_needed"] for f in missed) * 2)]) == 0
    assert {f["samples_needed"] for f in json.loads(capsys.readouterr().out)["findings"]} == {None}
    assert main([*(o for o in options if o != "--json"), "1000"]) == 1
    assert f"--samples {max(f['samples_needed'] for f in missed)}" in capsys.readouterr().out


# `dpps attack` as a user meets it


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    monkeypatch.setattr(leaks, "_REPEATS", {False: 3, True: 1})


def test_it_says_who_is_recovered_and_how_well(capsys):
    assert main(["attack", "--nodes", "6", "--rounds", "3", "--epsilon", "3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(nodes in said for nodes in (" 1, 5 ", " 1, 2, 3, 4, 5 ", " 2, 3, 4 "))
    assert "independent 3" in said
    assert "cancelling 3" in said


def test_for_programs_with_images_and_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "attack.svg"
    options = [
        "--images",
        "--topology",
        "exp",
        "--nodes",
        "4",
        "--epsilon",
        "2",
        "--plot",
        str(file),
        "--json",
    ]
    assert main(["attack", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recovered"] == [3]
    assert found["hidden"] == [1, 2]
    assert [o["noise"] for o in found["outcomes"]] == ["none", "independent", "cancelling"]
    assert found["outcomes"][0]["epsilon"] is None
    assert found["outcomes"][0]["identified"] == 1
    assert file.stat().st_size > 10_000


# `dpps ledger`: what two runs of the same data have spent


def _train(folder, out, *more):
    words = f"--nodes 2 --topology exp --model linear --shared all --classes 2 --batch-size 10 --epochs 1 --seed 3 --out {folder / out}"
    noise = ["--unit", "contribution", "--epsilon", "20"]
    return main(
        ["train", *words.split(), "--node-data", str(folder / "node-{rank}"), *noise, "--quiet", *more]
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(STATE, str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "400")  # cells of the table in one line each
    random = np.random.default_rng(0)
    for node in range(2):
        (tmp_path / f"node-{node}").mkdir()
        x = random.normal(size=(20, 3))
        np.savez(tmp_path / f"node-{node}" / "train.npz", x=x.astype(np.float32), y=(x[:, 0] > 0).astype(int))
    return tmp_path


def _told(folder, capsys):
    capsys.readouterr()
    assert main(["ledger", str(folder / "node-1"), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_runs_of_the_same_data_add_up(folder, capsys):
    assert _train(folder, "simulated") == 0
    assert main(["ledger", str(folder / "node-1")]) == 0
    assert "epsilon" not in capsys.readouterr().out.splitlines()[-1], "a simulation sends nothing"
    assert _train(folder, "one", "--secure-noise") == 0
    assert _train(folder, "two", "--secure-noise") == 0
    found = _told(folder, capsys)
    each = [run["epsilon"] for run in found["runs"]]
    assert [run["messages"] for run in found["runs"]] == [2, 2]
    assert len(each) == 2
    assert max(each) < found["epsilon"]["contribution"] <= sum(each) * (1 + 1e-9)
    assert main(["ledger", str(folder / "node-1")]) == 0
    assert "contribution: epsilon" in capsys.readouterr().out.splitlines()[-1]
    assert main(["ledger", str(folder / "absent")]) == 2
    assert main(["ledger", str(folder), "--delta", "2"]) == 2


def test_a_run_that_is_replaced_still_counts(folder, capsys):
    assert _train(folder, "run", "--secure-noise", "--batch-size", "5") == 0
    assert _train(folder, "run", "--secure-noise", "--overwrite") == 0
    assert [run["messages"] for run in _told(folder, capsys)["runs"]] == [4, 2]
    shutil.rmtree(folder / "run")
    assert _train(folder, "run", "--secure-noise") == 0
    found = _told(folder, capsys)
    assert [(run["messages"], run["promised"]) for run in found["runs"]] == [(None, 20), (None, 20), (2, 20)]
    assert main(["ledger", str(folder / "node-1"), "--delta", "1e-5"]) == 0
    out = capsys.readouterr().out
    assert out.count("20 at delta 1e-05") == 2
    assert "--delta" in out.splitlines()[-1]
    assert main(["ledger", str(folder / "node-1"), "--delta", "1e-4"]) == 0
    assert "contribution: epsilon" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("how", ["older", "damaged", "without a witness"])
def test_of_a_ledger_that_is_not_whole_the_promise_counts(folder, capsys, how):
    assert _train(folder, "run", "--secure-noise") == 0
    ledger = folder / "run" / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    if how == "without a witness":
        ledger.with_name("ledger.jsonl.witness").unlink()
    else:
        ledger.write_bytes(b"".join(lines[:2] if how == "older" else [lines[0], lines[2]]))
    found = _told(folder, capsys)
    assert [(run["messages"], run["epsilon"]) for run in found["runs"]] == [(None, 20)]


def test_no_run_stays_without_a_note(folder, monkeypatch, capsys):
    (folder / "file").touch()
    monkeypatch.setenv(STATE, str(folder / "file" / "state"))
    assert _train(folder, "run", "--secure-noise") == FAILED
    assert "$DPPS_STATE" in capsys.readouterr().err
    monkeypatch.setenv(STATE, str(folder / "state"))
    assert _train(folder, "run", "--secure-noise") == 0, "the same command starts afresh"
    assert len(_told(folder, capsys)["runs"]) == 1
    notes = folder / "state" / "data-ledgers.jsonl"
    notes.unlink()
    for _ in range(2):
        assert _train(folder, "run", "--secure-noise", "--resume") == WRONG, "it is finished"
        assert [run["messages"] for run in _told(folder, capsys)["runs"]] == [2], (
            "noted when it is opened again"
        )
        assert notes.read_text().count("\n") == 2, "once for each of two nodes"
