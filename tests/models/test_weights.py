"""Weight files: what is loaded, what is left fresh, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dpps.errors import UsageError
from dpps.models import MLP, ResNet18, load_weights
from tests.support.models import SMALL, randomise, small, tiny_vit


def save(state: dict[str, Tensor], file: Path) -> Path:
    if file.suffix == ".safetensors":
        save_file(state, file)
    else:
        torch.save(state, file)
    return file


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_and_statistics_round_trip(suffix: str, tmp_path: Path) -> None:
    source, x = small("resnet-batch")
    target = SMALL["resnet-batch"][0]().eval()
    assert not torch.equal(target(x), source(x))
    assert load_weights(target, save(source.state_dict(), tmp_path / f"w{suffix}")) == []
    assert torch.equal(target(x), source(x))
    assert all(p.requires_grad for p in target.parameters())


def test_another_head_is_left_fresh_and_reported(tmp_path: Path) -> None:
    source = randomise(ResNet18(classes=5))
    file = save(source.state_dict(), tmp_path / "imagenet.pth")
    target = ResNet18(classes=3)
    head = target.fc.weight.clone()
    assert load_weights(target, str(file)) == ["fc.weight", "fc.bias"]
    assert torch.equal(target.fc.weight, head)
    assert all(
        torch.equal(t, source.state_dict()[n]) for n, t in target.state_dict().items() if "fc" not in n
    )


def test_a_head_is_never_loaded_by_half(tmp_path: Path) -> None:
    state = tiny_vit().state_dict()
    state["heads.head.weight"], state["heads.head.bias"] = torch.ones(3, 9), torch.ones(3)
    target = tiny_vit()
    assert load_weights(target, save(state, tmp_path / "w.pt")) == ["heads.head.weight", "heads.head.bias"]
    assert torch.all(target.get_parameter("heads.head.bias") == 0)


def test_only_the_batch_counter_may_be_missing(tmp_path: Path) -> None:
    state = {n: t for n, t in ResNet18().state_dict().items() if not n.endswith("num_batches_tracked")}
    file = save(state, tmp_path / "old.pth")
    assert len(state) == 102
    assert load_weights(ResNet18(), file) == []
    del state["bn1.running_mean"]
    with pytest.raises(UsageError, match=r"old\.pth.*ResNet18: bn1\.running_mean 64 "):
        load_weights(ResNet18(), save(state, file))


def test_misfits_are_listed_and_nothing_is_copied(tmp_path: Path) -> None:
    state = {n: t + 1 for n, t in MLP((4, 3, 2)).state_dict().items()}
    state["layer2.weight"] = torch.zeros(2, 5)
    state["extra"] = torch.tensor(1.0)
    del state["layer1.bias"]
    model = MLP((4, 3, 2))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        load_weights(model, save(state, tmp_path / "w.pt"))
    message = str(caught.value)
    parts = "MLP", "layer1.bias 3 ", "extra", "scalar", "layer2.weight", "2x5", "2x3"
    assert all(part in message for part in parts)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_long_list_of_misfits_is_cut(tmp_path: Path) -> None:
    file = save(tiny_vit().state_dict(), tmp_path / "vit.pt")
    with pytest.raises(UsageError) as caught:
        load_weights(MLP((4, 3, 2)), file)
    message = str(caught.value)
    misfits = 4 + len(tiny_vit().state_dict())
    assert message.count(";") == 8
    assert f"and {misfits - 8} more" in message
    assert "\n" not in message


class NotTensors:
    """Something a weights-only reader must not construct."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.pt", b"hello", r"text\.pt.*torch\.save"),
        ("empty.pt", b"", r"empty\.pt.*torch\.save"),
        ("zip.pt", b"PK\x03\x04junk", r"zip\.pt.*torch\.save"),
        ("text.safetensors", b"hellohellohello", "safetensors file"),
        ("empty.safetensors", b"", "safetensors file"),
        ("list.pt", [1, 2], "state dict"),
        ("nested.pt", {"state_dict": {"layer1.bias": torch.zeros(1)}}, "state dict"),
        ("none.pt", {}, "state dict"),
        ("numbers.pt", {1: torch.zeros(1)}, "state dict"),
        ("object.pt", NotTensors(), r"object\.pt.*torch\.save"),
    ],
)
def test_files_that_are_no_state_dict(name: str, content: object, message: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(UsageError, match=message) as caught:
        load_weights(MLP((4, 3, 2)), file)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = save(MLP((4, 3, 2)).state_dict(), tmp_path / "w.pt")
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UsageError, match=r"w\.pt.*torch\.save"):
        load_weights(MLP((4, 3, 2)), file)


def test_a_missing_file_or_a_directory_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pt", tmp_path):
        with pytest.raises(UsageError, match=f"weights file '{path}'"):
            load_weights(MLP((4, 3, 2)), path)
