"""The published facts are those of the files."""

import os

import pytest

from dpps.data import DATA_SETS, load


@pytest.mark.parametrize(
    "name",
    [
        "mnist-mini",
        *(pytest.param(n, marks=pytest.mark.slow) for n in DATA_SETS.names() if n != "mnist-mini"),
    ],
)
def test_facts(name, monkeypatch):
    if name == "mnist-mini":
        monkeypatch.delenv("DPPS_DATA", raising=False)
    elif "DPPS_DATA" not in os.environ:
        pytest.skip("needs $DPPS_DATA")
    found = load(name, progress=False).train
    recipe = DATA_SETS[name]
    described = recipe.examples, recipe.shape, recipe.input_shape, recipe.classes
    shapes = tuple(found.pixels.shape[1:]), found.shape
    assert (len(found), *shapes, int(found.labels.max()) + 1) == described
