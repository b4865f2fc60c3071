"""Models that say how to use them, and loading them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import RunError, UsageError
from dpps.runs import Options, Run, Saved, choose, outputs

QUICK = {"nodes": 4, "batch_size": 500, "epochs": 1, "quiet": True}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "x"
    return Run.from_options(Options(out=out, **QUICK)).fit(1)


def test_loaded_models_are_those_of_the_run(run: Run):
    loaded = dpps.load(run.out)
    assert list(loaded) == [0, 1, 2, 3]
    x, _ = run.tests
    for model, own in zip(loaded.values(), run.models(), strict=True):
        assert not model.training
        assert torch.equal(outputs(model, x), outputs(own, x))
    right = [(outputs(m, x).argmax(1) == run.tests[1]).double().mean() * 100 for m in loaded.values()]
    assert [float(r) for r in right] == pytest.approx(run.accuracy_by_node)


def test_a_loaded_model_is_exported_for_use_without_this_package(run: Run, tmp_path: Path):
    """As docs/model.md has it."""
    model, x = dpps.load(run.out)[1], torch.rand(3, 1, 28, 28)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("examples")},))
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    more = torch.rand(7, 1, 28, 28)
    torch.testing.assert_close(again(more), model(more))


def test_building_leaves_the_random_numbers_alone(run: Run):
    before = torch.get_rng_state()
    dpps.load(run.out)
    assert torch.equal(before, torch.get_rng_state())


def test_files_say_what_is_needed(run: Run):
    with safe_open(run.out / "models" / "node-2.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["dpps"])
    assert facts["node"] == 2
    assert facts["model"]["name"] == "mlp"
    assert facts["input"]["classes"] == list(range(10))
    assert facts["shared"] == ["layer1.weight", "layer1.bias"]
    assert set(facts["shared"]) | set(facts["local"]) == set(run.state_dict(2))
    assert facts["privacy"] == run.privacy.to_json()
    assert facts["versions"]["dpps"] == dpps.__version__


def test_images_of_a_named_data_set_become_the_inputs_of_training(run: Run, tmp_path: Path):
    x, labels = run.tests
    pixels = (x * 255).round().to(torch.uint8).numpy()
    for name, images in (("a.npz", pixels), ("b.npz", pixels[:, 0])):
        np.savez(tmp_path / name, x=images, y=labels.numpy())
        found, told = Saved.read(choose(run.out, 0)[0]).examples(tmp_path / name, labelled=True)
        torch.testing.assert_close(found, x)
        assert torch.equal(told, labels)


def test_colours_are_shifted_and_channels_repeated(run: Run, tmp_path: Path):
    saved = Saved.read(choose(run.out, 0)[0])
    how = {"shape": [3, 2, 2], "mean": [0.0, 0.5, 1.0], "deviation": [1.0, 2.0, 4.0]}
    coloured = Saved(saved.path, {"input": saved.facts["input"] | how}, {})
    np.savez(tmp_path / "grey.npz", x=np.full((2, 1, 2, 2), 255, dtype=np.uint8))
    x, labels = coloured.examples(tmp_path / "grey.npz", labelled=False)
    assert labels is None
    assert x.shape == (2, 3, 2, 2)
    assert x[1, :, 1, 1].tolist() == [1.0, 0.25, 0.0]


def test_features_are_computed_of_the_inputs(tmp_path: Path):
    images = dpps.data.load("mnist-mini").test.part(0, 60)
    for node, part in enumerate(torch.arange(60).split(30)):
        (tmp_path / f"node-{node}").mkdir()
        for name, chosen in (("train", part[:25]), ("test", part[25:])):
            x, y = images.pixels[chosen].numpy(), images.labels[chosen].numpy()
            np.savez(tmp_path / f"node-{node}" / f"{name}.npz", x=x, y=y)
    own = {"node_data": tmp_path / "node-{rank}", "classes": 10, "nodes": 2, "batch_size": 5}
    config = Options(**own, features="scattering", model="linear", unit="none", out=tmp_path / "run")
    run = Run.from_options(config).fit(1)
    saved = Saved.read(choose(tmp_path / "run", 1)[1])
    x, _ = saved.examples(tmp_path / "node-1" / "test.npz", labelled=False)
    torch.testing.assert_close(x, run.held_out[1][0], rtol=0.01, atol=0.01)
    assert outputs(saved.load(), x).shape == (5, 10)


def test_a_run_made_in_python_needs_its_model(tmp_path: Path):
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    x, labels = torch.randn(3, 40, 6), torch.randint(0, 3, (3, 40))
    nodes = [TensorDataset(*part) for part in zip(x, labels, strict=True)]
    model = net()
    model[0].bias.requires_grad_(False)
    run = dpps.Run(
        dpps.PartPSP(model, ["0"], batch_size=10), nodes, topology="ring", folder=tmp_path / "run", seed=0
    )
    run.fit(epochs=1)
    run.save(tmp_path / "by hand")
    for folder in ("run", "by hand"):
        loaded = dpps.load(tmp_path / folder, model)
        for found, own in zip(loaded.values(), run.models(), strict=True):
            assert all(
                torch.equal(a, b)
                for a, b in zip(found.state_dict().values(), own.state_dict().values(), strict=True)
            )
    with pytest.raises(
        UsageError, match=r"torch\.nn\.modules\.container:Sequential.*dpps\.load\(folder, model="
    ):
        dpps.load(tmp_path / "run")
    with pytest.raises(UsageError, match=r"parameter '2\.\w+' .*Sequential"):
        dpps.load(tmp_path / "run", nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    with pytest.raises(UsageError, match=r"'0\.weight'.*Linear"):
        dpps.load(tmp_path / "run", nn.Linear(6, 4))
    with pytest.raises(UsageError, match=r"dpps\.load\(folder, model="):
        Saved.read(choose(tmp_path / "run", 0)[0]).examples(tmp_path / "new.csv", labelled=False)


def test_processes_below_a_folder_are_found(run: Run, tmp_path: Path):
    for rank, node in ((0, 1), (1, 3)):
        place = tmp_path / f"rank-{rank}" / "models"
        place.mkdir(parents=True)
        (place / f"node-{node}.safetensors").write_bytes(
            (run.out / "models" / f"node-{node}.safetensors").read_bytes()
        )
    assert list(dpps.load(tmp_path)) == [1, 3]
    assert list(dpps.load(tmp_path / "rank-1")) == [3]


def test_wrong_requests(run: Run, tmp_path: Path):
    with pytest.raises(UsageError, match=r"models.*--out"):
        dpps.load(tmp_path)
    with pytest.raises(UsageError, match=r"--node is 7: .* nodes 0, 1, 2, 3"):
        choose(run.out, 7)
    (tmp_path / "node-0.safetensors").write_bytes(b"nothing")
    with pytest.raises(RunError, match=r"node-0\.safetensors"):
        dpps.load(tmp_path)
    saved = Saved.read(choose(run.out, 0)[0])
    np.savez(tmp_path / "small.npz", x=np.zeros((2, 1, 5, 5)))
    with pytest.raises(UsageError, match=r"small\.npz.*\(1, 5, 5\).*\(1, 28, 28\)"):
        saved.examples(tmp_path / "small.npz", labelled=False)
    np.savez(tmp_path / "label.npz", x=np.zeros((2, 1, 28, 28)), y=np.array([0, 10]))
    with pytest.raises(UsageError, match=r"label\.npz.*0 to 10.*0 to 9"):
        saved.examples(tmp_path / "label.npz", labelled=True)


@pytest.mark.parametrize(
    "module", ["dpps.runs.saved_models", "dpps.runs.run", "dpps.runs.baselines", "dpps.api"]
)
def test_any_module_may_be_imported_first(module: str):
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
