"""Axes, charts, and epsilon spent by round."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dpps
from dpps.privacy import Charge, total
from dpps.report import KEPT_POINTS, SIZE, Axis, Line, number, read_run, thinned
from dpps.report.charts import charts
from tests.support.learning import toy_data
from tests.support.report import changed, with_privacy

# Axes: values lie where they should, and ticks are round


values = st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=20).filter(lambda v: max(v) > 1.001 * min(v))


@given(values, st.booleans())
def test_values_lie_inside_in_their_order(found, log):
    axis = Axis.around(found, log=log)
    places = [axis.place(value) for value in sorted(found)]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= SIZE


@given(values, st.booleans())
def test_ticks_are_few_and_inside(found, log):
    ticks = Axis.around(found, log=log).ticks()
    assert 1 <= len(ticks) <= 13
    assert all(-0.1 <= place <= SIZE + 0.1 for place, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)


def test_ends_and_whole_numbers():
    assert [text for _, text in Axis(1, 3, whole=True).ticks()] == ["1", "2", "3"]
    assert [text for _, text in Axis(5, 2e5, log=True).ticks()] == ["10", "100", "1,000", "10,000", "100,000"]
    assert len(Axis(0.23, 0.38, log=True).ticks()) == 2, "between two round values, the ends"
    assert Axis.around([95, 99], ceiling=100).high <= 100
    assert Axis.around([0.0, 5.0]).low == 0
    assert Axis.around([7.0, 7.0]).high > 7
    assert Axis(10, 1000, log=True).place(100) == SIZE / 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.0, "3"),
        (0.0123456, "0.01235"),
        (150_000, "150,000"),
        (1e-5, "10⁻⁵"),
        (2.5e-7, "2.5×10⁻⁷"),
        (12_345_678, "1.23×10⁷"),
        (-4.25, "-4.25"),
    ],
)
def test_numbers_for_people(value, text):
    assert number(value) == text


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes(values):
    points = dict(enumerate(values))
    kept = thinned(points)
    assert {0, len(values) - 1} <= set(kept)
    assert len(kept) <= KEPT_POINTS + 4
    assert {min(values), max(values)} <= {points[at] for at in kept}
    assert len(values) > KEPT_POINTS or kept == list(points)


# Charts show the runs' values


def drawn(*runs):
    return {chart.key: chart for chart in charts(runs) if not chart.flat}


def test_what_changes_is_drawn_and_what_does_not_is_listed(runs):
    assert list(drawn(runs["record"])) == ["accuracy", "epsilon", "loss"]
    assert list(drawn(runs["node-swap"])) == ["accuracy", "epsilon", "loss", "sensitivity", "scale"]
    assert list(drawn(runs["none"])) == ["loss"]
    flat = {
        chart.key: [line.last for line in chart.lines] for chart in charts([runs["record"]]) if chart.flat
    }
    log = runs["record"].log[0]
    assert flat == {"sensitivity": [log.estimated], "scale": [log.scale]}


def test_values_are_those_of_the_run(runs):
    run = runs["node-swap"]
    sensitivity = {line.name: line.points for line in drawn(run)["sensitivity"].lines}
    assert list(sensitivity) == ["certified", "real"]
    for name, column in (("certified", "estimated"), ("real", "real")):
        assert sensitivity[name] == {log.round: getattr(log, column) for log in run.log}
    (accuracy,) = drawn(run)["accuracy"].lines
    assert list(accuracy.points.values()) == run.summary.accuracy_by_epoch
    rows = drawn(run)["sensitivity"].table()
    assert rows[-1][0] == str(run.log[-1].round)
    assert float(rows[-1][1]) == pytest.approx(run.log[-1].estimated, rel=1e-5)


def test_what_is_not_noised_is_for_the_nodes_own_eyes(runs):
    assert {key for key, chart in drawn(runs["record"]).items() if chart.own_eyes} == {"loss"}
    uncovered = with_privacy(runs["record"], unit="contribution")
    assert {key for key, chart in drawn(uncovered).items() if chart.own_eyes} == {"accuracy", "loss"}


def test_metrics_by_epoch_are_means_over_the_nodes_that_have_them(runs):
    measured = [{"own": {"auroc": [0.5, 0.7, None]}}, {"own": {"auroc": [0.6, 0.9, None]}}]
    chart = drawn(changed(runs["record"], metrics_by_epoch=measured))["metric-0"]
    assert [line.points for line in chart.lines] == [{1: pytest.approx(0.6), 2: pytest.approx(0.75)}]
    assert chart.own_eyes


def test_twentyfour_runs_differ_and_look_the_same_in_every_chart(runs):
    assert len({(line.colour, line.dash) for line in (Line("", {}, k) for k in range(24))}) == 24
    assert all(Line("", {}, k).dash != Line("", {}, k + 1).dash for k in range(11))
    many = [
        replace(runs[name], name=f"{name} {k}") for k in range(4) for name in ("none", "record", "node-swap")
    ]
    names = [run.name for run in many]
    for chart in charts(many):
        assert all(names[line.index] == line.name for line in chart.lines), chart.title


def test_comparison_lays_accuracy_against_epsilon(runs):
    lines = drawn(*runs.values())["exchange"].lines
    assert [line.name for line in lines] == ["record", "node-swap"]
    for line in lines:
        summary = runs[line.name].summary
        ((epsilon, accuracy),) = line.points.items()
        assert epsilon == pytest.approx(summary.privacy.epsilon, rel=0.01)
        assert accuracy == summary.test_accuracy
    assert "exchange" not in drawn(runs["record"], replace(runs["record"], name="other"))
    assert "exchange" not in drawn(runs["record"])
    own = [
        with_privacy(
            changed(runs["record"], f"{e}", test_accuracy=None, accuracy_by_epoch=[], own_accuracy=70.0 + e),
            epsilon=e,
        )
        for e in (1.0, 3.0)
    ]
    assert [line.points for line in drawn(*own)["exchange"].lines] == [{1.0: 71.0}, {3.0: 73.0}]


# Epsilon by round


def test_epsilon_by_round_adds_up_in_node_swap(runs):
    run = runs["node-swap"]
    sums = np.cumsum([log.epsilon for log in run.log])
    np.testing.assert_allclose(list(run.spent().values()), sums, rtol=1e-12)
    assert [*run.spent().values()][-1] == pytest.approx(run.summary.privacy.epsilon)


def test_epsilon_by_round_is_the_accountants_in_the_unit_record(runs):
    run = runs["record"]
    found = list(run.spent().items())
    at, epsilon = found[len(found) // 2]
    log = run.log[0]
    assert log.used is not None
    kind = Charge.gaussian(log.scale / log.used, run.charges[0][1].event.sampling, at + 1)
    assert epsilon == pytest.approx(total([kind], 1e-5).epsilon, rel=1e-9)
    assert all(a[1] < b[1] for a, b in pairwise(found))
    assert found[-1] == (len(run.log) - 1, run.summary.privacy.epsilon)


def test_the_node_that_paid_most_is_followed_where_nodes_draw_at_rates_of_their_own():
    """Three nodes, three lines a round: what the others paid is not added to what one has spent."""
    algorithm = dpps.PartPSP(nn.Linear(6, 3), batch_size=[20, 10, 4], lr_shared=0.1)
    unit = dpps.Record(noise_multiplier=1.0)
    run = dpps.Run(algorithm, toy_data(3), topology="ring", privacy=unit, seed=0).fit(epochs=2)
    reported = read_run(run, "own rates")
    assert len(reported.charges) == len(run.log)
    found = list(reported.spent().items())
    at, epsilon = found[len(found) // 2]
    dearest = Charge.gaussian(1.0, 0.5, at + 1)
    assert epsilon == pytest.approx(total([dearest], 1e-5).epsilon, rel=1e-6)
    assert all(a[1] < b[1] for a, b in pairwise(found))


def test_nothing_is_spent_without_a_unit(runs):
    assert runs["none"].spent() == {}
