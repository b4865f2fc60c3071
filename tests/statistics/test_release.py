"""A release of many questions: bounds on what one record moves, noise as promised, one charge, answers as without privacy."""

import json
import math
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from scipy.stats import chi2, kstest

from dpps import DPPS, Pairs
from dpps.data import Column, Schema
from dpps.errors import UsageError
from dpps.noise.events import gaussian
from dpps.privacy.accountant import noise_for
from dpps.protocol import Message
from dpps.runs.data_ledger import notes_of
from dpps.statistics import Category, Number, stats
from dpps.statistics.release import OnceOnly, OneRecord, Release, Survey, WholeNode

COLUMNS = {
    "age": Number("age", 0, 120),
    "pressure": Number("pressure", 60, 240),
    "sex": Category("sex", ("f", "m")),
    "stage": Category("stage", ("I", "II", "III")),
}
QUESTIONS = (
    "count()",
    "mean(age)",
    "variance(pressure)",
    "histogram(stage)",
    "table(sex, stage)",
    "quantiles(age, 0.25, 0.5, 0.75)",
    "correlation(age, pressure)",
    "regression(pressure ~ age + sex)",
    "mean(age, by=sex)",
)


def records(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    age = draw.uniform(20, 90, count)
    return {
        "age": np.where(draw.random(count) < 0.05, np.nan, age),
        "pressure": 90 + 0.6 * age + draw.normal(0, 12, count),
        "sex": draw.integers(0, 2, count).astype(float),
        "stage": draw.integers(-1, 3, count).astype(float),
        "patient": draw.integers(0, max(1, count // 2), count).astype(float),
    }


def joined(*parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def release(survey: Survey, nodes: int, unit: OneRecord, seed: int = 0, count: int = 200) -> Release:
    sums = np.stack([survey.sums(records(count, node)) for node in range(nodes)])
    run = Release(survey, sums, nodes, unit, seed=seed)
    run.fit(1)
    return run


# What one record can change

values = st.floats(allow_nan=True, allow_infinity=False, width=64)


@settings(max_examples=60, deadline=None)
@given(values, values, st.integers(-1, 1), st.integers(-1, 2), st.integers(0, 40))
def test_one_record_moves_the_sums_by_at_most_one(
    age: float, pressure: float, sex: int, stage: int, others: int
) -> None:
    new = {"age": age, "pressure": pressure, "sex": sex, "stage": stage}
    added = {name: np.array([float(value)]) for name, value in new.items()}
    survey = Survey(QUESTIONS, COLUMNS)
    before = {name: column for name, column in records(others).items() if name != "patient"}
    moved = survey.sums(joined(before, added)) - survey.sums(before)
    assert np.linalg.norm(moved) <= 1


def test_all_records_of_a_person_count_as_one() -> None:
    survey = Survey(QUESTIONS, COLUMNS, person="patient")
    others, own = records(50), records(20, 1) | {"patient": np.full(20, 99.0)}
    whole = joined(others, own)
    moved = survey.sums(whole, whole["patient"]) - survey.sums(others, others["patient"])
    assert 0 < np.linalg.norm(moved) <= 1
    count = Survey(["count()"], COLUMNS, person="patient").sums(whole, whole["patient"])
    assert count[0] == len(np.unique(others["patient"])) + 1


def test_sums_do_not_depend_on_order_or_on_who_holds_what() -> None:
    survey = Survey(QUESTIONS, COLUMNS)
    whole = records(1000)
    order = np.random.default_rng(3).permutation(1000)
    parts = [{name: column[order][k::7] for name, column in whole.items()} for k in range(7)]
    assert (sum(survey.sums(part) for part in parts) == survey.sums(whole)).all()


def test_weights_share_the_budget() -> None:
    survey = Survey(["count()", "mean(age, weight=2)"], COLUMNS)
    assert math.isclose(survey.weights @ survey.weights, 1)
    assert math.isclose(survey.weights[1], 2 * survey.weights[0])
    count, _ = survey.answers(survey.sums(records(300)), 1.0)
    assert math.isclose(count.noise[0], math.sqrt(5))
    assert math.isclose(count.value[0], 300, abs_tol=1e-3)


# Answers


def test_answers_without_much_noise_are_those_of_the_pooled_table() -> None:
    survey = Survey(QUESTIONS, COLUMNS)
    found = release(survey, 5, OneRecord(noise_multiplier=1e-4, delta=1e-5), count=400).found
    pooled = joined(*(records(400, node) for node in range(5)))
    known = ~np.isnan(pooled["age"])
    assert abs(found["count()"].value[0] - 2000) < 0.1
    assert abs(found["mean(age)"].value[0] - pooled["age"][known].mean()) < 0.01
    shares = np.array([(pooled["stage"] == k).mean() for k in (0, 1, 2, -1)])
    assert np.abs(found["histogram(stage)"].value - shares).max() < 1e-3
    assert not any(answer.too_noisy.any() for answer in found.answers)


def test_all_nodes_have_the_same_answers() -> None:
    for nodes in (2, 3, 10, 24):
        y = release(Survey(QUESTIONS, COLUMNS), nodes, OneRecord(epsilon=1, delta=1e-5)).state.shared.y
        assert float((y - y[0]).abs().max()) < 1e-9


@pytest.mark.parametrize("nodes", [3, 10, 88])
def test_noise_compared_with_a_trusted_server(nodes: int) -> None:
    survey, server = Survey(["count()"], COLUMNS), noise_for(1.0, 1e-5, 1, gaussian)
    alone = release(survey, nodes, OneRecord(epsilon=1, delta=1e-5), count=5)
    assert alone.noise_of_sums(range(nodes)) <= 1.02 * math.sqrt(nodes) * server
    colluders, r = nodes // 3, 1.25
    trust = Pairs(colluders, r)
    paired = release(survey, nodes, OneRecord(epsilon=1, delta=1e-5, trust=trust), count=5)
    assert paired.noise_of_sums(range(nodes)) <= 1.03 * math.sqrt(r * nodes / (nodes - colluders)) * server


@pytest.mark.parametrize("trust", [None, Pairs(1)])
def test_the_noise_in_the_sums_is_what_the_intervals_assume(trust: Pairs | None) -> None:
    survey = Survey(["histogram(age, bins=400)"], COLUMNS)
    unit = OneRecord(epsilon=1, delta=1e-5, **({} if trust is None else {"trust": trust}))
    run = release(survey, 4, unit)
    exact = sum(survey.sums(records(200, node)) for node in range(4))
    noise = (4 * run.shared.numpy() - exact) / run.noise_of_sums(range(4))
    assert kstest(noise, "norm").pvalue > 1e-3

    def plausible(scale: float) -> bool:
        tail = chi2(len(noise)).cdf(((noise * scale) ** 2).sum())
        return bool(1e-3 < tail < 1 - 1e-3)

    assert plausible(1)
    assert not plausible(1.3)
    assert not plausible(1 / 1.3)


# What it costs


def test_one_charge_pays_for_all_questions(tmp_path: Path) -> None:
    survey = Survey(QUESTIONS, COLUMNS)
    sums = np.stack([survey.sums(records(100, node)) for node in range(3)])
    run = Release(
        survey, sums, 3, OneRecord(epsilon=1, delta=1e-5), folder=tmp_path / "out", secure_noise=True
    )
    run.fit(1)
    assert run.ledger.messages == 1
    assert 0.9 < run.found.privacy.epsilon <= 1
    assert not run.found.privacy.simulated
    written = json.loads((tmp_path / "out" / "answers.json").read_text())
    assert [answer["query"] for answer in written["answers"]] == list(QUESTIONS)
    assert written["nodes"] == [3, 3]
    assert written["privacy"]["epsilon"] == run.found.privacy.epsilon
    with pytest.raises(UsageError):
        Release(survey, sums, 3, OneRecord(epsilon=1), folder=tmp_path / "out").fit(1)


def killed_and_resumed(
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[type, str, object],
    survey: Survey,
    sums: np.ndarray,
    **options: object,
) -> Release:
    first, again = (Release(survey, sums, 3, OneRecord(epsilon=1, delta=1e-5), **options) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(*where)
        with pytest.raises(KeyboardInterrupt):
            first.fit(1)
    again.resumed = True
    again.fit(1)
    return again


def test_killed_after_its_charge_it_sends_the_same_message_and_pays_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = Survey(QUESTIONS, COLUMNS)
    sums = np.stack([survey.sums(records(100, node)) for node in range(3)])
    options = {"folder": tmp_path / "out", "secure_noise": True}
    sent = []

    def killed(self: OnceOnly, state: object, message: Message) -> None:
        sent.append(message.rows.clone())
        raise KeyboardInterrupt

    again = killed_and_resumed(monkeypatch, (OnceOnly, "exchange", killed), survey, sums, **options)
    assert again.ledger.messages == 1
    assert torch.allclose(again.shared, sent[0].mean(0), rtol=0, atol=1e-9)
    assert again.found.privacy.epsilon <= 1


def test_killed_before_its_charge_it_pays_when_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = Survey(["count()"], COLUMNS)
    sums = np.stack([survey.sums(records(100, node)) for node in range(3)])
    options = {"folder": tmp_path / "out", "secure_noise": True}

    def killed(self: DPPS, round_: int, level: object) -> None:
        raise KeyboardInterrupt

    again = killed_and_resumed(monkeypatch, (DPPS, "_charge", killed), survey, sums, **options)
    kept = load_file(tmp_path / "out" / "message.safetensors")["message"]
    assert again.ledger.messages == 1
    assert torch.allclose(again.shared, kept.mean(0), rtol=0, atol=1e-9)


def test_a_whole_node_is_bounded_by_its_largest_number_of_records() -> None:
    survey = Survey(["count()", "mean(age)"], COLUMNS)
    sums = np.stack([survey.sums(records(1, node)) for node in range(50)])
    unit = WholeNode(clip=1.0, epsilon=8, delta=1e-5, mechanism="gaussian")
    run = Release(survey, sums, 50, unit, seed=0)
    run.fit(1)
    assert run.found.privacy.unit == "contribution"
    assert run.log[0].used is not None
    assert run.log[0].used >= 2


def test_questions_that_cannot_be_asked_together() -> None:
    for questions in ([], ["count()", "count()"], ["mean(height)"], ["mean(age, weight=0)"]):
        with pytest.raises(UsageError):
            Survey(questions, COLUMNS)


def test_all_releases_of_a_table_in_memory_add_up(tmp_path: Path) -> None:
    frames = [pandas.DataFrame({"age": [31 + node, 52, 73], "sex": ["f", "m", "f"]}) for node in range(2)]
    schema = Schema((Column("age", "number", (0, 120)), Column("sex", "category", values=("f", "m"))))
    for k, question in enumerate(("count()", "mean(age)")):
        stats(
            [frame.sample(frac=1, random_state=k) for frame in frames],
            schema,
            [question],
            folder=tmp_path / str(k),
        )
    notes = notes_of(tmp_path / "0", node=0)
    assert {Path(note.ledger).parent.name for note in notes} == {"0", "1"}


def test_frames_and_files_can_be_mixed(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"age": [30, 50, 70], "sex": ["f", "m", "f"]})
    frame.to_csv(tmp_path / "clinic.csv", index=False)
    schema = Schema((Column("age", "number", (0, 120)), Column("sex", "category", values=("f", "m"))))
    found = stats([frame, tmp_path / "clinic.csv"], schema, ["count()"], epsilon=20, folder=tmp_path / "out")
    assert abs(found["count()"].value[0] - 6) < 3


def test_a_release_of_other_questions_is_not_resumed(tmp_path: Path) -> None:
    sums = np.ones((3, 1))
    Release(Survey(["count()"], COLUMNS), sums, 3, OneRecord(epsilon=1), folder=tmp_path / "out", seed=0).fit(
        1
    )
    other = Release(
        Survey(["count(weight=2)"], COLUMNS), sums, 3, OneRecord(epsilon=1), folder=tmp_path / "out", seed=0
    )
    other.resumed = True
    with pytest.raises(UsageError):
        other.fit(1)
