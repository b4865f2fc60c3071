"""From cells to numbers by what is declared alone."""

import pytest
import torch

from dpps.data import Column, Schema, encode, encode_inputs, read_table
from dpps.errors import UsageError

SCHEMA = Schema(
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
    inputs, labels = encode(found, SCHEMA)
    assert inputs.tolist() == [[-1, 1, 0, 0], [0.5, 0, 1, 0], [0, 0, 0, 1]]
    assert labels.tolist() == [0, 1, 0]
    assert inputs.dtype == torch.float32
    assert inputs.shape[1] == SCHEMA.width


def test_an_example_is_encoded_the_same_whatever_the_others_are(tmp_path):
    """No statistic of the data enters: else a neighbouring data set would change every example."""
    alone = encode_inputs(table(tmp_path, "age,ward\n42,north\n"), SCHEMA)
    among = encode_inputs(table(tmp_path, "ward,age\nnorth,42\n2,99\n?,1\n"), SCHEMA)
    assert alone[0].equal(among[0])


def test_values_outside_of_the_range_count_as_its_ends_and_are_told(tmp_path, caplog):
    inputs = encode_inputs(table(tmp_path, "age,ward,extra\n-5,north,1\n300,2,1\n"), SCHEMA)
    assert inputs[:, 0].tolist() == [-1, 1]
    told = [record.getMessage() for record in caplog.records]
    assert all(shown in told[0] for shown in ("2 of 2", "age", "0 to 100"))
    assert "extra" in told[1]


def test_values_that_are_not_declared_may_count_as_missing(tmp_path):
    column = Column("ward", "category", values=("north",), undeclared="missing")
    inputs = encode_inputs(table(tmp_path, "ward,ill\nwest,no\n"), Schema((column,), "ill", ("no", "yes")))
    assert inputs.tolist() == [[0, 1]]


WRONG = {
    "age,ward,ill\n1,north,no\nx1,2,no\n": r"t.csv, line 3, column 1 \(age\) is 'x1'",
    "ill,age,ward\nno,1,nroth\n": r"line 2, column 3 \(ward\) is 'nroth'.*'north', '2'",
    "ill,age,ward\nmaybe,1,2\n": r"line 2, column 1 \(ill\) is 'maybe'.*'no', 'yes'",
    "ill,age,ward\n,1,2\n": r"line 2, column 1 \(ill\) ",
    "ill,aeg,ward\nno,1,2\n": "column 'age'.*'aeg'",
    "il,age,ward\nno,1,2\n": "label 'ill'.*'il'",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_cell_is_told_with_its_place_and_nothing_else(tmp_path, text, caplog):
    with pytest.raises(UsageError, match=WRONG[text]) as error:
        encode(table(tmp_path, text), SCHEMA)
    assert "\n" not in str(error.value)
    assert caplog.records == []
