"""All engines give the gradients of autograd."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpps
from dpps.learning import Chained, Loop, Partition, Vectorised, check_model, choose_engine, is_chain
from tests.support.learning import batch_norm_model, make_run, toy_data

EXAMPLE = torch.zeros(6), torch.tensor(0)


class Branched(nn.Module):
    """Two branches, one of them shared."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 4), nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.left(x)) * torch.sigmoid(self.right(x)))


MODELS = {
    "mlp one shared": (lambda: dpps.models.MLP((6, 4, 5, 3)), ["layer1"]),
    "mlp two shared": (lambda: dpps.models.MLP((6, 4, 5, 3)), ["layer1", "layer2"]),
    "residual": (lambda: dpps.models.MLPResidual(2, 6, 3), ["layer1", "layer2"]),
    "all shared": (lambda: dpps.models.MLP((6, 4, 3)), "all"),
    "all local": (lambda: dpps.models.MLP((6, 4, 3)), []),
    "sequential": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), ["0"]),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 3)), ["0"]),
    "head shared": (lambda: dpps.models.MLP((6, 4, 5, 3)), ["layer3"]),
    "middle shared": (lambda: dpps.models.MLP((6, 4, 5, 3)), ["layer2"]),
    "biases local": (lambda: dpps.models.MLP((6, 4, 5, 3)), lambda name: name.endswith("weight")),
    "branches": (Branched, ["left", "head"]),
    "tail shared": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), ["2"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_engines_give_the_same_and_it_is_what_autograd_says(name):
    torch.manual_seed(3)
    make, shared = MODELS[name]
    partition, n = Partition(make(), shared), 4
    s, l = partition.initial()
    y, local = s + 0.1 * torch.randn(n, len(s)), l + 0.1 * torch.randn(n, len(l))
    x, target = torch.randn(n, 7, 6), torch.randint(0, 3, (n, 7))
    results = []
    for kind in (Vectorised, Loop, *([Chained] if is_chain(partition, 2) else [])):
        engine = kind(partition, F.cross_entropy, range(n))
        results.append(engine.step(y, local, x, target, lambda g, rows: local[rows] - 0.5 * g, 0))
    for result in results[1:]:
        for a, b in zip(results[0], result, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    losses, new, shared_gradient = results[0]
    for k in range(n):
        row, own = y[k].clone().requires_grad_(), local[k].clone().requires_grad_()

        def loss(row, own, k=k):
            named = partition.views(row, own)
            return F.cross_entropy(torch.func.functional_call(partition.model, named, (x[k],)), target[k])

        first = loss(row, own)
        torch.testing.assert_close(losses[k], first.detach(), rtol=1e-5, atol=1e-6)
        if len(l):
            own = (own - 0.5 * torch.autograd.grad(first, own)[0]).detach()
            torch.testing.assert_close(new[k], own, rtol=1e-5, atol=1e-6)
        if len(s):
            gradient = torch.autograd.grad(loss(row, own), row)[0]
            torch.testing.assert_close(shared_gradient[k], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shared", [["layer1"], "all", [], ["layer3"], ["layer2"]])
def test_evaluation_of_all_engines_agrees(shared):
    partition = Partition(dpps.models.MLP((6, 4, 5, 3)), shared)
    s, l = partition.initial()
    local, x = l + torch.randn(3, len(l)), torch.randn(11, 6)
    kinds = (Vectorised, Loop, Chained)
    with mock.patch("dpps.learning.gradients.chain._BLOCK", 40):
        outputs = [kind(partition, F.cross_entropy, range(3)).outputs(s, local, x) for kind in kinds]
    assert outputs[0].shape == (3, 11, 3)
    for other in outputs[1:]:
        torch.testing.assert_close(outputs[0], other)


def test_batch_norm_statistics_stay_local_and_move_with_both_gradients_of_a_round():
    torch.manual_seed(0)
    run = make_run(shared=["0", "1"], model=batch_norm_model()).fit(epochs=1)
    buffers = run.nodes.engine.buffers
    assert [int(b["1.num_batches_tracked"]) for b in buffers] == [8, 8, 8]
    assert not torch.equal(buffers[0]["1.running_mean"], buffers[1]["1.running_mean"])
    assert torch.equal(run.models()[1][1].running_mean, buffers[1]["1.running_mean"])


class Checkpointed(nn.Module):
    """A layer that runs forward again during the backward pass."""

    def __init__(self, layer, reentrant):
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a layer that is not asked for
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("shared", ["all", ["0", "2"], []])
def test_checkpointed_layers_run_again_with_the_parameters_of_the_node(shared, reentrant):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    again = copy.deepcopy(plain)
    again[2] = Checkpointed(again[2], reentrant)
    found = []
    for model in (plain, again):
        partition = Partition(model, shared)
        y, l = (part + torch.linspace(0.5, 1, 2)[:, None] for part in partition.initial())
        torch.manual_seed(1)
        x, target = torch.randn(2, 4, 6), torch.randint(0, 3, (2, 4))
        engine = Loop(partition, F.cross_entropy, range(2))
        found.append(engine.step(y, l, x, target, lambda g, rows, l=l: l[rows] - g, 0))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class Drops(nn.Module):
    """Dropout that no layer of its own announces."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.head = kind, nn.Linear(6, 3)
        self.cells = nn.LSTM(6, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)

    def forward(self, x):
        h = x[:, None]
        if self.kind == "LSTM":
            return self.head(self.cells(h)[0][:, 0])
        if self.kind == "attention":
            h = h.repeat(1, 3, 1) * torch.arange(1, 4)[:, None]
            return self.head(self.attention(h, h, h)[0][:, 0])
        return self.head(F.dropout(x, 0.5, self.training))


@pytest.mark.parametrize("kind", ["LSTM", "attention", "function"])
def test_runs_with_the_same_seed_repeat_whatever_draws_the_masks(kind):
    def outcome(seed, disturbance):
        torch.manual_seed(0)
        run = make_run(shared="all", model=Drops(kind), data=toy_data(3, n=20), seed=seed)
        torch.manual_seed(disturbance)  # numbers drawn elsewhere in the process
        run = run.start(epochs=1)
        started = torch.get_rng_state()
        run.step()
        assert torch.equal(torch.get_rng_state(), started)
        return run.state.shared.s.clone()

    assert torch.equal(outcome(1, 5), outcome(1, 6))
    assert not torch.equal(outcome(1, 5), outcome(2, 5))


# Which engine a model gets


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (nn.Sequential(nn.Linear(6, 3)), Chained),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), Loop),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)), Loop),
        (nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 1, 3), nn.Flatten(), nn.Linear(4, 3)), Loop),
    ],
)
def test_the_engine_is_chosen_by_the_model(model, kind):
    partition = Partition(model, ["0"] if isinstance(model[0], nn.Linear) else ["3"])
    engine = choose_engine(partition, F.cross_entropy, EXAMPLE, range(2))
    assert type(engine) is kind


@pytest.mark.parametrize(("batch", "kind"), [(4, Vectorised), (50_000, Loop)])
def test_a_batch_that_keeps_the_processor_busy_runs_node_by_node(batch, kind):
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    engine = choose_engine(Partition(model, ["0"]), F.cross_entropy, EXAMPLE, range(2), batch=batch)
    assert type(engine) is kind
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_vmap_cannot_run_falls_to_the_loop_with_a_note(caplog):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            z = self.layer(x)
            return z if z.sum() > 0 else 2 * z

    with caplog.at_level("INFO"):
        engine = choose_engine(Partition(Branching(), "all"), F.cross_entropy, EXAMPLE, range(2))
    assert isinstance(engine, Loop)
    assert "torch.vmap" in caplog.text


def test_the_choice_looks_at_nobodys_data(caplog):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3))
    example = torch.full((3,), 99), torch.tensor(0)  # beyond the vocabulary
    assert isinstance(choose_engine(Partition(model, "all"), F.cross_entropy, example), Vectorised)


def test_a_model_that_does_not_run_on_made_up_examples_goes_node_by_node():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            assert bool((x > 1).all())
            return self.layer(x)

    example = torch.full((6,), 2.0), torch.tensor(0)
    assert isinstance(choose_engine(Partition(Picky(), "all"), F.cross_entropy, example), Loop)
    assert not check_model(Partition(Picky(), "all"), F.cross_entropy, example, per_example=False)
