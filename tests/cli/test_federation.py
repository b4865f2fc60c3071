"""dpps federation: key, create, join, status, leave, expel, renew and show."""

import json
import logging
import os
import shutil
import socket
import stat
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from dpps.cli import DONE, FAILED, WRONG, Shown, federation, main
from dpps.cli.federation import _JsonLines, _print_done
from dpps.disk import close_alone, open_alone
from dpps.peers import FINISHED, LEAVE, STOPPED, Federation, Identity, Request, read_out, write_status
from dpps.peers.status import LEFT
from dpps.privacy import label
from dpps.runs import Options
from tests.support.peers import status
from tests.support.processes import free_port

# `dpps federation key`: a key that stays, a request that goes out, and a fingerprint to read out


def test_init_says_what_show_says_again(tmp_path, capsys):
    out = tmp_path / "me"
    options = ["--name", "hospital-b", "--listen", "127.0.0.1:7443", "--address", "b.example:443"]
    assert main(["federation", "key", *options, "--out", str(out)]) == DONE
    first = capsys.readouterr().out
    assert main(["federation", "show", str(out)]) == DONE
    assert capsys.readouterr().out == first
    assert read_out(Identity.open(out).fingerprint) in first
    assert " 127.0.0.1:7443" in first
    assert " b.example:443" in first
    assert Request.read(out / "member.csr").name == "hospital-b"
    assert stat.S_IMODE((out / "member.key").stat().st_mode) == 0o600


def test_a_member_that_listens_nowhere_dials_out(tmp_path, capsys):
    assert main(["federation", "key", "--name", "a", "--out", str(tmp_path / "a")]) == DONE
    said = capsys.readouterr().out
    assert "127.0.0.1" not in said


def test_a_second_key_in_the_same_folder_is_refused(tmp_path, capsys):
    command = ["federation", "key", "--name", "a", "--out", str(tmp_path / "a")]
    assert main(command) == DONE
    key = (tmp_path / "a" / "member.key").read_bytes()
    assert main(command) == WRONG
    assert "a" in capsys.readouterr().err
    assert (tmp_path / "a" / "member.key").read_bytes() == key


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "me"
    assert main(["federation", "key", "--name", "a", "--out", str(out)]) == WRONG
    assert f"--out {out} " in capsys.readouterr().err


# Its commands


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, where in (
        ("a", ["--listen", "127.0.0.1:7441"]),
        ("b", ["--listen", "127.0.0.1:7442"]),
        ("c", []),
    ):
        assert main(["federation", "key", "--name", name, *where, "--out", name]) == DONE
    Path("plan.toml").write_text(Options(nodes=3, declared_sizes="200", topology="ring").to_toml())
    return tmp_path


CREATE = ["federation", "create", "plan.toml", "--member", "a/member.csr", "--member", "b/member.csr"]


def test_create_show_expel_renew(folder, capsys):
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
    assert "revision 3" in (said := capsys.readouterr().out)
    assert "expelled" in said
    first.check_next(Federation.read(Path("f/federation.toml")))


def test_show_has_json_of_a_federation_and_of_a_member(folder, capsys):
    assert main([*CREATE, "--member", "c/member.csr", "--out", "f"]) == DONE
    assert main(["federation", "expel", "f/federation.toml", "c"]) == DONE
    capsys.readouterr()
    for path in ("f/federation.toml", "f"):
        assert main(["federation", "show", path, "--json"]) == DONE
        found = json.loads(capsys.readouterr().out)
        assert found["revision"] == 2
        assert found["plan"]["topology"] == "ring"
        assert [member["expelled"] for member in found["members"]] == [False, False, True]
        assert found["members"][0]["fingerprint"] == Identity.open(Path("a")).fingerprint
    assert main(["federation", "show", "a", "--json"]) == DONE
    own = json.loads(capsys.readouterr().out)
    assert own["member"] == "a"
    assert own["listen"] == own["address"] == "127.0.0.1:7441"
    assert own["fingerprint"] == found["members"][0]["fingerprint"]


