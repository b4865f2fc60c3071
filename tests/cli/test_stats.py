"""dpps stats: answers, plans and refusals; a mistake is one line and writes nothing."""

import json
import os
import signal
import threading
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

from dpps.cli import main
from dpps.errors import UsageError
from dpps.peers import Identity, Key, Participation, Peers, Request, read_plan, read_status
from dpps.peers import convene as convene_by
from dpps.peers.contract import questions_for
from dpps.peers.status import FINISHED
from dpps.privacy import LedgerFile
from tests.support.processes import PATIENCE, context, free_port

SCHEMA = """
columns = [
    {name = "age", kind = "number", range = [0, 120]},
    {name = "sex", kind = "category", values = ["f", "m"]},
    {name = "stage", kind = "category", values = ["I", "II", "III"]},
]
"""
BASE = ["stats", "--nodes", "3", "--schema", "schema.toml"]


@pytest.fixture(autouse=True)
def clinics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("schema.toml").write_text(SCHEMA)
    for node in range(3):
        Path(f"node-{node}").mkdir()
        rows = [f"p{k % 50},{20 + (7 * k + node) % 60},{'fm'[k % 2]},{'I' * (1 + k % 3)}" for k in range(100)]
        Path(f"node-{node}/train.csv").write_text("\n".join(["visitor,age,sex,stage", *rows]) + "\n")


def asking(*questions, out="out", more=()):
    asked = [word for question in questions for word in ("--ask", question)]
    return [*BASE, *asked, "--node-data", "node-{rank}", "--out", out, *more]


def ask(*questions, out="out", more=()):
    return main(asking(*questions, out=out, more=more))


def answers(out="out"):
    return json.loads(Path(out, "answers.json").read_text())["answers"]


@pytest.fixture
def no_release(refused):
    """The request is refused, and nothing is written."""

    def check(*questions, told="", more=()):
        refused(asking(*questions, more=more), told)
        assert not Path("out").exists()

    return check


def test_answers_are_printed_and_written(capsys):
    assert ask("count()", "mean(age)", "histogram(stage)", more=("--epsilon", "20")) == 0
    printed = capsys.readouterr().out
    found = json.loads(Path("out/answers.json").read_text())
    assert [answer["query"] for answer in found["answers"]] == ["count()", "mean(age)", "histogram(stage)"]
    assert abs(found["answers"][0]["value"] - 300) < 10
    assert found["answers"][2]["labels"] == ["I", "II", "III", "missing"]
    assert found["privacy"]["epsilon"] <= 20
    assert not found["privacy"]["simulated"]
    assert found["privacy"]["statement"] in printed
    assert main(["ledger", "node-0"]) == 0


def test_json_is_what_the_file_holds(capsys):
    assert ask("count()", more=("--json", "--seed", "1")) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("out/answers.json").read_text())


def test_the_same_seed_gives_the_same_answers_and_no_seed_others():
    for out, seed in (("a", ("--seed", "1")), ("b", ("--seed", "1")), ("c", ()), ("d", ())):
        assert ask("count()", out=out, more=seed) == 0
    one, same, other, another = (answers(out)[0]["value"] for out in "abcd")
    assert one == same
    assert len({one, other, another}) == 3


def test_a_person_counts_once():
    assert ask("count()", more=("--person", "visitor", "--epsilon", "50")) == 0
    assert abs(answers()[0]["value"] - 150) < 5


