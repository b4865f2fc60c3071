"""Extractors of one's own by name: what is refused, and who notices other weights."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpps
from dpps.cli import main
from dpps.data import load
from dpps.errors import UsageError
from dpps.features import Preprocessing, build, checksum, extract, extraction, output_shape, with_checksum
from dpps.peers import Channel, Participation, read_plan
from dpps.runs import Options
from tests.support.peers import Organisations

CODE = """
import torch
from torch import nn
from dpps.features import Preprocessing

def backbone():
    network = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten())
    network.load_state_dict(torch.load("public.pt", weights_only=True))
    return network.eval(), Preprocessing(32)

def alone():
    return nn.Flatten().eval()

def trains():
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Dropout())).eval().append(nn.Dropout())

def statistics():
    return nn.BatchNorm2d(1, track_running_stats=False).eval()

def text():
    return "a module"

def function():
    return nn.Flatten().eval(), lambda x: x / 255

def several():
    return (nn.Flatten().eval(),) * 3

def large():
    return nn.Conv2d(3, 1, 1).eval()

def output():
    class Output(nn.Module):
        def forward(self, x):
            return {"logits": x}
    return Output().eval()

def broken():
    raise ValueError("no weights")
"""


def write_weights(folder: Path, seed: int) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8))
    torch.save(network.state_dict(), folder / "public.pt")
    extraction._own.cache_clear()  # another process would read the file again


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "backbones.py").write_text(CODE)
    write_weights(tmp_path, 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in ("my_package", "my_package.backbones"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


OWN = "my_package.backbones:backbone"
TRAIN = (
    f"train --features {OWN} --model linear --shared all --nodes 4 --epochs 2 --epsilon 3 --quiet --out run"
)


def test_features_of_a_module_and_its_preprocessing(here: Path) -> None:
    x = torch.rand(5, 1, 28, 28)
    found = build(OWN, (1, 28, 28))(x)
    network = nn.Sequential(nn.Conv2d(3, 8, 5, stride=4), nn.BatchNorm2d(8))
    network.load_state_dict(torch.load("public.pt", weights_only=True))
    larger = nn.functional.interpolate(x, size=(32, 32), mode="bilinear")
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    inside = nn.functional.adaptive_avg_pool2d(network.eval()((larger - mean) / std).relu(), 3).flatten(1)
    torch.testing.assert_close(found, nn.functional.layer_norm(inside, (72,)))
    assert output_shape(OWN, (1, 28, 28)) == (72,)
    assert output_shape("my_package.backbones:alone", (1, 28, 28)) == (784,)


def test_the_checksum_is_that_of_weights_and_preprocessing(here: Path) -> None:
    first = with_checksum(OWN)
    assert first == with_checksum(first) == f"{OWN}@{checksum(build(OWN, ()))}"
    write_weights(here, 1)
    assert with_checksum(OWN) != first
    with pytest.raises(UsageError, match=OWN):
        build(first, (1, 28, 28))
    assert with_checksum("scattering") == "scattering"
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert checksum(one) == checksum(other)
    assert checksum(Preprocessing(32)) not in (
        checksum(Preprocessing(64)),
        checksum(Preprocessing(32, std=(1, 1, 1))),
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent_module_here:make", "ModuleNotFoundError"),
        ("my_package.backbones:backbnoe", "'backbone'"),
        ("my_package.backbones:", "package.module:callable"),
        ("my_package.backbones:trains", "training.*eval"),
        ("my_package.backbones:text", "str"),
        ("my_package.backbones:function", "function"),
        ("my_package.backbones:several", "tuple"),
        ("my_package.backbones:broken", "ValueError: no weights.*my_features:make"),
        ("torch.nn:Linear", "TypeError.*in_features.*my_features:make"),
        ("my_package.backbones:large", "RuntimeError.*Preprocessing"),
        ("my_package.backbones:output", "dict"),
        ("my_package.backbones:statistics", "BatchNorm"),
    ],
)
def test_mistakes_are_one_line(here: Path, capsys: pytest.CaptureFixture[str], name: str, told: str) -> None:
    words = ["train", "--features", name, "--model", "linear", "--shared", "all", "--quiet", "--out", "run"]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(told, line), line
    assert not (here / "run").exists()


def test_a_run_its_models_and_its_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TRAIN.split()) == 0
    summary = json.loads((here / "run" / "summary.json").read_text())
    assert summary["config"]["features"] == with_checksum(OWN)
    assert summary["test_accuracy"] > 20
    assert main(["report", "run"]) == 0
    assert with_checksum(OWN) in (here / "run" / "report.html").read_text()
    test = load("mnist-mini").test
    np.savez("new.npz", x=test.pixels[:200].float().numpy() / 255, y=test.labels[:200].numpy())
    capsys.readouterr()
    assert main(["evaluate", "run", "--input", "new.npz"]) == 0
    assert main(["predict", "run", "--input", "new.npz", "--output", "p.csv"]) == 0
    write_weights(here, 1)
    for words in (["evaluate", "run", "--input", "new.npz"], ["resume", "run"], [*TRAIN.split(), "--resume"]):
        capsys.readouterr()
        assert main(words) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "features" in line


def test_predictions_are_those_of_the_same_features(here: Path) -> None:
    assert main(TRAIN.split()) == 0
    test = load("mnist-mini").test
    np.savez("new.npz", x=test.pixels[:50].float().numpy() / 255, y=test.labels[:50].numpy())
    assert main(["predict", "run", "--input", "new.npz", "--output", "p.csv", "--node", "0"]) == 0
    said = [int(line.split(",")[1]) for line in Path("p.csv").read_text().splitlines()[1:]]
    found = extract(build(OWN, (1, 28, 28)), test.part(0, 50), progress=False).inputs()
    assert said == dpps.load("run")[0](found).argmax(1).tolist()


def test_members_have_the_same_weights(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(
        features=OWN,
        model="linear",
        shared="all",
        nodes=3,
        topology="ring",
        declared_sizes="600",
        epsilon=3.0,
    )
    (here / "plan.toml").write_text(options.to_toml())
    plan, _ = read_plan(here / "plan.toml", 3)
    assert plan["features"] == with_checksum(OWN)
    three = Organisations(here, (7451, 7452), plan)
    (here / "federation.toml").write_text(three.federation.to_toml())
    with Participation("federation.toml", "hospital-a", "run-a"):
        """The same weights."""
    write_weights(here, 1)

    def start(*_: object) -> None:
        raise AssertionError("somebody is connected to")

    monkeypatch.setattr(Channel, "start", start)
    with pytest.raises(UsageError, match=OWN) as error:
        Participation("federation.toml", "hospital-b", "run-b")
    assert "\n" not in str(error.value)
    assert not (here / "run-b").exists()


def test_a_model_of_transformers_from_a_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
    )

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = transformers.ViTModel(config)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.vit(x).pooler_output

    few = load("mnist-mini").train.part(0, 20)
    extractor = nn.Sequential(Preprocessing(16), Pooled())
    found = extract(extractor, few, tmp_path, progress=False)
    assert found.shape == (16,)
    torch.testing.assert_close(found.inputs(), extract(extractor, few, tmp_path, progress=False).inputs())
