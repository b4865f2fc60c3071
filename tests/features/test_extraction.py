"""Features of a data set: computed once, kept under the name of what they are made of."""

from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpps import data
from dpps.data import FeatureSet, Images
from dpps.errors import UsageError
from dpps.features import FEATURES, extract, of_data_set
from dpps.learning import NodeData


class Counting(nn.Module):
    """Twice the input, and of how many examples."""

    seen = 0

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        Counting.seen += len(x)
        return x * self.factor


X, T = torch.rand(300, 4), torch.arange(300) % 3


def computed(module: nn.Module, dataset: Dataset[object], folder: Path) -> bool:
    """Whether all features were computed; the first ones always are."""
    before = Counting.seen
    extract(module, dataset, folder, progress=False)
    return Counting.seen - before >= len(X)


def test_all_examples_in_order() -> None:
    found = extract(Counting(), TensorDataset(X, T), progress=False)
    torch.testing.assert_close(found.inputs(), (2 * X).half().float())
    assert torch.equal(found.labels, T)
    assert found.shape == (4,)


def test_any_map_style_data_set() -> None:
    class Items(Dataset[tuple[Tensor, int]]):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, k: int) -> tuple[Tensor, int]:
            return X[k], k

    found = extract(Counting(), Items(), progress=False)
    torch.testing.assert_close(found.inputs(), (2 * X[:7]).half().float())
    assert found.labels.tolist() == list(range(7))


def test_the_second_time_they_are_read(tmp_path: Path) -> None:
    assert computed(Counting(), TensorDataset(X, T), tmp_path)
    assert not computed(Counting(), TensorDataset(X, T), tmp_path)
    (file,) = tmp_path.glob("features-*.safetensors")
    assert file.stat().st_mode & 0o777 == 0o600


def test_features_of_two_extractors_are_computed_at_once(tmp_path: Path) -> None:
    waited = []

    class During(Counting):
        def forward(self, x: Tensor) -> Tensor:
            other = Thread(
                target=extract,
                args=(Counting(3.0), TensorDataset(X, T), tmp_path),
                kwargs={"progress": False},
                daemon=True,
            )
            other.start()
            other.join(timeout=60)
            waited.append(other.is_alive())
            return super().forward(x)

    extract(During(), TensorDataset(X, T), tmp_path, progress=False)
    assert waited
    assert not any(waited)


def test_other_examples_or_another_extractor_are_computed(tmp_path: Path) -> None:
    computed(Counting(), TensorDataset(X, T), tmp_path)
    other = X.clone()
    other[299, 3] += 1e-3
    assert computed(Counting(), TensorDataset(other, T), tmp_path)
    assert computed(Counting(3.0), TensorDataset(X, T), tmp_path)


def test_kept_features_of_changed_code_are_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed(Counting(), TensorDataset(X, T), tmp_path)
    monkeypatch.setattr(Counting, "forward", lambda self, x: x * self.factor + 1)
    found = extract(Counting(), TensorDataset(X, T), tmp_path, progress=False)
    torch.testing.assert_close(found.inputs(), (2 * X + 1).half().float())
    (file,) = tmp_path.glob("features-*.safetensors")
    assert file.name in caplog.text


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(1)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("module", "told"),
    [
        (nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), "0.*BatchNorm"),
        (Mixes(), "batch"),
        (Random(), "random"),
        (Remembers(), "buffers"),
        (Pair(), "tuple"),
        (nn.Flatten(0), "shape"),
    ],
)
def test_features_come_from_their_own_example_alone(module: nn.Module, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        extract(module, TensorDataset(X, T), progress=False)


def test_running_statistics_do_not_change() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4)).train()
    found = extract(module, TensorDataset(X, T), progress=False)
    torch.testing.assert_close(found.inputs(), X.half().float(), atol=1e-3, rtol=1e-3)
    assert module[0].num_batches_tracked == 0


def test_a_damaged_file_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    computed(Counting(), TensorDataset(X, T), tmp_path)
    (file,) = tmp_path.glob("features-*.safetensors")
    file.write_bytes(file.read_bytes()[:50])
    assert computed(Counting(), TensorDataset(X, T), tmp_path)
    assert file.name in caplog.text
    assert not computed(Counting(), TensorDataset(X, T), tmp_path)


def test_the_extractor_stays_as_it_was() -> None:
    module = Counting().train()
    extract(module, TensorDataset(X, T), progress=False)
    assert module.training
    assert module.factor.requires_grad


def test_values_beyond_half_precision_are_refused() -> None:
    with pytest.raises(UsageError, match="normalise"):
        extract(Counting(1e6), TensorDataset(X, T), progress=False)


def test_a_batch_of_features_is_read_as_float32() -> None:
    parts = [FeatureSet(X[:100], T[:100]), FeatureSet(X[100:200], T[100:200])]
    read, labels = NodeData(parts).slice(3, 5)
    assert read.dtype == torch.float32
    torch.testing.assert_close(read, torch.stack([X[3:8], X[103:108]]).half().float())
    assert labels.tolist() == [T[3:8].tolist(), T[103:108].tolist()]


def test_threads_change_nothing() -> None:
    images = Images(torch.randint(0, 256, (300, 1, 12, 12), dtype=torch.uint8), T)
    module, threads = FEATURES["scattering"]((1, 12, 12)), torch.get_num_threads()
    alone = extract(module, images, progress=False)
    torch.set_num_threads(3)
    try:
        together = extract(module, images, progress=False)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(alone.inputs(), together.inputs(), atol=2e-3, rtol=2e-3)


def test_a_named_data_set(tmp_path: Path) -> None:
    small = data.load("mnist-mini")
    few = data.DataSet(small.name, small.train.part(0, 40), small.test.part(0, 10), 10, "")
    found = of_data_set(few, "scattering", tmp_path, progress=False)
    assert found.train.shape == (81, 7, 7)
    assert len(found.test) == 10
    assert len(list(tmp_path.glob("features-*"))) == 2


def test_a_channel_that_models_want_three_times_is_taken_once(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (6, 1, 12, 12), dtype=torch.uint8)
    plain, shifted = Images(pixels, T[:6]), Images(pixels, T[:6], (0.5,) * 3, (0.2,) * 3)
    first, second = (
        of_data_set(data.DataSet("x", part, part, 3, ""), "scattering", progress=False)
        for part in (plain, shifted)
    )
    assert second.train.shape == (81, 3, 3)
    assert torch.equal(first.train.inputs(), second.train.inputs())


def test_a_read_only_folder_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o555)
    assert computed(Counting(), TensorDataset(X, T), tmp_path)
    assert computed(Counting(), TensorDataset(X, T), tmp_path / "below")
    assert not list(tmp_path.iterdir())
    assert str(tmp_path) in caplog.text


def test_where_features_of_named_data_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = tmp_path / "mnist"
    own.mkdir()
    assert data.folder_beside("mnist", tmp_path) == own
    own.chmod(0o555)  # also root keeps to it
    assert data.folder_beside("mnist", tmp_path) == tmp_path / "cache" / "dpps" / "mnist"
    assert data.folder_beside("mnist-mini", tmp_path) == tmp_path / "cache" / "dpps" / "mnist-mini"
