"""A first schema."""

import pytest

from dpps.data import Column, guess_schema, read_table, rounded_range
from dpps.errors import UsageError


@pytest.mark.parametrize(
    ("numbers", "range_"),
    [
        ([36.2, 40.9], (36, 42)),
        ([18, 93], (0, 100)),
        ([0, 1], (0, 1)),
        ([-3, 4], (-4, 4)),
        ([7, 7], (0, 10)),
        ([0, 0], (0, 1)),
        ([80, 340], (0, 400)),
        ([28, 92], (20, 100)),
        ([0.012, 0.019], (0.012, 0.02)),
        ([1e9, 1e9 + 1e-6], (1e9, 1e9 + 1)),
        ([1e-320, 2e-320], (0, 1e-300)),
    ],
)
def test_ranges_are_round_and_hold_all_numbers(numbers, range_):
    assert rounded_range(numbers) == range_


def guessed(tmp_path, label="ill"):
    lines = ["run,name,age,ward,ill,blank"]
    lines += [
        f"{k * 5 % 24},n{k:03},{20 + 3 * k if k % 5 else 'NA'},{'ab'[k % 2]},{k % 3 // 2}.0,"
        for k in range(24)
    ]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines))
    return guess_schema(read_table(path), label)


def test_kinds_are_guessed(tmp_path):
    schema = guessed(tmp_path)
    assert schema.columns == (
        Column("run", "ignore"),
        Column("name", "ignore"),
        Column("age", "number", (20, 100)),
        Column("ward", "category", values=("a", "b")),
        Column("blank", "ignore"),
    )
    assert schema.classes == ("0", "1")


@pytest.mark.parametrize(
    ("label", "told"), [("il", "'il'.*'ill'"), ("name", "'name' .*24"), ("blank", "'blank' .*0")]
)
def test_a_label_must_have_classes(tmp_path, label, told):
    with pytest.raises(UsageError, match=told):
        guessed(tmp_path, label)


def test_numbers_of_any_size_have_a_range():
    low, high = rounded_range([-1.5e308, 1.5e308])
    assert low <= -1.5e308 < 1.5e308 <= high


def test_a_file_without_inputs_is_refused(tmp_path):
    (tmp_path / "t.csv").write_text("name,ill\n" + "".join(f"n{k},{k % 2}\n" for k in range(30)))
    with pytest.raises(UsageError, match=r"t\.csv: .*number or category"):
        guess_schema(read_table(tmp_path / "t.csv"), "ill")
