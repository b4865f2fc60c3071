"""What is said about privacy: the odds that epsilon allows, in the unit of the run; the statement in paragraphs."""

import re
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from scipy.stats import norm

import dpps
from dpps.privacy import Charge, total
from dpps.report import badges, detection, meaning, statement
from tests.support.learning import tiny, toy_data
from tests.support.report import changed, with_privacy


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_no_test_of_gaussian_noise_finds_more_than_is_said(sigma):
    """The best test at each rate of false alarms (Neyman and Pearson) stays below the bound that epsilon and delta give."""
    epsilon = total([Charge.gaussian(sigma)], 1e-5).epsilon
    for alarms in (1e-3, 0.01, 0.1, 0.5):
        best = norm.cdf(norm.ppf(alarms) + 1 / sigma)
        assert alarms < best <= detection(epsilon, 1e-5, alarms)


def test_the_bound_is_attained_by_randomised_response():
    epsilon, truth = 1.2, 1 / (1 + np.exp(-1.2))
    assert detection(epsilon, 0.0, 1 - truth) == pytest.approx(truth)
    assert detection(0.0, 0.0) == pytest.approx(0.01)
    assert detection(800.0, 0.0) == 1.0
    assert detection(1.0, 0.003) == pytest.approx(0.01 * np.e + 0.003)


def numbers(text):
    return re.findall(r"\d[\d,.]*(?:e-\d+)?", text.replace(". ", " "))


def test_odds_in_the_unit_record(runs):
    said = meaning(with_privacy(runs["record"], epsilon=3.0))
    assert {"20.1", "3", "1e-5", "100,000"} <= set(numbers(said))
    assert "20.1 of 100" in said
    said = meaning(with_privacy(runs["record"], epsilon=1.0))
    assert "2.72 of 100" in said  # rounded up, delta included
    assert "99.97 of 100" in meaning(with_privacy(runs["record"], epsilon=8.0))
    many = replace(runs["record"], unit=dpps.Record(epsilon=3.0, records_per_user=7))
    assert "7" in numbers(meaning(many))


def test_units_mean_different_things(runs):
    contribution = replace(
        with_privacy(runs["record"], epsilon=3.0, delta=0.0), unit=dpps.Contribution(epsilon=3.0)
    )
    assert "20.1 of 100" in meaning(contribution)
    assert meaning(contribution) != meaning(with_privacy(runs["record"], epsilon=3.0, delta=0.0))
    for run in (runs["node-swap"], runs["none"], with_privacy(runs["record"], epsilon=None)):
        assert not numbers(meaning(run))  # no promise of this kind


def test_what_stands_next_to_an_epsilon(runs):
    assert len(badges(runs["record"].summary.privacy)) == 1  # simulated
    assert len(badges(runs["node-swap"].summary.privacy)) == 2
    assert badges(with_privacy(runs["record"], simulated=False).summary.privacy) == []
    assert len(badges(with_privacy(runs["record"], simulated=False, epsilon=21.0).summary.privacy)) == 1
    assert len(badges(runs["none"].summary.privacy)) == 1


def test_statement_is_cut_into_paragraphs_and_no_word_is_lost():
    text = "Protected: you. Guarantee: epsilon 1. This run was a simulation. Not covered: me; you. Also not covered: him."
    parts = statement(text)
    openings = ["Protected:", "Guarantee:", "", "Not covered:", "Also not covered:"]
    assert [opening for opening, _ in parts] == openings
    assert dict(parts)["Not covered:"] == ["me;", "you."]
    assert " ".join(" ".join([opening, *items]) for opening, items in parts).split() == text.split()


@pytest.mark.parametrize("unit", [dpps.Record(epsilon=1.0), dpps.Contribution(epsilon=1.0), dpps.NodeSwap()])
def test_the_statement_of_every_unit_says_who_and_what_not(unit):
    text = f"Protected: {unit.who()}. Not covered: {unit.not_covered()}."
    (_, who), (_, items) = statement(text)
    assert who == [f"{unit.who()}."]
    assert " ".join(items) == f"{unit.not_covered()}."
    assert len(items) > 1


def test_accuracy_is_covered_where_all_that_is_measured_was_noised(runs):
    for unit, local, covered in (
        ("record", 10, True),
        ("contribution", 10, False),
        ("contribution", 0, True),
    ):
        run = with_privacy(changed(runs["record"], local_parameters=local), unit=unit)
        assert run.summary.accuracy_is_covered == covered


def test_a_unit_that_is_not_registered_has_a_page_from_python(tmp_path):
    """Its local part may hold anything, so nothing that was computed with it is passed on."""

    @dataclass(frozen=True)
    class Family(dpps.Contribution):
        name = "family"
        protects: ClassVar[str] = "all data of one family"

    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    test = toy_data(1, seed=9)[0]
    run = dpps.Run(algorithm, toy_data(3), topology="ring", privacy=Family(epsilon=2.0), test=test, seed=0)
    page = run.fit(epochs=1).report(tmp_path / "page.html").read_text()
    assert Family.protects in page
    assert " 7.39 " in page  # e^2
    assert '<div class="card unprinted"><dt>Accuracy' in page
