"""The public description of tables: read, guessed, and what it makes of cells; nothing comes from the data."""

import tomllib

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpps.data import (
    Column,
    Schema,
    encode,
    encode_inputs,
    guess_schema,
    parse_schema,
    read_schema,
    read_table,
    table_dataset,
)
from dpps.data.schema import canonical, rounded_range
from dpps.errors import UsageError
from dpps.learning import as_datasets

SCHEMA = Schema(
    (
        Column("age", "number", (0.0, 120.0)),
        Column("dose", "number", (-0.5, 1e20)),
        Column("ward", "category", values=('north "1"', "süd\x7f\n\U0001f600"), undeclared="missing"),
        Column("id", "ignore"),
    ),
    "ill",
    ("0", "1"),
    ("", "-"),
)


def test_a_schema_is_what_its_file_says(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(SCHEMA.to_toml(), encoding="utf-8")
    assert read_schema(path) == SCHEMA == read_schema(str(path))
    assert SCHEMA.width == 1 + 1 + 3 + 0
    path.write_text("# a remark\n" + SCHEMA.to_toml(), encoding="utf-8")
    assert read_schema(path).checksum() == SCHEMA.checksum()
    path.write_text(SCHEMA.to_toml().replace("120", "121"), encoding="utf-8")
    assert read_schema(path).checksum() != SCHEMA.checksum()


def test_whole_numbers_are_compared_without_what_programs_add():
    assert [canonical(text) for text in ("1.0", "-2.0", "1", "01", "1.5", "v2.0", "True", "FALSE")] == [
        *("1", "-2", "1", "01", "1.5", "v2.0", "true", "false")
    ]


GOOD = """
label = "y"
classes = ["a", "b"]
[[columns]]
name = "x"
kind = "number"
range = [0, 1]
"""
WRONG = [
    ("label =", "lable =", "s.toml 'lable'.*'label'"),
    ('label = "y"', "label = 3", "label is 3"),
    ('"a", "b"', '"a"', r"classes .*\['a'\].*2 or more"),
    ('"a", "b"', "1, 1", r"classes .*\[1, 1\]"),
    ('"a", "b"', "0.5, 1", r"classes .*\[0\.5, 1\]"),
    ('name = "x"', "", "entry 1 of columns .*name"),
    ('name = "x"', 'name = "y"', "label .*'y'"),
    ('"number"', '"nubmer"', "'nubmer'.*'number'"),
    ('"number"', '"category"', "s.toml, column 'x' .*category 'range'"),
    ("[0, 1]", "[1, 0]", r"range .*\[1, 0\]"),
    ("[0, 1]", "[0, inf]", r"range .*\[0, inf\]"),
    ("[0, 1]", '"0 to 1"', "range .*0 to 1"),
    ('"number"\nrange = [0, 1]', '"ignore"', "number or category"),
    ("[[columns]]", "[columns]", r"\[\[columns\]\]"),
    ("classes", "missing = [1]\nclasses", r"missing .*\[1\]"),
    ("classes", 'missing = "NA"\nclasses', "missing .*'NA'"),
]


@pytest.mark.parametrize(("old", "new", "told"), WRONG)
def test_mistakes_are_told_in_one_line(old, new, told):
    assert parse_schema(tomllib.loads(GOOD), "s.toml").width == 1
    with pytest.raises(UsageError, match=told) as error:
        parse_schema(tomllib.loads(GOOD.replace(old, new)), "s.toml")
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_schema(tmp_path):
    with pytest.raises(UsageError, match=r"absent\.toml .*dpps data describe FILE --label COLUMN --out"):
        read_schema(tmp_path / "absent.toml")
    (tmp_path / "s.toml").write_text("label is y\n")
    with pytest.raises(UsageError, match=r"s\.toml .*TOML.*line 1"):
        read_schema(tmp_path / "s.toml")


# Guessing


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


# From cells to numbers

WARD = Schema(
    (
        Column("age", "number", (0.0, 100.0)),
        Column("ward", "category", values=("north", "2")),
        Column("id", "ignore"),
    ),
    "ill",
    ("no", "yes"),
)


def table(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    return read_table(path)


def test_ranges_middles_categories_and_classes(tmp_path):
    found = table(tmp_path, "ill,id,ward,age\nno,a,north,0\nyes,b,2.0,75\nno,c,NA,\n")
    inputs, labels = encode(found, WARD)
    assert inputs.tolist() == [[-1, 1, 0, 0], [0.5, 0, 1, 0], [0, 0, 0, 1]]
    assert labels.tolist() == [0, 1, 0]
    assert inputs.dtype == torch.float32
    assert inputs.shape[1] == WARD.width


def test_an_example_is_encoded_the_same_whatever_the_others_are(tmp_path):
    """No statistic of the data enters: else a neighbouring data set would change every example."""
    alone = encode_inputs(table(tmp_path, "age,ward\n42,north\n"), WARD)
    among = encode_inputs(table(tmp_path, "ward,age\nnorth,42\n2,99\n?,1\n"), WARD)
    assert alone[0].equal(among[0])


def test_values_outside_of_the_range_count_as_its_ends_and_are_told(tmp_path, caplog):
    inputs = encode_inputs(table(tmp_path, "age,ward,extra\n-5,north,1\n300,2,1\n"), WARD)
    assert inputs[:, 0].tolist() == [-1, 1]
    told = [record.getMessage() for record in caplog.records]
    assert all(shown in told[0] for shown in ("2 of 2", "age", "0 to 100"))
    assert "extra" in told[1]


def test_values_that_are_not_declared_may_count_as_missing(tmp_path):
    column = Column("ward", "category", values=("north",), undeclared="missing")
    inputs = encode_inputs(table(tmp_path, "ward,ill\nwest,no\n"), Schema((column,), "ill", ("no", "yes")))
    assert inputs.tolist() == [[0, 1]]


WRONG_CELLS = {
    "age,ward,ill\n1,north,no\nx1,2,no\n": r"t.csv, line 3, column 1 \(age\) is 'x1'",
    "ill,age,ward\nno,1,nroth\n": r"line 2, column 3 \(ward\) is 'nroth'.*'north', '2'",
    "ill,age,ward\nmaybe,1,2\n": r"line 2, column 1 \(ill\) is 'maybe'.*'no', 'yes'",
    "ill,age,ward\n,1,2\n": r"line 2, column 1 \(ill\) ",
    "ill,aeg,ward\nno,1,2\n": "column 'age'.*'aeg'",
    "il,age,ward\nno,1,2\n": "label 'ill'.*'il'",
}


@pytest.mark.parametrize("text", WRONG_CELLS)
def test_a_wrong_cell_is_told_with_its_place_and_nothing_else(tmp_path, text, caplog):
    with pytest.raises(UsageError, match=WRONG_CELLS[text]) as error:
        encode(table(tmp_path, text), WARD)
    assert "\n" not in str(error.value)
    assert caplog.records == []


# Tables in Python

FRAMES = Schema(
    (Column("age", "number", (0.0, 100.0)), Column("ward", "category", values=("1", "2"))),
    "ill",
    ("false", "true"),
)
EXPECTED = [[-1.0, 1, 0, 0], [0, 0, 1, 0], [0.5, 0, 0, 1]]


@pytest.fixture
def frame():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(
        {"ward": [1, 2, None], "ill": [True, False, True], "age": pandas.array([0, None, 75], dtype="Int64")}
    )


def test_frames_files_and_what_becomes_a_frame_are_the_same(frame, tmp_path):
    frame.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "schema.toml").write_text(FRAMES.to_toml())
    arrow = pytest.importorskip("pyarrow").Table.from_pandas(frame)
    for source in (frame, arrow, tmp_path / "t.csv", str(tmp_path / "t.csv")):
        inputs, labels = table_dataset(source, tmp_path / "schema.toml").tensors
        assert inputs.tolist() == EXPECTED
        assert labels.tolist() == [1, 0, 1]


def test_a_wrong_cell_of_a_frame_is_told_with_its_row(frame):
    frame["ward"] = ["1", "2", "x"]
    with pytest.raises(UsageError, match=r"data frame, row 3, column 1 \(ward\) is 'x'"):
        table_dataset(frame, FRAMES)
    with pytest.raises(UsageError, match="data frame"):
        table_dataset(frame.iloc[:0], FRAMES)
    with pytest.raises(UsageError, match=r"list: .*to_pandas\(\)"):
        table_dataset([1, 2], FRAMES)


def test_a_frame_without_a_schema_is_told_what_to_do(frame):
    with pytest.raises(UsageError, match=r"node 0 .*DataFrame: .*table_dataset"):
        as_datasets([frame], nn.Linear(1, 1), functional.cross_entropy)
    dataset = table_dataset(frame, FRAMES)
    assert as_datasets([dataset], nn.Linear(4, 2), functional.cross_entropy)[0][0][1] == torch.tensor(1)
