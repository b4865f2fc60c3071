"""Tables in Python."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpps.data import Column, Schema, table_dataset
from dpps.errors import UsageError
from dpps.learning import as_datasets

SCHEMA = Schema(
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
    (tmp_path / "schema.toml").write_text(SCHEMA.to_toml())
    arrow = pytest.importorskip("pyarrow").Table.from_pandas(frame)
    for source in (frame, arrow, tmp_path / "t.csv", str(tmp_path / "t.csv")):
        inputs, labels = table_dataset(source, tmp_path / "schema.toml").tensors
        assert inputs.tolist() == EXPECTED
        assert labels.tolist() == [1, 0, 1]


def test_a_wrong_cell_is_told_with_its_row(frame):
    frame["ward"] = ["1", "2", "x"]
    with pytest.raises(UsageError, match=r"data frame, row 3, column 1 \(ward\) is 'x'"):
        table_dataset(frame, SCHEMA)
    with pytest.raises(UsageError, match="data frame"):
        table_dataset(frame.iloc[:0], SCHEMA)
    with pytest.raises(UsageError, match=r"list: .*to_pandas\(\)"):
        table_dataset([1, 2], SCHEMA)


def test_a_frame_without_a_schema_is_told_what_to_do(frame):
    with pytest.raises(UsageError, match=r"node 0 .*DataFrame: .*table_dataset"):
        as_datasets([frame], nn.Linear(1, 1), functional.cross_entropy)
    dataset = table_dataset(frame, SCHEMA)
    assert as_datasets([dataset], nn.Linear(4, 2), functional.cross_entropy)[0][0][1] == torch.tensor(1)
