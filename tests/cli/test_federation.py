import stat
from pathlib import Path

import pytest

from dpps.cli import DONE, FAILED, WRONG, main
from dpps.peers import Federation
from dpps.runs import Options


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, where in (
        ("a", ["--listen", "127.0.0.1:7441"]),
        ("b", ["--listen", "127.0.0.1:7442"]),
        ("c", []),
    ):
        assert main(["member", "init", "--name", name, *where, "--out", name]) == DONE
    Path("plan.toml").write_text(Options(nodes=3, declared_sizes="200", topology="ring").to_toml())
    return tmp_path


CREATE = ["federation", "create", "plan.toml", "--member", "a/member.csr", "--member", "b/member.csr"]


def test_create_show_expel_renew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CREATE, "--member", "c/member.csr", "--out", "f", "--min-members", "2"]) == DONE
    said = capsys.readouterr().out
    first = Federation.read(Path("f/federation.toml"))
    for member in first.members:
        assert " ".join(member.fingerprint[k : k + 4] for k in range(0, 64, 4)) in said
    assert "epsilon 3, delta 1e-05" in said
    assert stat.S_IMODE(Path("f/convener.key").stat().st_mode) == 0o600
    assert main(["federation", "expel", "f/federation.toml", "c"]) == DONE
    assert main(["federation", "renew", "f/federation.toml", "--days", "30"]) == DONE
    capsys.readouterr()
    assert main(["federation", "show", "f/federation.toml"]) == DONE
    assert "epoch 3" in (said := capsys.readouterr().out)
    assert "expelled" in said
    first.check_next(Federation.read(Path("f/federation.toml")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["federation", "expel", "f/federation.toml", "x"], "'x'"),
        ([*CREATE, "--member", "c/member.csr", "--out", "f"], "--out f"),
        ([*CREATE, "--out", "g"], "nodes = 3"),
        ([*CREATE, "--member", "nothing.csr", "--out", "g"], "nothing.csr"),
        ([*CREATE, "--member", "plan.toml", "--out", "g"], "plan.toml"),
        ([*CREATE, "--member", "c/member.csr", "--out", "g", "--days", "0"], "--days is 0"),
        (["federation", "dissolve"], "'dissolve'"),
        (["member", "init", "--name", "A", "--out", "x"], "--name is 'A'"),
        (["member", "remove"], "'remove'"),
        (["status", "f"], "dpps join"),
        (["leave", "f"], "dpps join"),
        (["join", "f/federation.toml", "--member", "f", "--out", "run"], "member.key"),
        (["join", "f/federation.toml", "--member", "a", "--out", "run", "--page", "0.0.0.0:80"], "0.0.0.0"),
        (
            ["join", "f/federation.toml", "--member", "a", "--out", "run", "--node-data", "x"],
            "--node-data",
        ),
    ],
)
def test_mistakes_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main([*CREATE, "--member", "c/member.csr", "--out", "f"]) == DONE
    capsys.readouterr()
    assert main(arguments) == WRONG
    said = capsys.readouterr().err
    assert words in said
    assert said.splitlines()[-1].startswith("dpps: ")
    assert "Traceback" not in said


def test_a_folder_that_cannot_be_made_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CREATE, "--member", "c/member.csr", "--out", "plan.toml/f"]) == FAILED
    assert "plan.toml/f" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    assert main([*CREATE, "--member", "c/member.csr", "--out", "f"]) == DONE
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert main(["join", "f/federation.toml", "--member", "a", "--out", "run"]) == WRONG
    assert "pip install 'dpps[peers]'" in capsys.readouterr().err


def test_a_second_contract_with_the_key_of_the_first(folder: Path) -> None:
    create = [*CREATE, "--member", "c/member.csr"]
    assert main([*create, "--out", "f"]) == DONE
    assert main([*create, "--key", "f/convener.key", "--out", "g"]) == DONE
    first, second = (Federation.read(Path(name) / "federation.toml") for name in "fg")
    assert first.convener_fingerprint == second.convener_fingerprint
    assert first.id != second.id
    assert main(["federation", "expel", "g/federation.toml", "c"]) == DONE
    assert stat.S_IMODE(Path("g/convener.key").stat().st_mode) == 0o600
    assert main([*create, "--key", "nothing.key", "--out", "h"]) == WRONG
    assert not Path("h").exists()
    assert main([*create, "--key", "a/member.key", "--out", "g"]) == WRONG, "it holds a federation"
