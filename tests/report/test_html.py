"""The one writer of pages: everything is escaped, nothing is loaded, values read well."""

import pytest
from jinja2 import UndefinedError

from dpps.report import fill, small
from dpps.report.page import _environment


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [
        ("{{ x | number }}", None, "-"),
        ("{{ x | percent }}", 97.26, "97.3 %"),
        ("{{ x | size }}", 2_500_000, "2.5 MB"),
        ("{{ x | size }}", 12, "12 B"),
        ("{{ x | duration }}", 90.0, "90.0 s"),
        ("{{ x | duration }}", 7800.0, "2 h 10 min"),
        ("{{ x | setting }}", True, "yes"),
        ("{{ x | setting }}", 1e-5, "1e-5"),
        ("{{ x | options | join('|') }}", "dpps train --seed 3 --quiet", "dpps train|--seed 3|--quiet"),
    ],
)
def test_values_for_people(template: str, value: object, text: str) -> None:
    assert _environment().from_string(template).fill(x=value) == text


def test_pages_are_escaped_and_a_missing_fact_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        fill("run.html")
    assert _environment().autoescape("page.html")
    assert not _environment().autoescape("card.md")
    assert small(2.5e-4) == "0.00025"
