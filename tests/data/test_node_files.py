"""Each node's own files."""

import numpy as np
import pytest
import torch

from dpps.data import check_headers, guess_schema, hold_out_own, read_examples, read_node, read_table
from dpps.errors import UsageError
from tests.support.hospitals import write_hospitals


def folder(path, **files):
    path.mkdir()
    for name, text in files.items():
        (path / f"{name}.csv").write_text(text)
    return path


def test_headers_are_compared(tmp_path):
    a = folder(tmp_path / "a", train="age,dose,label\n1,2,0\n")
    b = folder(tmp_path / "b", train="dose,age,label\n1,2,0\n")
    c = folder(tmp_path / "c", train="1,2,0\n")
    columns = {path: read_node(path, 2).columns for path in (a, b, c)}
    assert columns[a] == ("age", "dose", "label")
    assert columns[c] is None
    check_headers({a: columns[a], c: columns[c]})
    with pytest.raises(UsageError, match=r"column 1 is 'dose' in .*b and 'age' in .*a"):
        check_headers(columns)


def test_a_test_file_has_the_header_of_its_training_file(tmp_path):
    a = folder(tmp_path / "a", train="age,dose,label\n1,2,0\n", test="dose,age,label\n1,2,0\n")
    with pytest.raises(UsageError, match=r"column 1 is 'dose' in .*test.csv and 'age' in .*train.csv"):
        read_node(a, 2)


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_plain_numbers_need_no_schema(tmp_path, mark):
    rows = [("1.5", "2", "0"), ("3", "4", "1")]
    a = folder(tmp_path / "a", train="\n".join(mark.join(row) for row in rows))
    inputs, labels = read_node(a, 2).train
    assert inputs.tolist() == [[1.5, 2], [3, 4]]
    assert labels.tolist() == [0, 1]


def test_arrays_need_no_schema(tmp_path):
    np.savez(tmp_path / "train.npz", x=np.full((2, 1, 3, 3), 255, np.uint8), y=[0, 1])
    inputs, labels = read_node(tmp_path, 2).train
    assert inputs.shape == (2, 1, 3, 3)
    assert inputs.unique().tolist() == [1]
    assert labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("age,label\n1,0\nold,1\n", r"line 3, column 1 \(age\) is 'old'.*--schema .*--classes"),
        ("1,0\n,1\n", r"line 2, column 1 is ''"),
        ("1,0\n2,2\n", "labels .*0 to 2"),
        ("1,0\n2,0.5\n", "labels .*whole numbers"),
    ],
)
def test_what_is_no_number_is_told_with_its_place(tmp_path, text, told):
    with pytest.raises(UsageError, match=told):
        read_node(folder(tmp_path / "a", train=text), 2)


def test_a_folder_needs_one_training_file(tmp_path):
    with pytest.raises(
        UsageError, match=r"--node-data: .*train\.csv, train\.tsv, train\.parquet, train\.npz"
    ):
        read_node(tmp_path, 2)
    (tmp_path / "train.xlsx").touch()
    with pytest.raises(UsageError, match=r"\(train\.xlsx .*UTF-8\)"):
        read_node(tmp_path, 2)
    a = folder(tmp_path / "a", train="1,0\n")
    (a / "train.tsv").write_text("1\t0\n")
    with pytest.raises(UsageError, match=r"train\.csv and train\.tsv"):
        read_node(a, 2)


def test_with_a_schema_columns_are_told_apart_by_their_names(tmp_path):
    write_hospitals(tmp_path, (12, 12, 12))
    schema = guess_schema(read_table(tmp_path / "node-2" / "train.csv"), "diagnosis")
    files = [read_node(tmp_path / f"node-{node}", 0, schema) for node in range(3)]
    assert [tuple(file.train[0].shape) for file in files] == [(12, schema.width)] * 3
    assert [file.columns for file in files] == [None] * 3
    age = [column.name for column in schema.used].index("age")
    assert age == 1  # after the input of smoker
    width = schema.used[0].width
    header, first = (
        line.split(";") for line in (tmp_path / "node-1" / "train.csv").read_text().splitlines()[:2]
    )
    low, high = next(column.range for column in schema.columns if column.name == "age")
    shown = float(first[header.index("age")])
    assert float(files[1].train[0][0, width]) == pytest.approx(2 * (shown - low) / (high - low) - 1)


