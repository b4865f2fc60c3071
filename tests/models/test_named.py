"""Models by name: what is built, which part is shared, models of one's own, and bad requests."""

import json
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dpps.cli import main
from dpps.errors import UsageError
from dpps.models import MLP, MLPResidual, ViT, build
from tests.support.models import count, shapes


@pytest.mark.parametrize(
    ("name", "shared", "size"),
    [
        ("mlp", "1", 7850),
        ("mlp", "2", 7850 + 8624),
        ("mlp-residual", "all", 24_324),
        ("resnet18", "1", 157_504),
        ("resnet18", "2", 157_504 + 525_568),
        ("resnet18", "all", 11_181_642),
        ("resnet18", "conv1,bn1", 9_536),
        ("vit", "1", 128 + 128 * 48 + 128),
        ("vit", "2", 1_335_690 - 1290),
        ("vit", "all", 1_335_690),
    ],
)
def test_shared_part_has_the_papers_size(name: str, shared: str, size: int) -> None:
    model, prefixes = build(name, shared, (1, 28, 28) if name.startswith("mlp") else (3, 32, 32), 10)
    assert count(model, prefixes) == size


def test_build_fits_the_data() -> None:
    assert shapes(build("mlp", "1", (3, 32, 32), 7)[0]) == shapes(MLP((3072, 10, 3072, 7)))
    assert shapes(build("mlp", "1", (30,), 2)[0]) == shapes(MLP((30, 10, 30, 2)))
    assert build("resnet18", "1", (1, 28, 28), 10)[0](torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert build("vit", "1", (1, 28, 28), 10)[0](torch.rand(2, 1, 28, 28)).shape == (2, 10)
    assert build("mlp-residual", "1", (3, 4, 4), 5)[0](torch.rand(2, 3, 4, 4)).shape == (2, 5)
    assert not list(build("resnet18", "1", (3, 32, 32), 10, norm="group")[0].buffers())


@pytest.mark.parametrize(
    ("shared", "residual"),
    [("1", 1), ("2", 2), ("all", 2), ("layer1", 1), ("layer1.weight", 1), ("layer1,layer2", 2)],
)
def test_residual_connection_follows_the_shared_part(shared: str, residual: int) -> None:
    model, _ = build("mlp-residual", shared, (4,), 2)
    assert isinstance(model, MLPResidual)
    assert model.residual == residual


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("resnet", "1", (3, 32, 32), 10), r"model 'resnet': .*'resnet18'"),
        (lambda: build("mlp", "3", (4,), 10), r"mlp '3': .*1, 2, all, layer1"),
        (lambda: build("mlp", "layer1,", (4,), 10), r"mlp ''"),
        (lambda: build("resnet18", "conv1,bn", (3, 8, 8), 10), r"'bn': .*'bn1'"),
        (lambda: build("cnn", "all", (1, 13, 28), 10), r"14 x 14.*13 x 28"),
        (lambda: build("cnn", "all", (30,), 10), r"cnn .*\(30,\): .*mlp"),
        (lambda: build("vit", "1", (28, 28), 10), r"vit .*\(28, 28\)"),
        (lambda: build("vit", "1", (3, 30, 30), 10), r"vit .* 4.*30x30"),
        (lambda: build("vit", "1", (3, 32, 28), 10), r"vit .*32x28"),
        (lambda: build("resnet18", "1", (3, 32, 32), 10, norm="layer"), r"norm 'layer': .*batch"),
        (lambda: ViT(image=30), r"patch 4 .* 30"),
        (lambda: ViT(heads=3), r"heads 3 .* 128"),
        (lambda: MLP((4,)), r"\(4,\).*two sizes"),
        (lambda: MLP((4, 0)), r"\(4, 0\).* 1"),
        (lambda: MLPResidual(3), r"residual 3: .*1 .*2"),
    ],
)
def test_bad_requests_name_value_and_remedy(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# Models of one's own

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
