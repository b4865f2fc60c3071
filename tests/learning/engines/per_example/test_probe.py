"""Models whose examples mix only for some values, whose layers are silent on made-up examples, or that fail on an example."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.errors import UsageError
from dpps.learning import OneByOne, Partition, per_example


class Positions(nn.Module):
    """Every position by itself, on an axis that has examples and positions; below the threshold nothing happens."""

    def __init__(self, threshold):
        super().__init__()
        self.threshold = threshold
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        h = F.relu(x.reshape(-1, 6) - self.threshold)
        return self.second(torch.tanh(self.first(h))).reshape(len(x), -1, 3).mean(1)


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_layers_that_are_silent_on_made_up_examples_are_not_guessed_at(threshold):
    torch.manual_seed(0)
    clip, model = 0.05, Positions(threshold)
    partition = Partition(model, "all")
    way = per_example(partition, F.cross_entropy, clip, torch.rand(5, 6), 8)
    s, l = (part[None] for part in partition.initial())
    x, target = threshold + torch.randn(1, 9, 5, 6), torch.randint(0, 3, (1, 9))
    x[0, 8] += 30
    mask = torch.ones(1, 9, dtype=torch.bool)
    found = way.sums(s, l, x, target, mask)[1].double()
    expected = OneByOne(partition, F.cross_entropy, clip, 8).sums(s, l, x, target, mask)[1].double()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    mask[0, 8] = False
    assert float((found - way.sums(s, l, x, target, mask)[1]).norm()) <= clip


class Scaled(nn.Module):
    """Mixes the examples of a batch only where a value is large."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(8 * self.how(x))))


@pytest.mark.parametrize(
    "how",
    [
        lambda x: x / x.amax().clamp(min=1),
        lambda x: x / 255 if x.max() > 1.5 else x,
        lambda x: x + F.relu(x - 2).sum(),
        lambda x: x - F.relu(-x - 2).sum(),
    ],
    ids=["clamped maximum", "branch on the maximum", "sum of what is large", "sum of what is negative"],
)
def test_mixing_that_shows_for_large_values_only_is_refused(how):
    with pytest.raises(UsageError, match=r"Scaled.*GroupNorm"):
        per_example(Partition(Scaled(how), "all"), F.cross_entropy, 1.0, torch.rand(6), 8)


def test_a_model_that_writes_over_its_inputs_is_refused():
    with pytest.raises(UsageError, match=r"x\.sub_"):
        per_example(Partition(Scaled(lambda x: x.sub_(0.5)), "all"), F.cross_entropy, 1.0, torch.rand(6), 8)


def test_an_example_on_which_the_model_fails_does_not_stop_a_run_with_secret_noise():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3))
    sets = []
    for node in range(3):
        x = torch.randint(0, 5, (20, 3))
        if node == 1:
            x[7, 0] = 99  # beyond the vocabulary
        sets.append(torch.utils.data.TensorDataset(x, torch.randint(0, 3, (20,))))
    options = {"topology": dpps.Ring(3), "privacy": dpps.Record(noise_multiplier=1.0, delta=1e-3), "seed": 0}
    algorithm = dpps.PartPSP(model, batch_size=10)
    run = dpps.Run(algorithm, sets, secure_noise=True, **options).fit(epochs=3)
    assert len(run.log) == 6
    assert bool(torch.isfinite(run.shared).all())
    with pytest.raises(IndexError):
        dpps.Run(algorithm, sets, **options).fit(epochs=3)


def test_gradients_beyond_all_numbers_have_a_factor_of_zero():
    way = OneByOne(Partition(nn.Linear(2, 2), "all"), F.cross_entropy, 1.0)
    factors = way._factors(torch.tensor([1e78, 4.0, 0.25], dtype=torch.float64), torch.float32)
    assert factors.tolist() == pytest.approx([0.0, 0.5, 1.0], rel=1e-3)