def test_a_file_alone(tmp_path):
    x = np.arange(6.0).reshape(2, 3)
    np.savez(tmp_path / "a.npz", x=x)
    found, labels = read_examples(tmp_path / "a.npz", 3, labelled=False)
    assert (found.numpy() == x).all()
    assert labels is None
    np.savez(tmp_path / "b.npz", x=x, y=np.array([1.0, 0.0]))
    assert read_examples(tmp_path / "b.npz", 3, labelled=True)[1].tolist() == [1, 0]
    (tmp_path / "c.csv").write_text("a,b,c,ill\n0,1,2,1\n3,4,5,0\n")
    for labelled in (True, False):
        found, labels = read_examples(
            tmp_path / "c.csv", 3, labelled=labelled, columns=["a", "b", "c", "ill"]
        )
        assert (found.numpy() == x).all()
        assert (labels.tolist() if labelled else labels) == ([1, 0] if labelled else None)
    assert read_examples(tmp_path / "c.csv", 4, labelled=False)[0].shape == (2, 4)


def test_a_file_alone_that_is_wrong(tmp_path):
    (tmp_path / "c.csv").write_text("a,b,c,ill\n0,1,2,?\n3,4,5,0\n")
    assert read_examples(tmp_path / "c.csv", 3, labelled=False)[0].shape == (2, 3)
    with pytest.raises(UsageError, match="line 2, column 4"):
        read_examples(tmp_path / "c.csv", 3, labelled=True)
    with pytest.raises(UsageError, match="column 1 is 'a' and was 'b'"):
        read_examples(tmp_path / "c.csv", 3, labelled=False, columns=["b", "a", "c", "ill"])
    with pytest.raises(UsageError, match=r"4 columns: .*\b2\b"):
        read_examples(tmp_path / "c.csv", 2, labelled=False)
    with pytest.raises(UsageError, match=r"4 columns: .*\b4\b.*label"):
        read_examples(tmp_path / "c.csv", 4, labelled=True)
    np.savez(tmp_path / "d.npz", x=np.ones((2, 3)), y=np.array([1]))
    with pytest.raises(UsageError, match=r"2 examples .*1 labels"):
        read_examples(tmp_path / "d.npz", 3, labelled=True)
    np.savez(tmp_path / "e.npz", x=np.array(["a", "b"]))
    with pytest.raises(UsageError, match=r"e\.npz: .*<U1 .*\(2,\)"):
        read_examples(tmp_path / "e.npz", 3, labelled=False)
    with pytest.raises(UsageError, match="array 'y'"):
        read_examples(tmp_path / "e.npz", 3, labelled=True)


def test_where_an_example_is_kept_depends_on_itself_alone():
    random = torch.Generator().manual_seed(0)
    x, labels = torch.randn(400, 3, generator=random), torch.randint(0, 2, (400,), generator=random)
    (train, _), (kept, of_kept) = hold_out_own(x, labels, 0.2, seed=0)
    assert len(train) + len(kept) == 400
    assert 50 < len(kept) < 110
    (fewer, _), (others, of_others) = hold_out_own(x[1:], labels[1:], 0.2, seed=0)
    assert len(train) - len(fewer) + len(kept) - len(others) == 1
    assert torch.equal(kept[-len(others) :], others)
    assert torch.equal(of_kept[-len(others) :], of_others)
    assert not torch.equal(hold_out_own(x, labels, 0.2, seed=1)[1][0], kept)


def test_headers_of_different_lengths_are_refused_by_their_files(tmp_path):
    a = folder(tmp_path / "a", train="age,dose,label\n1,2,0\n")
    b = folder(tmp_path / "b", train="age,label\n1,0\n")
    for files in ((a, b), (b, a)):
        with pytest.raises(UsageError) as refused:
            check_headers({path: read_node(path, 2).columns for path in files})
        told = str(refused.value)
        assert all(part in told for part in (f"{a} has 3", f"{b} has 2"))
        assert len(told.splitlines()) == 1
    c = folder(tmp_path / "c", train="age,dose,label\n1,2,0\n", test="age,label\n1,0\n")
    with pytest.raises(UsageError, match=r"test\.csv has 2"):
        read_node(c, 2)
