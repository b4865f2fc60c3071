"""The public description of tables: read, guessed, and what it makes of cells; nothing comes from the data."""

import tomllib

import pytest
import torch
from torch import nn
from torch.nn import functional

import dpps
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
from dpps.data.schema import canonical
from dpps.errors import UsageError
from dpps.learning import as_datasets
from dpps.runs import Options
from dpps.tasks import Classification, Regression, Survival, rounded_range

SCHEMA = Schema(
    (
        Column("age", "number", (0.0, 120.0)),
        Column("dose", "number", (-0.5, 1e20)),
        Column("ward", "category", values=('north "1"', "süd\x7f\n\U0001f600"), undeclared="missing"),
        Column("id", "ignore"),
    ),
    Classification(("0", "1"), "ill"),
    ("", "-"),
)


def test_a_schema_is_what_its_file_says(tmp_path):
    path = tmp_path / "schema.toml"
    path.write_text(SCHEMA.to_toml(), encoding="utf-8")
    assert read_schema(path) == SCHEMA == read_schema(str(path))
    assert SCHEMA.width == 1 + 1 + 1 + 0
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
    ('name = "x"', 'name = "y"', "column .*'y'"),
    ('"number"', '"nubmer"', "'nubmer'.*'number'"),
    ('"number"', '"category"', "s.toml, column 'x' .*category 'range'"),
    ("[0, 1]", "[1, 0]", r"range .*\[1, 0\]"),
    ("[0, 1]", "[0, inf]", r"range .*\[0, inf\]"),
    ("[0, 1]", '"0 to 1"', "range .*0 to 1"),
    ('"number"\nrange = [0, 1]', '"ignore"', "s.toml"),
    ("[[columns]]", "[columns]", r"\[\[columns\]\]"),
    ("classes", "missing = [1]\nclasses", r"missing .*\[1\]"),
    ("classes", 'missing = "NA"\nclasses', "missing .*'NA'"),
]


SURVIVAL = """
[target]
kind = "survival"
time = "T"
event = "E"
edges = [1, 2]
[[columns]]
name = "sex"
kind = "category"
values = ["M", "F"]
aliases = {"F" = ["f"]}
[[columns]]
name = "seen"
kind = "date"
since = "2000-01-01"
range = [0, 10]
"""
WRONG_TARGETS = [
    ('aliases = {"F" = ["f"]}', 'aliases = {"X" = ["f"]}', "'X'"),
    ('aliases = {"F" = ["f"]}', 'aliases = {"F" = ["M"]}', "'M'"),
    ('aliases = {"F" = ["f"]}', 'aliases = ["f"]', "aliases is"),
    ('since = "2000-01-01"', 'since = "1.1.2000"', "since is"),
    ('since = "2000-01-01"', 'since = "2000-01-01"\nformat = "day"', "format is"),
    ("edges = [1, 2]", "edges = [2, 1]", r"edges is \[2, 1\]"),
    ("edges = [1, 2]", "edges = [-1, 2]", r"edges are \[-1.0, 2.0\]"),
    ('event = "E"', 'event = "T"', "time and event"),
    ('event = "E"', 'event = "sex"', "'sex'"),
    ('kind = "survival"', 'kind = "surviva"', "'surviva'.*'survival'"),
    ("[target]", 'label = "E"\n[target]', "label"),
]
MISTAKES = [(GOOD, *case) for case in WRONG] + [(SURVIVAL, *case) for case in WRONG_TARGETS]


@pytest.mark.parametrize(("text", "old", "new", "told"), MISTAKES)
def test_mistakes_are_told_in_one_line(text, old, new, told):
    assert parse_schema(tomllib.loads(text), "s.toml").width in (1, 2)
    with pytest.raises(UsageError, match=told) as error:
        parse_schema(tomllib.loads(text.replace(old, new)), "s.toml")
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
    return guess_schema(read_table(path), label=label)


def test_kinds_are_guessed(tmp_path):
    schema = guessed(tmp_path)
    assert schema.columns == (
        Column("run", "ignore"),
        Column("name", "ignore"),
        Column("age", "number", (20, 100)),
        Column("ward", "category", values=("a", "b")),
        Column("blank", "ignore"),
    )
    assert schema.task == Classification(("0", "1"), "ill")


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
    with pytest.raises(UsageError, match=r"t\.csv"):
        guess_schema(read_table(tmp_path / "t.csv"), label="ill")


# From cells to numbers

WARD = Schema(
    (
        Column("age", "number", (0.0, 100.0)),
        Column("ward", "category", values=("north", "2")),
        Column("id", "ignore"),
    ),
    Classification(("no", "yes"), "ill"),
)


def table(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text)
    return read_table(path)


def test_ranges_middles_categories_and_classes(tmp_path):
    found = table(tmp_path, "ill,id,ward,age\nno,a,north,0\nyes,b,2.0,75\nno,c,NA,\n")
    inputs, labels = encode(found, WARD)
    assert inputs.tolist() == [[-1, 0], [0.5, 1], [0, 0.5]]
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


