"""What is found out before round 0, on made-up examples: models and losses that the promise would not hold for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.errors import UsageError
from dpps.learning import OneByOne, Partition, check_model, choose_per_example
from dpps.learning.gradients.layers.recording import Batches
from dpps.learning.preflight import made_up, moved, refuse_inseparable
from tests.support.learning import make_run

EXAMPLE = torch.zeros(6), torch.tensor(0)


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
    way = choose_per_example(
        partition, F.cross_entropy, (torch.rand(5, 6), torch.tensor(0)), clip=clip, batch=8
    )
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
        check_model(Partition(Scaled(how), "all"), F.cross_entropy, EXAMPLE, per_example=True)


def test_a_model_that_writes_over_its_inputs_is_refused():
    with pytest.raises(UsageError, match=r"x\.sub_"):
        check_model(
            Partition(Scaled(lambda x: x.sub_(0.5)), "all"), F.cross_entropy, EXAMPLE, per_example=True
        )


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


# Models that write over their parameters


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "unit", [dpps.Record(noise_multiplier=1.0, delta=1e-3), dpps.Contribution(epsilon=1e4)]
)
def test_parameters_that_would_follow_the_data_without_noise_are_refused(unit, frozen):
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    model[0].weight.requires_grad_(not frozen)
    sets = [
        torch.utils.data.TensorDataset(torch.randint(0, 5, (8, 3)), torch.randint(0, 3, (8,)))
        for _ in range(2)
    ]
    run = make_run(unit, shared="all", model=model, data=sets, batch_size=4, topology=dpps.Ring(2))
    with pytest.raises(UsageError, match="max_norm=None"):
        run.start(epochs=1)


class MovingMean(nn.Module):
    """Keeps a mean of what it has seen in a parameter, by way of `.data`."""

    def __init__(self):
        super().__init__()
        self.center, self.layer = nn.Parameter(torch.zeros(6)), nn.Linear(6, 3)

    def forward(self, x):
        self.center.data.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x - self.center)


def test_writing_by_way_of_data_is_found_in_the_numbers():
    with pytest.raises(UsageError, match=r"center: .*max_norm=None"):
        check_model(Partition(MovingMean(), "all"), F.cross_entropy, EXAMPLE, per_example=False)


# Models that mix examples or draw numbers


class Functional(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.out, self.function = nn.Linear(6, 6), nn.Linear(6, 3), function

    def forward(self, x):
        return self.out(self.function(self.inner(x)))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.out(x)


def hooked():
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].register_forward_hook(lambda _, __, out: out - out.mean(0))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), "1: BatchNorm"),
        (hooked, "GroupNorm"),
        (lambda: nn.Sequential(Functional(lambda h: h - h.mean(0)), nn.Tanh()), "GroupNorm"),
        (lambda: Functional(lambda h: F.batch_norm(h, None, None, training=True)), "Functional.*GroupNorm"),
        (lambda: Functional(lambda h: h - h.mean(0)), "Functional.*GroupNorm"),
        (lambda: Functional(lambda h: h / h.detach().abs().max()), "Functional.*GroupNorm"),
        (lambda: Functional(lambda h: h.softmax(0)), "Functional.*GroupNorm"),
        (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 3)), "1: dropout"),
        (lambda: Functional(lambda h: F.dropout(h, 0.2)), "random numbers"),
        (lambda: Functional(lambda h: h + torch.randn_like(h)), "random numbers"),
        (lambda: Functional(lambda h: h.sum(0, keepdim=True)), "Functional"),
        (Remembers, "mean: .*buffers"),
    ],
)
def test_what_mixes_examples_or_draws_numbers_is_refused(make, message):
    with pytest.raises(UsageError, match=message):
        check_model(Partition(make(), "all"), F.cross_entropy, EXAMPLE, per_example=True)


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=dropout, batch_first=True)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x[:, None]
        return self.layer(self.attention(h, h, h)[0][:, 0])


class FunctionalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.view(-1, 1, 3, 2)
        return self.layer(F.scaled_dot_product_attention(h, h, h, dropout_p=0.3).flatten(1))


@pytest.mark.parametrize("make", [lambda: Attention(0.3), FunctionalAttention])
def test_random_numbers_in_the_model_are_refused_before_anything_is_sent(make):
    data = [torch.utils.data.TensorDataset(torch.randn(20, 6), torch.randint(0, 3, (20,)))] * 2
    unit = dpps.Record(noise_multiplier=1.0)
    run = make_run(unit, shared="all", model=make(), data=data, topology=dpps.Ring(2))
    with pytest.raises(UsageError, match=r"dropout.* 0 "):
        run.start(epochs=1).step()


def test_attention_without_dropout_is_accepted():
    data = [torch.utils.data.TensorDataset(torch.randn(20, 6), torch.randint(0, 3, (20,)))] * 2
    unit = dpps.Record(noise_multiplier=1.0)
    make_run(unit, shared="all", model=Attention(0.0), data=data, topology=dpps.Ring(2)).start(
        epochs=1
    ).step()


# Losses that do not treat examples one by one

WEIGHT = torch.tensor([1.0, 1.0, 5.0])


def weighted_each(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=WEIGHT, reduction="none")


def weighted_sum(outputs, targets):
    return F.cross_entropy(outputs, targets, weight=WEIGHT, reduction="sum")


def test_one_weight_among_a_thousand_classes_is_found():
    weight = torch.ones(1000)
    weight[777] = 1.5
    with pytest.raises(UsageError, match='reduction="none"'):
        refuse_inseparable(nn.CrossEntropyLoss(weight), nn.Linear(4, 1000), torch.zeros(4), torch.tensor(0))


@pytest.mark.parametrize(
    ("loss", "model", "target"),
    [
        (F.cross_entropy, nn.Linear(4, 3), torch.tensor(1)),
        (nn.CrossEntropyLoss(label_smoothing=0.1), nn.Linear(4, 3), torch.tensor(1)),
        (weighted_each, nn.Linear(4, 3), torch.tensor(1)),
        (weighted_sum, nn.Linear(4, 3), torch.tensor(1)),
        (F.mse_loss, nn.Linear(4, 2), torch.zeros(2)),
        (nn.HuberLoss(), nn.Linear(4, 2), torch.zeros(2)),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0])), nn.Linear(4, 1), torch.zeros(1)),
        (nn.BCELoss(), nn.Sequential(nn.Linear(4, 1), nn.Sigmoid()), torch.zeros(1)),
        (
            lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten()),
            nn.Unflatten(1, (2, 2)),
            torch.zeros(2).long(),
        ),
    ],
)
def test_means_sums_and_single_losses_are_accepted(loss, model, target, caplog):
    refuse_inseparable(loss, model, torch.zeros(4), target)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("loss", "model", "target"),
    [
        (nn.CrossEntropyLoss(ignore_index=0), nn.Linear(4, 3), torch.tensor(1)),  # the mean of the others
        (F.mse_loss, nn.Linear(4, 1), torch.tensor(0.0)),  # broadcast: every output against every target
        (lambda o, t: (o - o.mean(0) - t).square().mean(), nn.Linear(4, 2), torch.zeros(2)),
        (lambda o, t: F.mse_loss(o, t).sqrt(), nn.Linear(4, 2), torch.zeros(2)),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_what_mixes_examples_is_refused(loss, model, target):
    with pytest.raises(UsageError, match='reduction="none"'):
        refuse_inseparable(loss, model, torch.zeros(4), target)


def test_the_trial_says_nothing_about_the_data_and_what_cannot_be_tried_is_said(caplog):
    seen = []

    def loss(outputs, targets):
        seen.append((outputs, targets))
        return F.mse_loss(outputs, targets)

    refuse_inseparable(loss, nn.Linear(4, 2), torch.full((4,), torch.nan), torch.full((2,), torch.nan))
    assert all(bool(torch.isfinite(v).all()) for pair in seen for v in pair)
    model = nn.Linear(4, 2)
    refuse_inseparable(lambda o, t: o["logits"].mean(), model, torch.zeros(4), torch.tensor(1))
    assert "too many indices" in caplog.text
    assert model.training


# Made-up examples


def test_only_shapes_and_types_are_looked_at():
    ones, others = torch.ones(4, 3), torch.full((4, 3), -7.0)
    assert torch.equal(made_up(ones, 5), made_up(others, 5))
    assert made_up(ones.double(), 5).dtype == torch.float64
    assert not torch.equal(made_up(ones, 5), made_up(ones, 5, seed=1))


def test_whole_numbers_are_0_and_1_and_no_mask_is_empty():
    words = made_up(torch.zeros(6, dtype=torch.int64), 50)
    assert words.shape == (50, 6)
    assert set(words.unique().tolist()) == {0, 1}
    assert bool(made_up(torch.zeros(6, dtype=torch.bool), 50).any(1).all())
    assert set(made_up(torch.zeros(6), 50, whole=True).unique().tolist()) == {0.0, 1.0}


def test_the_changed_batch_differs_in_its_first_example_only():
    like = {"ids": torch.zeros(20), "rest": (torch.zeros(2), "text")}, torch.tensor(0)
    batches = Batches.like(like)
    (x, _), (changed, _) = batches.three, batches.changed
    assert x["rest"][0].shape == (3, 2)
    assert x["rest"][1] == "text"
    assert len(batches.two[0]["ids"]) == 2
    assert not torch.equal(x["ids"][0], changed["ids"][0])
    assert torch.equal(x["ids"][1:], changed["ids"][1:])


def test_parameters_that_start_at_zero_are_moved_always_alike():
    zero = torch.zeros(50)
    assert torch.equal(moved(zero), moved(zero))
    assert 0.02 < float(moved(zero).std()) < 0.1