MISTAKES = [
    ("federation show nowhere", "nowhere"),
    ("federation expel f/federation.toml x", "'x'"),
    ("CREATE --member c/member.csr --out f", "--out f"),
    ("CREATE --out g", "nodes = 3"),
    ("CREATE --member nothing.csr --out g", "--member nothing.csr"),
    ("CREATE --member nothing.csr --out g", "member.csr"),
    ("CREATE --member c --out g", "member.csr"),
    ("CREATE --member plan.toml --out g", "member.csr"),
    ("CREATE --member a/member.csr --out g", "name a:"),
    ("federation create plan.toml --out g", "--member"),
    ("federation create plan.toml --member a/member.csr --out g", "--member"),
    ("CREATE --member c/member.csr --key nothing.key --out g", "nothing.key"),
    ("CREATE --member c/member.csr --out g --days 0", "--days is 0"),
    ("federation create nothing.toml --member a/member.csr --member b/member.csr --out g", "--print-config"),
    ("federation create a/member.csr --member a/member.csr --member b/member.csr --out g", "--print-config"),
    ("federation expel nothing.toml a", "federation.toml"),
    ("federation renew f", "federation.toml"),
    ("federation status plan.toml", "dpps federation join"),
    ("federation status f", "dpps federation join"),
    ("federation leave f", "dpps federation join"),
    ("federation join nothing.toml --member a --out run", "federation.toml"),
    ("federation join f/federation.toml --member nothing --out run", "member.key"),
    ("federation join f/federation.toml --member f --out run", "member.key"),
    ("federation join f/federation.toml --member a --out plan.toml", "--out plan.toml"),
    ("federation join f/federation.toml --member a --out run --page 0.0.0.0:80", "0.0.0.0"),
    ("federation join f/federation.toml --member a --out run --node-data x", "--node-data"),
    ("federation dissolve", "'dissolve'"),
    ("federation key --name A --out x", "--name is 'A'"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_mistakes_are_one_line(folder, capsys, words, told):
    assert main([*CREATE, "--member", "c/member.csr", "--out", "f"]) == DONE
    one_line(capsys, words.replace("CREATE", " ".join(CREATE)).split(), told)


def one_line(capsys, arguments, words):
    """The request is refused in one line with these words, and no file or folder is made."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert main(arguments) == WRONG
    (said,) = capsys.readouterr().err.splitlines()
    assert words in said
    assert said.startswith("dpps: ")
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"shared": "layer9"}, "'layer9'"),
        ({"topology": "rign"}, "'ring'"),
        ({"epsilon": -1.0}, "epsilon is -1"),
        ({"sync_every": 3}, "--sync-every"),
        ({"declared_sizes": "200,300"}, "2 declared sizes for 3 nodes"),
    ],
    ids=str,
)
def test_a_plan_that_cannot_be_run_makes_no_contract(folder, capsys, wrong, words):
    options = {"nodes": 3, "declared_sizes": "200", "topology": "ring"}
    Path("plan.toml").write_text(Options(**options | wrong).to_toml())
    one_line(capsys, [*CREATE, "--member", "c/member.csr", "--out", "f"], words)


def test_members_that_do_not_listen_leave_no_key_behind(folder, capsys):
    assert main(["federation", "key", "--name", "d", "--out", "d"]) == DONE
    given = ["--member", "c/member.csr", "--member", "d/member.csr", "--out", "f"]
    one_line(capsys, [*CREATE[:5], *given], "--listen")


def test_options_of_the_plan_that_are_each_members_own_are_named(folder, caplog):
    plan = Options(nodes=3, declared_sizes="200", topology="ring", baselines=True, metrics="f1")
    Path("plan.toml").write_text(plan.to_toml())
    assert main([*CREATE, "--member", "c/member.csr", "--out", "f"]) == DONE
    (line,) = caplog.messages
    assert "baselines" in line
    assert "metrics" in line
    assert "declared-sizes" not in line


@pytest.fixture
def tables(folder):
    """The words of member a's `dpps federation join`, in a federation with a schema and a table of its own."""
    port = free_port()
    shutil.rmtree("a")
    assert main(["federation", "key", "--name", "a", "--listen", f"127.0.0.1:{port}", "--out", "a"]) == DONE
    Path("data").mkdir()
    ages = [20 + 7 * k % 30 for k in range(60)]
    rows = [f"{age},{'yes' if age > 35 else 'no'}" for age in ages]
    Path("data/train.csv").write_text("\n".join(["age,ill", *rows]) + "\n")
    assert main(["data", "describe", "data/train.csv", "--label", "ill", "--out", "schema.toml"]) == DONE
    options = Options(
        nodes=3,
        declared_sizes="60",
        batch_size=6,
        epochs=1,
        topology="ring",
        model="linear",
        shared="all",
        schema=Path("schema.toml"),
    )
    Path("plan.toml").write_text(options.to_toml())
    assert main([*CREATE, "--member", "c/member.csr", "--out", "f"]) == DONE
    return ["federation", "join", "f/federation.toml", "--member", "a"]


def test_a_refused_join_leaves_nothing_behind_and_trusts_nobody(tables, capsys):
    Path("other").mkdir()
    Path("other/train.csv").write_text("years,ill\n44,no\n")
    join = [*tables, "--out", "new/run", "--node-data"]
    for words, told in (
        ([*tables, "--out", "new/run"], "--node-data"),
        ([*join, "nothing"], "nothing"),
        ([*join, "plan.toml"], "plan.toml is a file"),
        ([*join, "other"], "'age'"),
        ([*join, "data", "--data-dir", "nothing"], "--data-dir"),
        ([*join, "data", "--metrics", "f9"], "'f9'"),
        ([*join, "data", "--device", "quantum"], "'quantum'"),
        ([*join, "data", "--convener", "12 34"], "--convener"),
    ):
        one_line(capsys, words, told)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(Path("a/listen").read_text().rpartition(":")[2])))
        taken.listen()
        one_line(capsys, [*join, "data"], Path("a/listen").read_text().strip())


