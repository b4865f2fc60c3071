"""dpps stats: answers, plans and refusals; a mistake is one line and writes nothing."""

import json
from pathlib import Path

import pytest

from dpps.cli import main

SCHEMA = """
columns = [
    {name = "age", kind = "number", range = [0, 120]},
    {name = "sex", kind = "category", values = ["f", "m"]},
    {name = "stage", kind = "category", values = ["I", "II", "III"]},
]
"""
BASE = ["stats", "--nodes", "3", "--schema", "schema.toml"]


@pytest.fixture(autouse=True)
def clinics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("schema.toml").write_text(SCHEMA)
    for node in range(3):
        Path(f"node-{node}").mkdir()
        rows = [f"p{k % 50},{20 + (7 * k + node) % 60},{'fm'[k % 2]},{'I' * (1 + k % 3)}" for k in range(100)]
        Path(f"node-{node}/train.csv").write_text("\n".join(["patient,age,sex,stage", *rows]) + "\n")


def ask(*questions: str, out: str = "out", more: tuple[str, ...] = ()) -> int:
    asked = [word for question in questions for word in ("--ask", question)]
    return main([*BASE, *asked, "--node-data", "node-{rank}", "--out", out, *more])


def test_answers_are_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_json_is_what_the_file_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("count()", more=("--json", "--seed", "1")) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(Path("out/answers.json").read_text())


def test_the_same_seed_gives_the_same_answers_and_no_seed_others() -> None:
    for out, seed in (("a", ("--seed", "1")), ("b", ("--seed", "1")), ("c", ()), ("d", ())):
        assert ask("count()", out=out, more=seed) == 0
    one, same, other, another = (
        json.loads(Path(out, "answers.json").read_text())["answers"][0]["value"] for out in "abcd"
    )
    assert one == same
    assert len({one, other, another}) == 3


def test_a_person_counts_once() -> None:
    assert ask("count()", more=("--person", "patient", "--epsilon", "50")) == 0
    assert abs(json.loads(Path("out/answers.json").read_text())["answers"][0]["value"] - 150) < 5


def test_a_plan_reads_no_data_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--ask", "count()", "--ask", "mean(age)", "--plan", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["answers"]
    assert planned[0]["high"] > planned[0]["low"]
    assert not Path("runs").exists()
    assert not Path("out").exists()


def test_pairs_are_more_precise() -> None:
    assert ask("mean(age)", out="alone", more=("--epsilon", "8")) == 0
    assert ask("mean(age)", out="pairs", more=("--epsilon", "8", "--trust", "pairs", "--colluders", "0")) == 0
    alone, pairs = (
        json.loads(Path(out, "answers.json").read_text())["answers"][0]["noise"] for out in ("alone", "pairs")
    )
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
def test_mistakes_are_one_line_and_write_nothing(
    questions: list[str], more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(*questions, more=more) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not Path("out").exists()


def test_a_release_is_not_replaced_by_accident(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("count()") == 0
    before = Path("out/answers.json").read_bytes()
    assert ask("count()") == 2
    assert Path("out/answers.json").read_bytes() == before
    assert ask("count()", more=("--overwrite",)) == 0
    assert len(list(Path("out").glob("ledger-until-*.jsonl"))) == 1


def test_noise_that_can_be_repeated_is_refused_where_messages_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "3"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert ask("count()", more=("--seed", "1")) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not Path("out").exists()


def test_a_record_of_nobody_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with open("node-1/train.csv", "a") as file:
        file.write(",50,f,I\n")
    assert ask("count()", more=("--person", "patient")) == 2
    assert "line 102" in capsys.readouterr().err
    assert not Path("out").exists()


def test_the_person_may_be_a_column_that_is_asked_about() -> None:
    assert ask("mean(age)", more=("--person", "age", "--epsilon", "50")) == 0
    assert not json.loads(Path("out/answers.json").read_text())["answers"][0]["too_noisy"]
