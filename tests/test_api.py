"""The names of the package: those that are promised are there, and lead to one thing each."""

import inspect
import re
from pathlib import Path

import dpps
from dpps import api


def test_every_promised_name_is_there_once_and_none_beside_it():
    assert len(set(api.__all__)) == len(api.__all__)
    assert all(getattr(dpps, name) is getattr(api, name) for name in api.__all__)
    public = {name for name in vars(api) if not name.startswith("_")}
    assert public == set(api.__all__) - {"__version__"}


def test_every_class_and_function_explains_itself():
    things = [getattr(api, name) for name in api.__all__]
    assert all(
        inspect.getdoc(thing) for thing in things if inspect.isclass(thing) or inspect.isfunction(thing)
    )


def test_the_reference_has_every_promised_name():
    page = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
    missing = [name for name in api.__all__ if not re.search(rf"\bdpps\.{name}\b", page)]
    assert missing == []
