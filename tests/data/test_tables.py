"""Tables as people have them."""

import sys

import numpy as np
import pytest

from dpps.data import read_table
from dpps.data.tables import as_number
from dpps.errors import UsageError


def written(tmp_path, text, name="t.csv", encoding="utf-8"):
    path = tmp_path / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_separators_quotes_blank_lines_and_line_ends(tmp_path, mark):
    text = f'\ufeffname{mark}"a, ""b""; c"\r\n\r\nx{mark}"two\nlines"\r\n y {mark} 2\r\n'
    table = read_table(written(tmp_path, text))
    assert table.names == ("name", 'a, "b"; c')
    assert list(table.columns.values()) == [["x", "y"], ["two\nlines", "2"]]
    assert table.separator == mark


def test_a_quoted_cell_may_hold_the_separator_and_line_ends(tmp_path):
    table = read_table(written(tmp_path, 'name,note\nx,"two\nlines, and a comma"\n\ny,2\n'))
    assert table.columns == {"name": ["x", "y"], "note": ["two\nlines, and a comma", "2"]}
    assert table.lines == [2, 5]
    assert table.place(1, "note").endswith("t.csv, line 5, column 2 (note)")


def test_a_column_of_row_numbers_needs_no_name(tmp_path):
    assert read_table(written(tmp_path, ",age\n0,3\n")).names == ("column 1", "age")


def test_a_header_is_told_from_numbers(tmp_path):
    assert read_table(written(tmp_path, "1,2\n3,4\n"), headed=None).columns == {
        "column 1": ["1", "3"],
        "column 2": ["2", "4"],
    }
    assert read_table(written(tmp_path, "a,2\n3,4\n"), headed=None).columns == {"a": ["3"], "2": ["4"]}


@pytest.mark.parametrize(
    ("text", "separator", "number"),
    [("1.5", ",", 1.5), ("1,5", ";", 1.5), ("1,5", ",", None), ("1.234,5", ";", None), ("-2e3", "", -2000)]
    + [(word, ";", None) for word in ("", "nan", "inf", "1_000", "x")],
)
def test_numbers(text, separator, number):
    assert as_number(text, separator) == number


def test_parquet_is_read_as_the_same_table(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"age": [1.5, None, 3.0], "ward": ["a", None, "b"], "ill": [True, False, None]}
    parquet.write_table(arrow.table(columns), tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet")
    assert table.columns == {"age": ["1.5", "", "3.0"], "ward": ["a", "", "b"], "ill": ["true", "false", ""]}
    assert table.place(2, "age").endswith("row 3, column 1 (age)")


def test_parquet_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pyarrow .*'dpps\[tables\]'"):
        read_table(written(tmp_path, "PAR1", "t.parquet"))


def test_arrays_under_the_names_of_their_columns(tmp_path):
    np.savez(tmp_path / "t.npz", age=np.array([1.5, np.nan]), ward=np.array(["a", "b"]))
    assert read_table(tmp_path / "t.npz").columns == {"age": ["1.5", ""], "ward": ["a", "b"]}


WRONG = {
    "": "t.csv",
    "a,b\n": "t.csv",
    "a\n1\n": "1 column",
    "a,b,a\n1,2,3\n": "columns 1 and 3 .*'a'",
    "a,b\n1,2\n1,2,3\n": "line 3: 3 cells .*2 in line 1",
    'a,b\n1,2\n"1,2\n3,4\n': "line 3: .*quotes",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_told_in_one_line_with_its_place(tmp_path, text):
    with pytest.raises(UsageError, match=WRONG[text]) as error:
        read_table(written(tmp_path, text))
    assert "\n" not in str(error.value)
    assert "t.csv" in str(error.value)


def test_other_encodings_files_and_shapes_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"line 3: .*0xfc .*UTF-8"):
        read_table(written(tmp_path, "a,b\n1,2\nSüd,3\n", encoding="latin-1"))
    with pytest.raises(UsageError, match=r"t\.xlsx .*\.csv, \.tsv, \.parquet, \.npz"):
        read_table(tmp_path / "t.xlsx")
    with pytest.raises(UsageError, match=r"absent\.csv .*No such file"):
        read_table(tmp_path / "absent.csv")
    np.savez(tmp_path / "t.npz", x=np.zeros((2, 2)), y=np.zeros(2))
    with pytest.raises(UsageError, match="'x' has 2 dimensions"):
        read_table(tmp_path / "t.npz")
    np.savez(tmp_path / "u.npz", a=np.zeros(3), b=np.zeros(2))
    with pytest.raises(UsageError, match=r"u\.npz: .*2 and 3 values"):
        read_table(tmp_path / "u.npz")
    for name in ("broken.npz", "broken.parquet"):
        with pytest.raises(UsageError, match=r"broken\."):
            read_table(written(tmp_path, "not such a file", name))
    with pytest.raises(UsageError, match=r"cut\.npz "):
        read_table(written(tmp_path, "PK\x03\x04 cut short", "cut.npz"))
