"""Models of one's own by their name."""

import json
import sys

import pytest
from torch import nn

from dpps.cli import main
from dpps.errors import UsageError
from dpps.models import build

CODE = """
from math import prod
from torch import nn

def make(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), 8), nn.Tanh(), nn.Linear(8, classes))

class Wide(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.last = nn.Linear(prod(shape), 4), nn.Linear(4, classes)

def broken(shape, classes):
    raise ValueError("no images, no model")

def nothing(shape, classes):
    return nn.Tanh()

def text(shape, classes):
    return "a model"

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "my_own_models.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own_models", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("shared", "prefixes"),
    [("1", ("first",)), ("2", ("first", "last")), ("all", ("first", "last")), ("last.bias", ("last.bias",))],
)
def test_a_class_of_the_current_folder(here, shared, prefixes):
    model, found = build("my_own_models:Wide", shared, (3, 2), 5)
    assert isinstance(model, nn.Module)
    assert (model.first.in_features, model.last.out_features) == (6, 5)
    assert found == prefixes


def test_it_trains(here):
    words = "train --nodes 4 --epochs 1 --batch-size 250 --model my_own_models:make --shared all --quiet --out run"
    assert main(words.split()) == 0
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["config"]["model"] == "my_own_models:make"
    assert main(["report", "run"]) == 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("my_own_models:mkae", "'mkae'.*'make'"),
        ("my_own_models:", "package.module:callable"),
        ("absent_module_here:make", "absent_module_here.*ModuleNotFoundError"),
        ("my_own_models:broken", "ValueError: no images"),
        ("my_own_models:text", "str, .*nn.Module"),
        ("my_own_models:nothing", "my_own_models:nothing.*parameters"),
        ("my_own_models:number", "my_own_models:number.*int"),
    ],
)
def test_mistakes_are_one_line(here, name, told):
    with pytest.raises(UsageError, match=told) as error:
        build(name, "all", (4,), 2)
    assert "\n" not in str(error.value)
