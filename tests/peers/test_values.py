"""Values in a federation file are read strictly."""

import tomllib

import pytest

from dpps.peers import number_in, plain_table, text_in, toml_lines, whole_in


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (text_in, 3),
        (whole_in, True),
        (whole_in, 0),
        (whole_in, 1.0),
        (number_in, "1"),
        (number_in, True),
        (plain_table, {"a": [1]}),
        (plain_table, []),
    ],
)
def test_another_kind_is_refused(read, wrong: object) -> None:
    with pytest.raises(TypeError):
        read(wrong)


def test_what_is_written_is_read_back() -> None:
    table = {"name": 'a "b" \x7f é', "count": 3, "rate": 1e-5, "yes": True}
    assert tomllib.loads("\n".join(toml_lines(table))) == table
    assert plain_table(table) is table
