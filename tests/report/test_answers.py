"""The page of answers."""

import html
import json

import numpy as np
import pytest

from dpps.errors import RunError
from dpps.report import write
from dpps.statistics import Category, Number, OneRecord, Release, Survey

COLUMNS = {
    "age": Number("age", 0, 120),
    "months": Number("months", 0, 60),
    "sex": Category("sex", ("f", "<m>")),
    "died": Category("died", ("no", "yes")),
}
QUESTIONS = (
    "count()",
    "mean(age, by=sex)",
    "histogram(sex)",
    "regression(age ~ months)",
    "km(months, died, times=[12, 24, 36])",
)


@pytest.fixture
def folder(tmp_path):
    draw, survey = np.random.default_rng(0), Survey(QUESTIONS, COLUMNS)
    columns = {"age": 120 * draw.random(300), "months": 60 * draw.random(300)}
    columns |= {name: draw.integers(0, 2, 300).astype(float) for name in ("sex", "died")}
    sums = np.stack([survey.sums(columns)] * 3)
    Release(survey, sums, 3, OneRecord(epsilon=0.3), folder=tmp_path / "out", seed=0).fit(1)
    return tmp_path / "out"


def test_every_answer_is_on_the_page(folder):
    page = write([folder], folder / "report.html").read_text()
    found = json.loads((folder / "answers.json").read_text())
    assert all(html.escape(answer["query"]) in page for answer in found["answers"])
    assert "&lt;m&gt;" in page
    assert "<m>" not in page
    assert "<script" not in page
    lost = sum(np.sum(answer["too_noisy"]) for answer in found["answers"])
    assert page.count(">too noisy<") == lost


def test_answers_that_cannot_be_read_are_refused_in_one_line(folder):
    (folder / "answers.json").write_text("{")
    with pytest.raises(RunError):
        write([folder], folder / "report.html")