def test_a_plan_reads_no_data_and_writes_nothing(capsys):
    assert main([*BASE, "--ask", "count()", "--ask", "mean(age)", "--plan", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["answers"]
    assert planned[0]["high"] > planned[0]["low"]
    assert not Path("runs").exists()
    assert not Path("out").exists()


def test_pairs_are_more_precise():
    assert ask("mean(age)", out="alone", more=("--epsilon", "8")) == 0
    assert ask("mean(age)", out="pairs", more=("--epsilon", "8", "--trust", "pairs", "--colluders", "0")) == 0
    alone, pairs = (answers(out)[0]["noise"] for out in ("alone", "pairs"))
    assert pairs < alone


@pytest.mark.parametrize(
    ("questions", "more"),
    [
        (["mean(agee)"], ()),
        (["mean(sex)"], ()),
        (["histogram(age)"], ()),
        (["km(age, stage)"], ()),
        (["count()", "count()"], ()),
        (["count("], ()),
        (["mean(age, weight=0)"], ()),
        (["count()"], ("--person", "patience")),
        (["count()"], ("--epsilon", "0")),
        (["count()"], ("--delta", "1")),
        (["count()"], ("--nodes", "4")),
        (["count()"], ("--colluders", "1")),
        (["count()"], ("--records-per-node", "0")),
        (["count()"], ("--trust", "everybody")),
        (["count()"], ("--timeout", "5")),
        (["count()"], ("--records", "5")),
        (["count()"], ("--plan",)),
        (["count()"], ("--resume", "--overwrite")),
        (["count()"], ("--resume",)),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(questions, more, no_release):
    no_release(*questions, more=more)


def test_a_release_is_not_replaced_by_accident(capsys):
    assert ask("count()") == 0
    before = Path("out/answers.json").read_bytes()
    assert ask("count()") == 2
    assert Path("out/answers.json").read_bytes() == before
    assert ask("count()", more=("--overwrite",)) == 0
    assert len(list(Path("out").glob("ledger-until-*.jsonl"))) == 1


def test_noise_that_can_be_repeated_is_refused_where_messages_leave(monkeypatch, no_release):
    environment = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    no_release("count()", more=("--seed", "1"))


def test_a_record_of_nobody_is_refused(no_release):
    with open("node-1/train.csv", "a") as file:
        file.write(",50,f,I\n")
    no_release("count()", more=("--person", "visitor"), told="line 102")


@pytest.mark.parametrize("name", ["patient", "Patient-ID", "subject_number", "pid"])
def test_several_records_of_a_person_are_not_overlooked(name, no_release):
    for node in range(3):
        table = Path(f"node-{node}/train.csv")
        table.write_text(table.read_text().replace("visitor", name, 1))
    no_release("count()", told=f"--person {name}")
    assert ask("count()", more=("--person", name)) == 0


def test_a_node_that_holds_more_than_was_declared_is_refused(no_release):
    no_release("count()", more=("--records-per-node", "99"))
    assert ask("count()", more=("--records-per-node", "100")) == 0
    assert ask("count()", out="b", more=("--records-per-node", "50", "--person", "visitor")) == 0


def test_a_number_without_a_range_is_refused(no_release):
    Path("schema.toml").write_text('columns = [{name = "age", kind = "number"}]')
    no_release("mean(age)", told="range")


def test_an_answer_lost_in_noise_is_told(capsys):
    # seeded: one in dozens of draws of such noise still looks like an answer, with an interval as wide as it must be
    assert ask("regression(age ~ sex)", more=("--epsilon", "0.01", "--seed", "0")) == 0
    assert "too noisy" in capsys.readouterr().out
    assert answers()[0]["value"] == [None, None]


def test_what_was_spent_is_not_spent_again(capsys):
    """A release that is continued when it is complete has the answers it had."""
    assert ask("count()") == 0
    before, ledger = Path("out/answers.json").read_bytes(), Path("out/ledger.jsonl").read_bytes()
    assert ask("count()", more=("--resume",)) == 0
    assert (Path("out/answers.json").read_bytes(), Path("out/ledger.jsonl").read_bytes()) == (before, ledger)


def test_the_person_may_be_a_column_that_is_asked_about():
    assert ask("mean(age)", more=("--person", "age", "--epsilon", "50")) == 0
    assert not answers()[0]["too_noisy"]


# As the plan of a federation

PLAN = ["--ask", "count()", "--ask", "mean(age)", "--ask", "histogram(stage)", "--epsilon", "5"]


def convene(*more, members="abc", rules=()):
    """A federation that asks, in the folder f."""
    options = [*PLAN, *more]
    with open("plan.toml", "w") as file, redirect_stdout(file):
        assert main([*BASE, *options, "--print-config"]) == 0
    for name in "abc":
        if not Path(name).exists():
            listen = f"127.0.0.1:{free_port()}"
            assert main(["federation", "key", "--name", name, "--listen", listen, "--out", name]) == 0
    requests = [word for name in members for word in ("--member", f"{name}/member.csr")]
    return main(["federation", "create", "plan.toml", *requests, "--out", "f", *rules])


def joining(node, out, *more):
    member = ["--member", "abc"[node], "--node-data", f"node-{node}", "--out", out]
    return ["federation", "join", "f/federation.toml", *member, "--quiet", *more]


def _joined(folder, node, dies):
    """A member in a process of its own; one that dies does so when its message is paid for and nothing of it has left."""
    os.chdir(folder)
    torch.set_num_threads(1)
    send = Peers._send_due

    def killed(self, now):
        if dies and self.pushed >= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, now)

    Peers._send_due = killed
    raise SystemExit(main(joining(node, f"run-{node}")))


def test_members_have_the_same_answers(capsys):
    assert convene(rules=("--soft-deadline", "60", "--hard-deadline", "120")) == 0
    joined = [
        Participation("f/federation.toml", "abc"[k], f"run-{k}", node_data=f"node-{k}") for k in range(3)
    ]
    threads = [threading.Thread(target=each.fit, daemon=True) for each in joined]
    for thread in threads:
        thread.start()
    for thread, each in zip(threads, joined, strict=True):
        thread.join(PATIENCE)
        each.close()
    found = [json.loads(Path(f"run-{node}/answers.json").read_text()) for node in range(3)]
    assert found[0] == found[1] == found[2]
    assert found[0]["nodes"] == [3, 3]
    assert abs(found[0]["answers"][0]["value"] - 300) < 6 * found[0]["answers"][0]["noise"]
    assert joined[0].planned_epsilon == pytest.approx(found[0]["privacy"]["epsilon"])
    for command in (["ledger", "node-0"], ["report", "run-0"], ["federation", "status", "run-0"]):
        assert main(command) == 0
    assert read_status(Path("run-0")).state == FINISHED
    assert "count()" in Path("run-0/report.html").read_text()


@pytest.mark.slow
def test_members_one_of_whom_never_comes_and_one_is_killed_after_its_charge(tmp_path):
    rules = ("--soft-deadline", "2", "--hard-deadline", "10", "--start-deadline", "1")
    assert convene(rules=rules) == 0

    def started(node, dies=False):
        process = context.Process(target=_joined, args=(tmp_path, node, dies))
        process.start()
        return process

    first, second = started(0), started(1, dies=True)
    second.join(PATIENCE)
    assert second.exitcode == -signal.SIGKILL
    second = started(1)
    for process in (first, second):
        process.join(PATIENCE)
        assert process.exitcode == 0
    found = [json.loads(Path(f"run-{node}/answers.json").read_text()) for node in (0, 1)]
    assert found[0] == found[1]
    assert found[0]["nodes"] == [2, 3]
    count, mean, _ = found[0]["answers"]
    assert abs(count["value"] - 200) < 6 * count["noise"]
    truth = [20 + (7 * k + node) % 60 for node in (0, 1) for k in range(100)]
    assert abs(mean["value"] - sum(truth) / 200) < 6 * mean["noise"]
    for node in (0, 1):
        assert len(LedgerFile.read(Path(f"run-{node}/ledger.jsonl")).history) == 1
        assert main(["ledger", f"node-{node}"]) == 0
        assert main(["report", f"run-{node}"]) == 0
        assert main(["federation", "status", f"run-{node}"]) == 0


@pytest.mark.parametrize(
    ("more", "members", "rules"),
    [
        ((), "ab", ()),
        ((), "abc", ("--gossip-clip", "1")),
        (("--trust", "pairs", "--colluders", "2"), "abc", ()),
    ],
)
def test_plans_that_members_cannot_keep_are_refused(more, members, rules, capsys):
    capsys.readouterr()
    try:
        assert convene(*more, members=members, rules=rules) == 2
    except AssertionError:
        assert "--colluders" in more  # the plan itself is refused
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not Path("f/federation.toml").exists()


@pytest.mark.parametrize(
    "more",
    [
        ("--metrics", "auroc"),
        ("--device", "cpu"),
        ("--node-data", "node-7"),
        ("--node-data", "bad"),
        ("--node-data", "other"),
    ],
)
def test_a_member_is_refused_before_it_sends_anything(more, capsys):
    assert convene("--person", "visitor") == 0
    for name, text in (
        ("bad", "visitor,age,sex,stage\np1,old,f,I\n"),
        ("other", "visitor,age,sex\np1,50,f\n"),
    ):
        Path(name).mkdir()
        Path(name, "train.csv").write_text(text)
    capsys.readouterr()
    assert main(joining(0, "run-0", *more)) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in told if line.startswith("dpps")]) == 1, told
    assert not Path("run-0/ledger.jsonl").exists()
    assert not Path("run-0/outbox").exists()


def test_another_plan_than_create_makes_is_refused_whoever_signed_it(tmp_path):
    Path("plan.toml").write_text('ask = ["count()"]\nschema = "schema.toml"\nnodes = 3\n')
    plan, schema = read_plan(Path("plan.toml"), 3)
    identities = [Identity.make(tmp_path / name, name, f"127.0.0.1:{free_port()}") for name in "abc"]
    requests = [Request.read(identity.folder / "member.csr") for identity in identities]
    key = Key.make(tmp_path / "f" / "convener.key")
    assert questions_for(convene_by(plan, requests, key, schema=schema), Path("schema.toml")).ask == (
        "count()",
    )
    for wrong in (
        {"ask": ["count()", "mean(sex)"]},
        {"ask": "count()"},
        {"topology": "ring"},
        {"unit": "contribution"},
        {"seed": 1},
        {"trust": "pairs", "colluders": 1},
    ):
        made = convene_by(plan | wrong, requests, key, schema=schema)
        with pytest.raises(UsageError):
            questions_for(made, Path("schema.toml"))
