"""Axes: values lie where they should, and ticks are round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpps.report import SIZE, Axis, number

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
