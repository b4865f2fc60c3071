"""Data sets of nodes: whatever is map-style is read, and read once."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import dpps
from dpps.learning import NodeData, Poisson
from tests.support.learning import tiny, toy_data, train


class Listed(Dataset):
    """A map-style data set that is no tensor."""

    def __init__(self, tensors):
        self.items = list(zip(*tensors, strict=True))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        return self.items[k]


def test_any_map_style_data_set_and_unequal_sizes():
    data = [TensorDataset(*(part[: 40 - 7 * k] for part in d.tensors)) for k, d in enumerate(toy_data(3))]
    tensors, listed = (
        train(tiny(), ["layer1"], nodes=3, data=sets) for sets in (data, [Listed(d.tensors) for d in data])
    )
    assert torch.equal(tensors.shared, listed.shared)


class Broken(Listed):
    """Its third example cannot be read."""

    def __getitem__(self, k):
        if k == 2:
            raise OSError("a broken file")
        return super().__getitem__(k)


def test_where_failures_are_hidden_an_example_that_cannot_be_read_is_left_out_and_no_other():
    tensors = [d.tensors for d in toy_data(2, n=6)]
    whole, broken = NodeData([Listed(t) for t in tensors]), NodeData([Listed(tensors[0]), Broken(tensors[1])])
    samplers = [Poisson(data, [0, 1], (0.7, 0.7), 3) for data in (whole, broken)]
    broken.hides_failures = True
    hit = 0
    for round_ in range(20):
        (x, labels, mask), (x_left, labels_left, left) = (s.batch(round_) for s in samplers)
        assert torch.equal(x[left], x_left[left])
        assert torch.equal(labels[left], labels_left[left])
        gone = (mask & ~left).nonzero().tolist()
        assert [tensors[1][0][2].tolist()] * len(gone) == [x[k, e].tolist() for k, e in gone]
        hit += len(gone)
    assert 0 < hit < 20


def test_data_sets_that_are_slices_of_one_tensor_are_joined_without_a_copy():
    x, y = torch.randn(3, 20, 6), torch.randint(0, 3, (3, 20))
    rows = NodeData([TensorDataset(x[k], y[k]) for k in range(3)])
    parts = NodeData([TensorDataset(x.view(60, 6)[a : a + 20], y.view(60)[a : a + 20]) for a in (0, 20, 40)])
    for data in (rows, parts):
        got, labels = data.slice(5, 4)
        assert torch.equal(got, x[:, 5:9])
        assert torch.equal(labels, y[:, 5:9])
        assert got.data_ptr() == x[:, 5:9].data_ptr()


def test_images_of_different_kinds_are_read_one_by_one():
    grey, colour = (torch.randint(0, 256, (5, c, 2, 2), dtype=torch.uint8) for c in (1, 3))
    nodes = NodeData([dpps.data.Images(p, torch.arange(5), (0.0,) * 3, (1.0,) * 3) for p in (grey, colour)])
    x, labels = nodes.slice(1, 2)
    assert torch.equal(x[0], (grey[1:3] / 255).expand(-1, 3, -1, -1))
    assert torch.equal(x[1], colour[1:3] / 255)
    assert labels.tolist() == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("mean", "deviation"), [((0.0,), (1.0,)), ((0.0,) * 3, (1.0,) * 3), ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))]
)
@pytest.mark.parametrize("unit", [None, dpps.Record(noise_multiplier=1.0)])
def test_images_that_stay_bytes_train_like_their_floats(mean, deviation, unit):
    g = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (60, 1, 2, 3), dtype=torch.uint8, generator=g)
    whole = dpps.data.Images(pixels, torch.randint(0, 3, (60,), generator=g), mean, deviation)
    order = np.random.default_rng(0).permutation(60)
    images = [whole.ordered(order).part(a, b) for a, b in ((0, 20), (20, 43), (43, 60))]
    floats = [TensorDataset(part.inputs(), part.labels) for part in images]
    listed = [[part[i] for i in range(len(part))] for part in images]
    runs = []
    for sets in (images, floats, listed):
        torch.manual_seed(0)
        net = dpps.models.MLP((6 * len(mean), 4, 3))
        algorithm = dpps.PartPSP(net, ["layer1"], batch_size=7)
        options = {"topology": dpps.Ring(3), "privacy": unit, "seed": 0, "test": whole}
        runs.append(dpps.Run(algorithm, sets, **options).fit(epochs=3))
    for run in runs[1:]:
        assert torch.equal(run.shared, runs[0].shared)
        assert torch.equal(run.local, runs[0].local)
        assert run.accuracy == runs[0].accuracy