def test_a_folder_in_use_or_of_another_member_is_refused(tables, capsys):
    join = [*tables, "--out", "run", "--node-data", "data"]
    Path("run/outbox").mkdir(parents=True)
    handle = open_alone(Path("run/outbox/lock"), os.O_CREAT)
    one_line(capsys, join, "status run")
    close_alone(handle)
    write_status(Path("run"), replace(status(), member="b"))
    one_line(capsys, join, "b in federation")


def test_a_folder_with_files_of_others_is_refused(tables, capsys):
    """Also one that holds a schema of the user's own, which must not be overwritten."""
    join = [*tables, "--out", "mine", "--node-data", "data"]
    Path("mine").mkdir()
    for name in ("notes.txt", "summary.json", "schema.toml"):
        file = Path("mine") / name
        file.write_text("mine")
        one_line(capsys, join, name)
        assert file.read_text() == "mine"
        file.unlink()


def test_a_member_whose_file_does_not_suit_the_contract_is_told_what_it_can_do(tables, capsys):
    """It can mend its file. The schema is not its to correct."""
    wrong = {"years,ill\n44,no\n": "'age'", "age,ill\n44,perhaps\n": "perhaps", "age,ill\nold,no\n": "'old'"}
    for text, words in wrong.items():
        Path("data/train.csv").write_text(text)
        join = [*tables, "--out", "run", "--node-data", "data"]
        one_line(capsys, join, words)
        assert main(join) == WRONG
        said = capsys.readouterr().err
        assert "convener" in said
        assert all(remedy not in said for remedy in ("correct the schema", "in the schema", "`missing`"))


def test_a_federation_folder_that_cannot_be_made_is_one_line(folder, capsys):
    for out in ("plan.toml", "plan.toml/f"):
        assert main([*CREATE, "--member", "c/member.csr", "--out", out]) == WRONG
        assert f"--out {out} " in capsys.readouterr().err


def test_a_missing_extra_is_named(folder, capsys, monkeypatch):
    import sys

    assert main([*CREATE, "--member", "c/member.csr", "--out", "f"]) == DONE
    monkeypatch.setitem(sys.modules, "grpc", None)
    assert main(["federation", "join", "f/federation.toml", "--member", "a", "--out", "run"]) == WRONG
    assert "pip install 'dpps[peers]'" in capsys.readouterr().err


def test_a_second_contract_with_the_key_of_the_first(folder):
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


# What `dpps federation join` shows: a line now and then without a terminal, JSON for operators, and the end in words


def participation(**facts):
    told = status()
    for name, value in facts.items():
        setattr(told, name, value)
    run = SimpleNamespace(
        plan=SimpleNamespace(count=20),
        unit=object(),
        summary=SimpleNamespace(
            test_accuracy=91.234,
            own_accuracy=None,
            accuracy_by_node=[91.234],
            scores=None,
            metrics_by_node={},
            config={},
        ),
    )
    return SimpleNamespace(
        status=told,
        run=run,
        out="run",
        tell_epsilon=lambda: None,
        channel=SimpleNamespace(traffic={"hospital-b": 1, "hospital-c": 2}),
    )


def plain():
    return Console(file=StringIO(), highlight=False, soft_wrap=True, width=200)


def test_without_a_terminal_there_is_a_line_for_every_tenth_of_the_rounds():
    console = plain()
    taking_part = participation()
    shown = Shown(console, quiet=False)
    with shown.bar:
        shown.begin(taking_part)
        for k in range(20):
            shown.after_round(taking_part.run, SimpleNamespace(round=k))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    for words in ("2 of 100", "4 of 8", "epsilon 1.24", "of 3", "123.5 MB"):
        assert words in lines[0]


