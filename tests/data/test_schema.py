"""The public description of tables."""

import tomllib

import pytest

from dpps.data import Column, Schema, canonical, parse_schema, read_schema
from dpps.errors import UsageError

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
