"""The one writer of HTML pages and other text: templates, with style and script put into the page, which loads nothing."""

import re
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from dpps.report.axes import number

NOTHING = "-"
"""Stands where there is no value."""


def render(template: str, **facts: Any) -> str:
    """The text of a template; everything put into HTML is escaped."""
    return _environment().get_template(template).render(facts)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("dpps.report"),
        autoescape=select_autoescape(("html",)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals["asset"] = _asset
    environment.filters |= {
        "number": lambda value: NOTHING if value is None else number(value),
        "percent": lambda value: NOTHING if value is None else f"{value:.1f} %",
        "small": small,
        "setting": _setting,
        "size": _size,
        "duration": _duration,
        "options": _options,
    }
    return environment


def _asset(name: str) -> Markup:
    """A file of this package that is no template: it goes into the page as it is."""
    return Markup(files("dpps.report").joinpath(name).read_text(encoding="utf-8"))


def small(value: float) -> str:
    """As short as it can be: 1e-5."""
    return re.sub(r"e-0*", "e-", f"{value:g}")


def _setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return small(value) if isinstance(value, float) else str(value)


def _options(command: str) -> list[str]:
    """A command line in pieces that belong on one line."""
    return re.split(r" (?=--)", command)


def _size(count: int | None) -> str:
    if not count:
        return NOTHING
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
