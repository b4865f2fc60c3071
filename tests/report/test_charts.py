"""Axes, charts, and epsilon spent by round."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dpps
from dpps.privacy import Charge, total
from dpps.report import (
    KEPT_POINTS,
    SIZE,
    Accuracy,
    Axis,
    Chart,
    Mark,
    RunRecord,
    by_round,
    number,
    read_run,
    render,
    thinned,
)
from dpps.report.charts import charts
from tests.support.learning import toy_data

# Axes: values lie where they should, and ticks are round


values = st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=20).filter(lambda v: max(v) > 1.001 * min(v))


@given(values, st.booleans())
def test_values_lie_inside_in_their_order(found: list[float], log: bool) -> None:
    axis = Axis.around(found, log=log)
    places = [axis.place(value) for value in sorted(found)]
    assert places == sorted(places)
    assert 0 <= places[0] <= places[-1] <= SIZE


@given(values, st.booleans())
def test_ticks_are_few_and_inside(found: list[float], log: bool) -> None:
    ticks = Axis.around(found, log=log).ticks()
    assert 1 <= len(ticks) <= 13
    assert all(-0.1 <= place <= SIZE + 0.1 for place, _ in ticks)
    assert len({text for _, text in ticks}) == len(ticks)


def test_ends_and_whole_numbers() -> None:
    assert [text for _, text in Axis(1, 3, whole=True).ticks()] == ["1", "2", "3"]
    assert [text for _, text in Axis(5, 2e5, log=True).ticks()] == ["10", "100", "1,000", "10,000", "100,000"]
    assert Axis.around([95, 99], ceiling=100).high <= 100
    assert Axis.around([0.0, 5.0], floor=0).low == 0
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
def test_numbers_for_people(value: float, text: str) -> None:
    assert number(value) == text


# Charts show the run's values, whatever changes, and nothing that does not


def drawn(*records: RunRecord) -> dict[str, Chart]:
    return {chart.key: chart for chart in charts(records)[0]}


def test_what_changes_is_drawn_and_what_does_not_is_told(records: dict[str, RunRecord]) -> None:
    assert list(drawn(records["record"])) == ["accuracy", "nodes", "epsilon", "loss"]
    assert list(drawn(records["node-swap"])) == [
        "accuracy",
        "nodes",
        "epsilon",
        "loss",
        "sensitivity",
        "scale",
    ]
    assert list(drawn(records["none"])) == ["nodes", "loss"]
    steady = {each.title: each.values for each in charts([records["record"]])[1]}
    assert list(steady) == ["Sensitivity", "Noise scale"]
    assert [value for _, value in steady["Sensitivity"]] == ["0.012"]
    assert [each.title for each in charts([records["none"]])[1]] == ["Accuracy"]  # after one epoch
    assert "noise scale" not in drawn(records["record"], records["none"])


def test_values_are_those_of_the_run(records: dict[str, RunRecord]) -> None:
    record = records["node-swap"]
    by_key = drawn(record)
    sensitivity = {series.name: series.y for series in by_key["sensitivity"].series}
    assert list(sensitivity) == ["certified", "real"]
    for name, column in (("certified", "estimated"), ("real", "real")):
        expected = [getattr(log, column) for log in record.rounds]
        np.testing.assert_allclose(np.array(sensitivity[name], float), expected, rtol=1e-5)
    np.testing.assert_allclose(
        np.array(by_key["nodes"].series[0].y, float), record.accuracy.by_node, rtol=1e-5
    )


def test_what_is_not_noised_is_for_the_nodes_own_eyes(records: dict[str, RunRecord]) -> None:
    by_key = drawn(records["record"])
    assert [series.name for series in by_key["nodes"].series] == ["test set", "own data"]
    assert {key for key, chart in by_key.items() if chart.own_eyes} == {"nodes", "loss"}
    assert not any(chart.printed for chart in by_key.values() if chart.own_eyes)


def test_baselines_are_lines(records: dict[str, RunRecord]) -> None:
    baselines = {"no privacy": Accuracy(91.5, [85.0, 91.5]), "alone": Accuracy(70.0, by_node=[60.0] * 5)}
    by_key = drawn(dataclasses.replace(records["record"], baselines=baselines))
    lines = {series.name: series.y for series in by_key["accuracy"].series}
    assert lines["no privacy"] == [85.0, 91.5]
    assert lines["alone"] == [70.0, 70.0]
    assert "not covered" in by_key["accuracy"].caption
    nodes = by_key["nodes"]
    assert "test set, alone" in [series.name for series in nodes.series]
    first = {nodes.path(series, dots=True).partition(" ")[0] for series in nodes.series}
    assert len(first) == len(nodes.series)  # dots of one node stand beside each other


def test_twelve_runs_differ_as_dots_and_twentyfour_as_lines() -> None:
    assert len({(mark.colour, mark.square) for mark in map(Mark, range(12))}) == 12
    assert len({(mark.colour, mark.dash) for mark in map(Mark, range(24))}) == 24


def test_a_run_looks_the_same_in_every_chart(records: dict[str, RunRecord]) -> None:
    many = [
        dataclasses.replace(records[name], name=f"{name} {k}")
        for k in range(4)
        for name in ("none", "record", "node-swap")
    ]
    for chart in charts(many)[0]:
        for series in chart.series:
            assert series.mark == Mark([run.name for run in many].index(series.name)), chart.title
    looks = {(Mark(k).colour, Mark(k).dash) for k in range(24)}
    assert len(looks) == 24


def test_comparison_lays_accuracy_against_epsilon(records: dict[str, RunRecord]) -> None:
    chart = drawn(*records.values())["exchange"]
    pairs = {
        series.name: [(x, y) for x, y in zip(chart.x, series.y, strict=True) if y] for series in chart.series
    }
    assert list(pairs) == ["record", "node-swap"]
    for name, ((epsilon, accuracy),) in pairs.items():
        assert epsilon == records[name].privacy.epsilon
        assert np.isclose(accuracy, records[name].accuracy.mean)
    assert "exchange" not in drawn(records["none"], dataclasses.replace(records["none"], name="other"))


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes(values: list[float]) -> None:
    points = dict(enumerate(values))
    kept = thinned(points)
    assert {0, len(values) - 1} <= set(kept)
    assert len(kept) <= KEPT_POINTS + 4
    assert {min(values), max(values)} <= {points[at] for at in kept}
    assert len(values) > KEPT_POINTS or kept == list(points)


def test_nodes_that_are_all_alike_are_told_and_not_drawn(records: dict[str, RunRecord]) -> None:
    alike = dataclasses.replace(records["record"], accuracy=Accuracy(91.5, [85.0, 91.5], [91.5] * 5))
    found, steady = charts([alike])
    assert "nodes" not in [chart.key for chart in found]
    assert ([("test set", "91.5 %")], True) in [(each.values, each.own_eyes) for each in steady]


def test_runs_measured_on_own_data_alone_are_compared_for_the_nodes_own_eyes(
    records: dict[str, RunRecord],
) -> None:
    own = [
        dataclasses.replace(
            records["record"],
            name=f"epsilon {epsilon}",
            privacy=dataclasses.replace(records["record"].privacy, epsilon=epsilon),
            accuracy=Accuracy(own=70.0 + epsilon, own_by_node=[60.0, 80.0]),
        )
        for epsilon in (1.0, 3.0)
    ]
    exchange = drawn(*own)["exchange"]
    assert [[y for y in series.y if y is not None] for series in exchange.series] == [[71.0], [73.0]]
    assert exchange.own_eyes
    assert not exchange.printed
    assert '<span class="unprinted">71.0 % ' in render(own)


# Epsilon by round


def spent(record: RunRecord) -> list[tuple[int, float]]:
    return by_round(record.unit, record.charges, record.privacy.epsilon)


def test_epsilon_by_round_adds_up_in_node_swap(records: dict[str, RunRecord]) -> None:
    record = records["node-swap"]
    sums = np.cumsum([log.epsilon for log in record.rounds])
    np.testing.assert_allclose([epsilon for _, epsilon in spent(record)], sums, rtol=1e-12)
    assert spent(record)[-1][1] == record.privacy.epsilon


def test_epsilon_by_round_is_the_accountants_in_the_unit_record(
    records: dict[str, RunRecord],
) -> None:
    record = records["record"]
    found = spent(record)
    at, epsilon = found[len(found) // 2]
    log = record.rounds[0]
    assert log.used is not None
    sampling = record.charges[0][1].event.sampling
    kind = Charge.gaussian(log.scale / log.used, sampling, at + 1)
    assert epsilon == pytest.approx(total([kind], 1e-5).epsilon, rel=1e-9)
    assert all(a[1] < b[1] for a, b in pairwise(found))
    assert found[-1] == (len(record.rounds) - 1, record.privacy.epsilon)


def test_the_node_that_paid_most_is_followed_where_nodes_draw_at_rates_of_their_own() -> None:
    """Three nodes, three lines a round: what the others paid is not added to what one has spent."""
    algorithm = dpps.PartPSP(nn.Linear(6, 3), batch_size=[20, 10, 4], lr_shared=0.1)
    unit = dpps.Record(noise_multiplier=1.0)
    run = dpps.Run(algorithm, toy_data(3), topology="ring", privacy=unit, seed=0).fit(epochs=2)
    record = read_run(run, "own rates")
    assert len(record.charges) == len(run.log)
    found = spent(record)
    at, epsilon = found[len(found) // 2]
    dearest = Charge.gaussian(1.0, 0.5, at + 1)
    assert epsilon == pytest.approx(total([dearest], 1e-5).epsilon, rel=1e-6)
    assert all(a[1] < b[1] for a, b in pairwise(found))


def test_nothing_is_spent_without_a_unit(records: dict[str, RunRecord]) -> None:
    assert spent(records["none"]) == []
