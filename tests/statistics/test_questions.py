"""Questions: one record's share is bounded, answers without noise are those of plain formulas, and intervals cover the truth."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpps.errors import UsageError
from dpps.statistics import Answer, Category, Number, ask

Array = NDArray[np.float64]
COLUMNS = {
    "age": Number("age", 0, 120),
    "bmi": Number("bmi", 10, 60),
    "pressure": Number("pressure", 60, 260),
    "time": Number("time", 0, 120),
    "sex": Category("sex", ("f", "m")),
    "stage": Category("stage", ("i", "ii", "iii", "iv")),
    "event": Category("event", ("alive", "dead")),
}
QUESTIONS = [
    "count()",
    "mean(age)",
    "variance(age)",
    "histogram(stage)",
    "histogram(age, bins=[0, 18, 65, 120])",
    "table(sex, stage)",
    "quantiles(age, 0.1, 0.25, 0.5, 0.75, 0.9)",
    "correlation(age, bmi, pressure)",
    "regression(pressure ~ age)",
    "regression(pressure ~ age + bmi + sex + stage)",
    "km(time, event, times=[10, 20, 30, 40, 50, 60])",
    "mean(age, by=stage)",
    "count(by=sex)",
    "km(time, event, by=sex)",
]


def people(count: int, seed: int) -> dict[str, Array]:
    """Made-up patients; nobody has stage iv."""
    rng = np.random.default_rng(seed)
    age = np.clip(rng.normal(55, 18, count), 0, 110)
    bmi, sex = rng.normal(27, 5, count), rng.integers(0, 2, count).astype(float)
    time, censored = rng.exponential(60, count), rng.exponential(80, count) + 5
    return {
        "age": age,
        "bmi": bmi,
        "pressure": 100 + 0.6 * age + 0.4 * bmi + 4 * sex + rng.normal(0, 15, count),
        "time": np.minimum(time, censored),
        "sex": sex,
        "stage": rng.choice(3, count, p=[0.5, 0.3, 0.2]).astype(float),
        "event": (time <= censored).astype(float),
    }


def answer(text: str, records: dict[str, Array], noise: float = 0.0, seed: int = 0) -> Answer:
    question = ask(text, COLUMNS)
    sums = question.encode(records).sum(0)
    return question.answer(sums + np.random.default_rng(seed).normal(0, noise, len(sums)), noise)


cells = st.floats(allow_nan=True, allow_infinity=True, width=64)


@settings(max_examples=50, deadline=None)
@given(
    numbers=st.lists(st.tuples(cells, cells, cells, cells), min_size=1, max_size=4),
    places=st.tuples(st.integers(-1, 1), st.integers(-1, 3), st.integers(-1, 1)),
)
@pytest.mark.parametrize("text", QUESTIONS)
def test_a_record_moves_a_sum_by_at_most_one(
    text: str, numbers: list[tuple[float, ...]], places: tuple[int, ...]
) -> None:
    columns = np.array(numbers).T
    records = dict(zip(("age", "bmi", "pressure", "time"), columns, strict=True))
    records |= {
        name: np.full(len(numbers), float(k))
        for name, k in zip(("sex", "stage", "event"), places, strict=True)
    }
    question = ask(text, COLUMNS)
    block = question.encode(records)
    assert block.shape == (len(numbers), question.width)
    assert np.linalg.norm(block, axis=1).max() <= 1 + 1e-12
    assert np.abs(block).sum(1).max() <= question.largest_sum + 1e-12


def kaplan_meier(time: Array, dead: Array, at: list[float]) -> list[float]:
    """The product over all times, one by one; times count as the next of `at`."""
    place = np.searchsorted(at, time)
    found, survival = [], 1.0
    for k in range(len(at)):
        at_risk = (place >= k).sum()
        survival *= 1 - ((place == k) & (dead == 1)).sum() / at_risk
        found.append(survival)
    return found


def least_squares(records: dict[str, Array]) -> Array:
    stages = [records["stage"] == k for k in (1, 2)]
    inputs = [np.ones(len(records["age"])), *(records[x] for x in ("age", "bmi", "sex")), *stages]
    found: Array = np.linalg.lstsq(np.column_stack(inputs), records["pressure"], rcond=None)[0]
    return found


ORACLES: dict[str, Callable[[dict[str, Array]], object]] = {
    "count()": lambda r: [len(r["age"])],
    "mean(age)": lambda r: [r["age"].mean()],
    "variance(age)": lambda r: [r["age"].var()],
    "histogram(stage)": lambda r: [*np.bincount(r["stage"].astype(int), minlength=5) / len(r["age"])],
    "mean(age, by=sex)": lambda r: [r["age"][r["sex"] == k].mean() for k in (0, 1)],
    "correlation(age, pressure)": lambda r: [np.corrcoef(r["age"], r["pressure"])[0, 1]],
    "km(time, event, times=[10, 20, 40, 80])": lambda r: kaplan_meier(
        r["time"], r["event"], [10, 20, 40, 80]
    ),
}


@pytest.mark.parametrize("text", ORACLES)
def test_without_noise_answers_are_those_of_plain_formulas(text: str) -> None:
    records = people(3000, 1)
    found = answer(text, records)
    np.testing.assert_allclose(found.value, ORACLES[text](records), rtol=1e-9, atol=1e-9)


def test_regression_is_least_squares() -> None:
    columns = {**COLUMNS, "stage": Category("stage", ("i", "ii", "iii"))}
    records = people(3000, 1)
    question = ask("regression(pressure ~ age + bmi + sex + stage)", columns)
    found = question.answer(question.encode(records).sum(0), 0.0)
    np.testing.assert_allclose(found.value, least_squares(records), rtol=1e-8)
    assert found.labels == ("intercept", "age", "bmi", "sex=m", "stage=ii", "stage=iii")


def test_quantiles_lie_within_a_bin_of_the_true_ones() -> None:
    records = people(20_000, 2)
    found = answer("quantiles(age, 0.1, 0.5, 0.9)", records)
    expected = np.quantile(records["age"], [0.1, 0.5, 0.9])
    assert np.abs(found.value - expected).max() < 120 / 128


def test_missing_values_are_left_out_or_counted_as_missing() -> None:
    records = people(1000, 3)
    records["age"][:100], records["stage"][:250] = np.nan, -1
    np.testing.assert_allclose(answer("mean(age)", records).value, [np.nanmean(records["age"])])
    np.testing.assert_allclose(answer("histogram(stage)", records).value[-1], 0.25)


@pytest.mark.parametrize(
    "text", ["mean(age)", "regression(pressure ~ age)", "quantiles(age, 0.5)", "variance(age)"]
)
def test_an_answer_lost_in_noise_is_not_given(text: str) -> None:
    found = answer(text, people(20, 4), noise=500.0)
    assert found.too_noisy.all()
    assert found.as_json()["value"] in (None, [None], [None, None])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("mean(aeg)", "'age'"),
        ("mean(sex)", "histogram(sex)"),
        ("histogram(age)", "bins="),
        ("km(time, stage)", "stage"),
        ("km(time, event, event=gone)", "dead"),
        ("sum(age)", "mean"),
        ("mean(age", "mean(age"),
        ("mean()", "1 expected"),
        ("quantiles(age, 2)", "0 and 1"),
        ("quantiles(age)", "expected"),
        ("mean(age, bins=3)", "'bins'"),
        ("mean(age, by=bmi)", "bmi"),
        ("regression(pressure)", "~"),
        ("regression(pressure ~ pressure)", "pressure"),
        ("mean(age ~ bmi)", "regression"),
        ("histogram(age, bins=1)", "bins=1"),
        ("histogram(age, bins=[3, 2])", "[3.0, 2.0]"),
        ("histogram(age, bins=[3, x])", "[3, x]"),
        ("mean(ag'e)", "'e"),
        ("mean(age =)", "age ="),
    ],
)
def test_a_wrong_question_is_refused_in_one_line(text: str, named: str) -> None:
    with pytest.raises(UsageError) as error:
        ask(text, COLUMNS)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_names_with_spaces_stand_in_quotes() -> None:
    columns = {"age at entry": Number("age at entry", 0, 120)}
    question = ask('mean("age at entry")', columns)
    assert question.answer(
        question.encode({"age at entry": np.full(50, 30.0)}).sum(0), 0.0
    ).value == pytest.approx(30)


COVERED = {
    "count()": (93, 97),
    "mean(age)": (93, 97),
    "variance(pressure)": (93, 97),
    "histogram(stage)": (93, 100),
    "quantiles(age, 0.1, 0.25, 0.5, 0.75, 0.9)": (95, 100),
    "regression(pressure ~ age)": (93, 97.5),
    "km(time, event, times=[10, 20, 30, 40])": (93, 97.7),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [500, 2000, 15_000])
@pytest.mark.parametrize("text", COVERED)
def test_intervals_cover_the_truth(text: str, count: int) -> None:
    """1,000 releases: limits are those asked for, widened by three standard errors of a share of 1,000."""
    question, noise = ask(text, COLUMNS), 3.73 * 10**0.5
    many = people(400_000, 99)
    truth = question.answer(question.encode(many).sum(0), 0.0).value if text != "count()" else [count]
    rng, hits, seen = np.random.default_rng(5), 0.0, 0.0
    for k in range(1000):
        sums = question.encode(people(count, 1000 + k)).sum(0)
        found = question.answer(sums + rng.normal(0, noise, len(sums)), noise)
        hits = hits + ((found.low <= truth) & (truth <= found.high) & ~found.too_noisy)
        seen = seen + ~found.too_noisy
    least, most = COVERED[text]
    cover = 100 * hits / np.maximum(seen, 1)
    usual = np.asarray(seen) > 500
    error = 3 * 0.7
    assert (cover[usual] >= least - error).all(), cover
    assert (cover[usual] <= most + error).all(), cover