def test_quiet_is_quiet():
    console = plain()
    shown = Shown(console, quiet=True)
    with shown.bar:
        shown.begin(participation())
        shown.after_round(participation().run, SimpleNamespace(round=1))
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(("state", "words"), [("finished", "91.23 %"), (LEFT, "17 of 100")])
def test_the_end_says_what_came_of_it_and_what_it_cost(state, words):
    console = plain()
    _print_done(console, participation(state=state))
    said = console.file.getvalue()
    assert words in said
    for shown in ("epsilon 1.24", "of 3, delta 1e-05", "record"):
        assert shown in said
    assert "123.5 MB to 2 neighbours" in said


def test_operators_get_one_json_object_a_line_with_what_the_event_is_about():
    record = logging.makeLogRecord(
        {
            "name": "dpps.cli.join",
            "levelname": "INFO",
            "msg": "round %d",
            "args": (3,),
            "event": "round",
            "round": 3,
        }
    )
    line = _JsonLines().format(record)
    found = json.loads(line)
    assert "\n" not in line
    assert {k: found[k] for k in ("level", "logger", "message", "event", "round")} == {
        "level": "info",
        "logger": "dpps.cli.join",
        "message": "round 3",
        "event": "round",
        "round": 3,
    }


def test_a_line_says_what_is_spent_by_then():
    """However long the accountant takes, and so however seldom it is asked otherwise."""
    console, taking_part = plain(), participation(epsilon=0.1, epsilon_round=0)

    def now():
        taking_part.status.epsilon, taking_part.status.epsilon_round = asked * 0.125, taking_part.status.round

    taking_part.tell_epsilon = now
    shown = Shown(console, quiet=False)
    with shown.bar:
        shown.begin(taking_part)
        for asked in range(20):
            taking_part.status.round = asked + 1
            shown.after_round(taking_part.run, SimpleNamespace(round=asked))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    for k, line in zip(range(1, 20, 2), lines, strict=True):
        assert f"{label(0.125 * k)} spent" in line


# `dpps federation status`: for people and for programs


def test_for_people(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write_status(tmp_path, status())
    assert main(["federation", "status", str(tmp_path)]) == DONE
    said = capsys.readouterr().out
    assert "hospital-a (this one)" in said
    assert "round 17 of 100" in said
    for shown in ("epsilon 1.24", "of 3, delta 1e-05", "record"):
        assert shown in said
    assert "refused <b>somebody</b>" in said
    assert "never" in said  # one of them was not heard of


def test_a_run_that_does_not_go_on_is_not_called_running(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dpps.peers.status.LATE", -1.0)
    write_status(tmp_path, replace(status(), unit="none", message="waits"))
    assert main(["federation", "status", str(tmp_path)]) == DONE
    said = capsys.readouterr().out
    assert "not running" in said
    assert "waits" in said
    assert "privacy" not in said  # nothing was promised


def test_for_programs(tmp_path, capsys):
    write_status(tmp_path, status())
    assert main(["federation", "status", str(tmp_path), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["alive"] is True
    assert found["epsilon"] == status().epsilon
    assert len(found["members"]) == 8


# `dpps federation leave`: asks the process that runs, and refuses where there is none


def test_only_asked(tmp_path, capsys):
    write_status(tmp_path, status())
    assert main(["federation", "leave", str(tmp_path), "--wait", "0"]) == DONE
    assert (tmp_path / LEAVE).exists()
    assert "hospital-a" in capsys.readouterr().out
    assert main(["federation", "leave", str(tmp_path), "--wait", "0.01"]) == FAILED
    assert "--wait" in capsys.readouterr().err


@pytest.mark.parametrize(("state", "code"), [(LEFT, DONE), (FINISHED, FAILED)])
def test_it_waits_until_the_process_is_done(tmp_path, monkeypatch, capsys, state, code):
    """Instead of sleeping, the process of the member ends, as it does after being asked."""
    write_status(tmp_path, status())
    monkeypatch.setattr(
        federation.time, "sleep", lambda _: write_status(tmp_path, replace(status(), state=state))
    )
    assert main(["federation", "leave", str(tmp_path)]) == code
    assert f"hospital-a: {state}" in capsys.readouterr().out


def test_nobody_to_ask(tmp_path, capsys):
    for state, remedy in ((FINISHED, "finished"), (STOPPED, "dpps federation join")):
        write_status(tmp_path, replace(status(), state=state))
        assert main(["federation", "leave", str(tmp_path)]) == WRONG
        said = capsys.readouterr().err
        assert "hospital-a" in said
        assert remedy in said
    assert not (tmp_path / LEAVE).exists()
