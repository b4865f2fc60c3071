"""The published facts are those of the files."""

import os

import pytest

from dpps.data import CLASSES, DATA_SETS, FACTS, load


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
    assert (len(found), tuple(found.pixels.shape[1:]), found.shape) == FACTS[name]
    assert int(found.labels.max()) + 1 == CLASSES


def test_every_data_set_is_known():
    assert set(FACTS) == set(DATA_SETS.names())