def test_many_tables_give_one_line_of_each_kind(tmp_path, caplog):
    """A run reads a table per node: nobody reads 88 lines that say the same."""
    described = tmp_path / "schema.toml"
    described.write_text(WARD.to_toml())
    for node in range(88):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        (folder / "train.csv").write_text("age,ward,ill,extra\n300,north,no,1\n20,2,yes,2\n")
    options = {"nodes": 88, "node_data": tmp_path / "node-{rank}", "schema": described}
    dpps.Run.from_options(Options(model="linear", shared="all", epochs=1, **options))
    outside, others = [m for m in caplog.messages if str(tmp_path) in m]
    assert all(shown in outside for shown in ("node-0", "87", "88 of 176", "age", "0 to 100"))
    assert "extra" in others


def test_values_that_are_not_declared_may_count_as_missing(tmp_path):
    column = Column("ward", "category", values=("north", "south"), undeclared="missing", missing=True)
    schema = Schema((column,), Classification(("no", "yes"), "ill"))
    inputs = encode_inputs(table(tmp_path, "ward,ill\nwest,no\nsouth,no\nnorth,no\n,no\n"), schema)
    assert inputs.tolist() == [[0, 1], [1, 0], [0, 0], [0, 1]]


def test_aliases_decimal_commas_dates_and_what_is_missing(tmp_path):
    """A table as a hospital has it."""
    text = """
decimal = ","
[target]
kind = "number"
column = "stay"
range = [0, 60]
[[columns]]
name = "sex"
kind = "category"
values = ["M", "F"]
aliases = {"F" = ["f", "female"], "M" = ["male"]}
[[columns]]
name = "born"
kind = "date"
since = "1920-01-01"
range = [0, 36525]
format = "%d.%m.%Y"
[[columns]]
name = "crp"
kind = "number"
range = [0, 100]
missing = true
"""
    schema = parse_schema(tomllib.loads(text), "s.toml")
    assert parse_schema(tomllib.loads(schema.to_toml()), "s.toml") == schema
    assert (schema.width, schema.task) == (4, Regression(0, 60, "stay"))
    cells = "sex\tborn\tcrp\tstay\nfemale\t01.01.1920\t12,5\t30\nM\t31.12.2019\t\t7,5\nmale\t\t100\t90\n"
    path = tmp_path / "t.tsv"
    path.write_text(cells)
    inputs, targets = encode(read_table(path), schema)
    torch.testing.assert_close(
        inputs, torch.tensor([[1, -1, -0.75, 0], [0, 36524 / 18262.5 - 1, 0, 1], [0, 0, 1, 0]])
    )
    assert targets.tolist() == [[0.0], [-0.75], [1.0]]
    assert schema.length == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 3) ** 0.5)


def test_times_and_events_become_targets_and_never_inputs(tmp_path):
    task = parse_schema(tomllib.loads(SURVIVAL), "s.toml").task
    assert task == Survival((1.0, 2.0), "T", "E")
    schema = Schema((Column("age", "number", (0, 100)),), task)
    inputs, targets = encode(table(tmp_path, "T,E,age\n0.5,yes,50\n7,0.0,100\n3,TRUE,0\n"), schema)
    assert inputs.tolist() == [[0], [1], [-1]]
    assert targets.tolist() == [[0.5, 1], [7, 0], [3, 1]]
    with pytest.raises(UsageError, match=r"column 2 \(E\) is '2'"):
        encode(table(tmp_path, "T,E,age\n0.5,2,50\n"), schema)
    with pytest.raises(UsageError, match=r"column 1 \(T\)"):
        encode(table(tmp_path, "T,E,age\n,1,50\n"), schema)


def test_a_draft_knows_dates_codes_decimal_commas_and_what_is_often_missing(tmp_path):
    rows = ["id\tadmitted\tsex\tcrp\tward\tdays\tdied"]
    rows += [
        f"p{k:03}\t{1 + k % 28:02}.0{1 + k % 9}.2021\t{k % 2 + 1}\t{k % 37},{k % 10}\t{'ab'[k % 2] if k % 5 else ''}\t{30 * k}\t{k % 3 == 0}"
        for k in range(60)
    ]
    path = tmp_path / "t.tsv"
    path.write_text("\n".join(rows))
    found = guess_schema(read_table(path), task="survival", time="days", event="died")
    assert found.columns == (
        Column("id", "ignore"),
        Column("admitted", "date", (0, 300), since="2021-01-01", format="%d.%m.%Y"),
        Column("sex", "category", values=("1", "2")),
        Column("crp", "number", (0, 40)),
        Column("ward", "category", values=("a", "b"), missing=True),
    )
    assert found.decimal == ","
    assert isinstance(found.task, Survival)
    assert (found.task.time, found.task.event, found.task.edges[-1]) == ("days", "died", 2000)
    assert "# guessed" in found.to_toml("  # guessed")
    stay = guess_schema(read_table(path), task="regression", label="days")
    assert stay.task == Regression(0, 2000, "days")
    assert "days" not in [column.name for column in stay.columns]
    with pytest.raises(UsageError, match="--event"):
        guess_schema(read_table(path), task="survival", time="days")
    with pytest.raises(UsageError, match="'id'"):
        guess_schema(read_table(path), task="regression", label="id")


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
    Classification(("false", "true"), "ill"),
)
EXPECTED = [[-1.0, 0], [0, 1], [0.5, 0.5]]


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
    assert as_datasets([dataset], nn.Linear(2, 2), functional.cross_entropy)[0][0][1] == torch.tensor(1)
