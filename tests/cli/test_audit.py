"""`dpps audit`: its table, its exit code, and what it refuses."""

import json
import logging
from dataclasses import replace

import pytest

from dpps.audit import Bound, Case, Finding, absence_cases, coalition_cases
from dpps.audit.cases import cases
from dpps.cli import main
from dpps.cli import privacy as command
from dpps.sensitivity import Bounded


def _name(value: object) -> str:
    return f"{value.name}-{value.kind}" if isinstance(value, Case) else str(value)


def test_command_prints_a_table_and_judges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--unit", "contribution", "--samples", "5000", "--epsilon", "5000"]) == 0
    text = capsys.readouterr().out
    assert text.count("holds") == 10  # two mechanisms, two partner graphs, and absences, seeded and secure
    assert text.count("caught") >= 4
    assert "5000" in text


def test_command_for_programs_and_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = [replace(c, leak_trials=300) if c.leaks else c for c in cases()]
    monkeypatch.setattr(command, "cases", lambda: quick)
    assert main(["audit", "--sensitivity", "paper", "--json", "--no-secure-noise"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["verdict"].startswith("leaks")
    assert finding["epsilon_lower"] > 3
    monkeypatch.setattr(Bounded, "admit", lambda self, eps, norms, rate: (eps, norms))
    assert main(["audit", "--unit", "contribution", "--samples", "2000", "--no-secure-noise", "--json"]) == 1
    assert "VIOLATED" in capsys.readouterr().out


def test_thorough_runs_every_claim_more_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Case, int]] = []

    def counted(case: Case, *, trials: int, **_: object) -> Finding:
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
        assert {_name(case) for case, _ in asked} == {
            *map(_name, (*cases(), *coalition_cases(), *absence_cases()))
        }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--samples", "10"], "1000 or more"),
        (["--plot", "x.png"], "--attack"),
        (["--thorough", "--samples", "5000"], "--thorough"),
        (["--unit", "record", "--sensitivity", "paper"], "--sensitivity"),
        (["--epsilon", "0"], "above 0"),
    ],
)
def test_command_refuses(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *options]) == 2
    assert said in capsys.readouterr().err


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
def test_nothing_is_computed_for_a_request_that_is_wrong(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not for one that would be ignored in part."""
    monkeypatch.setattr("dpps.audit.inversion.invert", None)
    monkeypatch.setattr(command, "audit_case", None)
    assert main(["audit", *options]) == 2
    assert named in capsys.readouterr().err


def test_too_few_runs_are_said_with_the_number_that_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    """A twin that so few runs cannot catch says nothing about the code; so many more would have caught it."""
    options = ["audit", "--unit", "contribution", "--no-secure-noise", "--json", "--samples"]
    assert main([*options, "1000"]) == 1
    missed = [f for f in json.loads(capsys.readouterr().out)["findings"] if not f["twin_caught"]]
    assert missed
    assert all(f["samples_needed"] > 1000 for f in missed)
    assert main([*options, str(max(f["samples_needed"] for f in missed) * 2)]) == 0
    assert {f["samples_needed"] for f in json.loads(capsys.readouterr().out)["findings"]} == {None}
    assert main([*(o for o in options if o != "--json"), "1000"]) == 1
    assert f"--samples {max(f['samples_needed'] for f in missed)}" in capsys.readouterr().out
