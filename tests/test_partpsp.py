"""Algorithm 2 against the NumPy oracle, the gradient engines against each other, and the limits that must coincide."""

from itertools import pairwise
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import dpps
import oracle
from dpps.errors import RunError, UsageError
from dpps.learning import Partition
from dpps.learning.chain import Chained, is_chain
from dpps.learning.engines import choose_engine
from dpps.learning.gradients import Loop, Vectorised
from dpps.learning.partpsp import clip_rows
from dpps.learning.per_example import Chains, Examples, Linears, per_example
from dpps.noise import Scripted


def tiny(seed=0, sizes=(6, 4, 3)):
    torch.manual_seed(seed)
    return dpps.models.MLP(sizes)


def toy_data(nodes, n=40, features=6, classes=3, seed=0):
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(77))
    g = torch.Generator().manual_seed(seed)
    sets = []
    for _ in range(nodes):
        labels = torch.randint(0, classes, (n,), generator=g)
        sets.append(TensorDataset(centres[labels] + 0.3 * torch.randn(n, features, generator=g), labels))
    return sets


def test_equals_the_oracle_for_twenty_rounds_under_injected_noise():
    n, rounds, batch, rng = 5, 20, 8, np.random.default_rng(1)
    model = tiny().double()
    sets = [TensorDataset(d.tensors[0].double(), d.tensors[1]) for d in toy_data(n)]
    w1, b1, w2, b2 = (p.detach().numpy().copy() for p in model.parameters())
    d_s = w1.size + b1.size
    noise = rng.laplace(size=(rounds, n, d_s))
    unit = dpps.NodeSwap(budget=2.0, noise_rate=0.01, sensitivity=dpps.Paper(0.8, 0.6), clip=0.7)
    algorithm = dpps.PartPSP(
        model,
        ["layer1"],
        dpps.Exponential(n),
        unit,
        lr_shared=0.3,
        lr_local=0.2,
        batch_size=batch,
        sync_every=4,
        noise=Scripted(noise),
    )
    algorithm.partition.initial = lambda: tuple(  # type: ignore[method-assign]
        torch.cat([p.detach().flatten() for p in part])
        for part in ((model.layer1.weight, model.layer1.bias), (model.layer2.weight, model.layer2.bias))
    )
    learner = algorithm.start(sets, epochs=4)
    locals_ = [(w2.copy(), b2.copy()) for _ in range(n)]
    s = np.tile(np.concatenate([w1.ravel(), b1]), (n, 1))
    topology, carried = dpps.Exponential(n), np.zeros(n)
    for t in range(rounds):
        eps = np.zeros((n, d_s))
        for i in range(n):
            x, labels = (
                part.numpy()[(t * batch) % 40 : (t * batch) % 40 + batch] for part in sets[i].tensors
            )
            params = (s[i, : w1.size].reshape(w1.shape), s[i, w1.size :], *locals_[i])
            locals_[i], eps[i] = oracle.partpsp_perturbation(
                params, x, labels, lr_local=0.2, lr_shared=0.3, clip=0.7
            )
        # one round of the oracle's Algorithm 1, with its carried sensitivity
        sensitivity = max(carried + 2 * 0.8 * np.abs(eps).sum(1))
        added = 0.01 * sensitivity / 2.0 * noise[t]
        sync = (t + 1) % 4 == 0
        w = np.full((n, n), 1 / n) if sync else topology.weights(t).dense()
        s = w @ (s + eps + added)
        carried = np.zeros(n) if sync else 0.6 * (sensitivity + 2 * 0.8 * np.abs(added).sum(1))
        record, _ = learner.round()
        assert record.used == pytest.approx(sensitivity, rel=1e-8)
        np.testing.assert_allclose(learner.state.s.numpy(), s, rtol=1e-8, atol=1e-10)
        flat = np.stack([np.concatenate([a.ravel(), b]) for a, b in locals_])
        np.testing.assert_allclose(learner.local.numpy(), flat, rtol=1e-8, atol=1e-10)


class Branched(nn.Module):
    """Shared parameters that are no prefix: the whole forward pass runs twice."""

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
    "no prefix": (Branched, ["left", "head"]),
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


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_chains_of_any_form_get_the_gradients_of_autograd(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    widths = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        activation = data.draw(st.sampled_from([nn.Tanh, nn.ReLU, nn.Identity, None]))
        layers += [nn.Linear(a, b, bias=data.draw(st.booleans()))] + ([activation()] if activation else [])
    model = nn.Sequential(*layers).double()
    names = [name for name, _ in model.named_parameters()]
    chosen = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    partition, n, batch = Partition(model, lambda name: name in chosen), data.draw(st.integers(1, 7)), 3
    assert is_chain(partition, 3)
    s, l = (part.double() for part in partition.initial())
    y, local = s + torch.randn(n, len(s)), l + torch.randn(n, len(l))
    x = torch.randn(n, batch, 1, widths[0]).double()
    loss, target = F.mse_loss, torch.randn(n, batch, widths[-1]).double()
    if data.draw(st.booleans()):
        loss, target = F.cross_entropy, torch.randint(0, widths[-1], (n, batch))
    chained, plain = (kind(partition, loss, range(n)) for kind in (Chained, Loop))
    for _ in range(3):  # memory is used again
        with mock.patch("dpps.learning.chain._BLOCK", data.draw(st.integers(1, 100))):
            ours = chained.step(y, local, x, target, lambda g, rows: local[rows] - 0.01 * g, 0)  # noqa: B023
        theirs = plain.step(y, local, x, target, lambda g, rows: local[rows] - 0.01 * g, 0)  # noqa: B023
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8, check_dtype=False)
        y, local = y - 0.01 * ours[2], ours[1]


def test_what_is_no_chain():
    linear = nn.Linear(6, 3)
    assert is_chain(Partition(nn.Sequential(linear), ["0"]), 2)
    assert not is_chain(Partition(nn.Sequential(linear), ["0"]), 3)  # acts on the last axis of an image
    assert not is_chain(Partition(nn.Sequential(linear, nn.Softmax(1)), ["0"]), 2)
    assert not is_chain(Partition(nn.Sequential(nn.Tanh(), linear), ["1"]), 2)
    assert not is_chain(Partition(nn.Sequential(linear, nn.Tanh(), nn.Tanh()), ["0"]), 2)
    assert not is_chain(Partition(dpps.models.MLPResidual(1, 6, 3), ["layer1"]), 2)
    frozen = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    frozen[0].weight.requires_grad_(False)
    assert not is_chain(Partition(frozen, ["1"]), 2)
    heard = nn.Sequential(nn.Linear(6, 3))
    heard[0].register_forward_hook(lambda *_: None)
    assert not is_chain(Partition(heard, ["0"]), 2)
    patched = nn.Sequential(nn.Linear(6, 3))
    patched[0].forward = lambda x: x[:, :3]
    assert not is_chain(Partition(patched, ["0"]), 2)


@pytest.mark.parametrize("shared", [["layer1"], "all", [], ["layer3"], ["layer2"]])
def test_evaluation_of_all_engines_agrees(shared):
    partition = Partition(dpps.models.MLP((6, 4, 5, 3)), shared)
    s, l = partition.initial()
    local, x = l + torch.randn(3, len(l)), torch.randn(11, 6)
    kinds = (Vectorised, Loop, Chained)
    with mock.patch("dpps.learning.chain._BLOCK", 40):
        outputs = [kind(partition, F.cross_entropy, range(3)).outputs(s, local, x) for kind in kinds]
    assert outputs[0].shape == (3, 11, 3)
    for other in outputs[1:]:
        torch.testing.assert_close(outputs[0], other)


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
    engine = choose_engine(
        Partition(model, ["0"] if isinstance(model[0], nn.Linear) else ["3"]),
        F.cross_entropy,
        range(2),
        (torch.randn(2, 6), torch.zeros(2, dtype=torch.long)),
    )
    assert type(engine) is kind


def test_a_model_that_vmap_cannot_run_falls_to_the_loop_with_a_note(caplog):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            z = self.layer(x)
            return z if z.sum() > 0 else 2 * z

    with caplog.at_level("INFO"):
        engine = choose_engine(
            Partition(Branching(), "all"),
            F.cross_entropy,
            range(2),
            (torch.randn(2, 6), torch.zeros(2, dtype=torch.long)),
        )
    assert isinstance(engine, Loop)
    assert "vmap cannot run this model" in caplog.text


def batch_norm_model():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))


def test_batch_norm_statistics_stay_local_and_move_once_a_round_in_the_shared_part():
    torch.manual_seed(0)
    run = dpps.PartPSP(batch_norm_model(), ["0", "1"], dpps.Ring(3), batch_size=10, seed=0).fit(
        toy_data(3), epochs=1
    )
    buffers = run.learner.engine.buffers
    assert [int(b["1.num_batches_tracked"]) for b in buffers] == [4, 4, 4]
    assert not torch.equal(buffers[0]["1.running_mean"], buffers[1]["1.running_mean"])
    assert torch.equal(run.models()[1][1].running_mean, buffers[1]["1.running_mean"])


def train(model, shared, unit=None, nodes=4, **options):
    options = {"batch_size": 10, "seed": 5, "lr_shared": 0.3, "lr_local": 0.3} | options
    topology = options.pop("topology", None) or dpps.DOut(nodes, 2)
    epochs, data = options.pop("epochs", 3), options.pop("data", None) or toy_data(nodes)
    return dpps.PartPSP(model, shared, topology, unit, **options).fit(
        data, epochs=epochs, test=toy_data(1, seed=9)[0]
    )


def test_a_seed_repeats_bit_for_bit_and_another_differs():
    unit = dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.8, 0.5))
    a, b, c = (train(tiny(), ["layer1"], unit, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.shared, b.shared)
    assert torch.equal(a.local, b.local)
    assert not torch.equal(a.shared, c.shared)


# Limits that must coincide


def test_no_noise_equals_sgp():
    noiseless = dpps.NodeSwap(budget=1.0, noise_rate=0.0, sensitivity=dpps.Paper(0.8, 0.5))
    a, b = train(tiny(), "all", noiseless), train(tiny(), "all", None)
    assert torch.equal(a.shared, b.shared)


def test_sgp_by_hand():
    """All shared, no noise: s <- W (s - lr gradient), nothing else."""
    model, data = tiny(), toy_data(4)
    run = dpps.PartPSP(model, "all", dpps.DOut(4, 2), batch_size=10, lr_shared=0.3, seed=0).fit(
        data, epochs=1
    )
    w = torch.from_numpy(dpps.DOut(4, 2).weights(0).dense()).float()
    partition = Partition(tiny(), "all")
    rows = partition.initial()[0].repeat(4, 1)
    for t in range(4):
        gradients = []
        for i in range(4):
            row = rows[i].clone().requires_grad_()
            x, target = (part[t * 10 : t * 10 + 10] for part in data[i].tensors)
            out = torch.func.functional_call(partition.model, partition.views(row, None), (x,))
            gradients.append(torch.autograd.grad(F.cross_entropy(out, target), row)[0])
        rows = w @ (rows - 0.3 * torch.stack(gradients))
    torch.testing.assert_close(run.learner.state.s, rows)


def test_an_infinite_clip_is_no_clip():
    runs = [
        train(tiny(), ["layer1"], dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.8, 0.5), clip=c))
        for c in (1e30, None)
    ]
    assert torch.equal(runs[0].shared, runs[1].shared)


def test_a_small_clip_bounds_every_perturbation():
    g = torch.randn(5, 30)
    clipped = clip_rows(g, 2.0)
    assert bool((clipped.abs().sum(1) <= 2.0 + 1e-5).all())
    inside = clip_rows(g, 1e6)
    assert torch.equal(inside, g)


def test_an_absent_node_keeps_statistics_and_momentum():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    learner = dpps.PartPSP(
        model,
        ["0"],
        dpps.Exponential(4).with_dropouts(0.5, seed=1),
        batch_size=10,
        seed=0,
        local_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    ).start(toy_data(4), epochs=5)

    def kept(k):
        momentum = learner._optimizers[k][1].state_dict()["state"].get(0, {}).get("momentum_buffer")
        buffers = {n: b.clone() for n, b in learner.engine.state().items() if n.startswith(f"{k}.")}
        return buffers | {"momentum": torch.zeros(1) if momentum is None else momentum.clone()}

    seen = set()
    for _ in range(8):
        present = learner.protocol.topology.present(learner.state.clock)
        before = [kept(k) for k in range(4)]
        learner.round()
        for k in range(4):
            same = all(torch.equal(v, before[k][n]) for n, v in kept(k).items())
            assert same == (not present[k])
            seen.add(bool(present[k]))
    assert seen == {True, False}


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_failed_round_leaves_local_parameters_as_they_were(steps):
    learner = dpps.PartPSP(
        tiny(), ["layer1"], dpps.Exponential(4), batch_size=10, local_steps=steps, seed=0
    ).start(toy_data(4), epochs=20)
    for _ in range(3):
        learner.round()
        before = learner.local.clone()
        with (
            mock.patch.object(learner.protocol, "step", side_effect=RunError("lost")),
            pytest.raises(RunError),
        ):
            learner.round()
        assert torch.equal(learner.local, before)


def test_two_nodes_and_dropouts_work():
    assert train(tiny(), ["layer1"], nodes=2, topology=dpps.Exponential(2)).accuracy > 50
    away = dpps.Exponential(4).with_dropouts(0.3, seed=1)
    assert (
        train(tiny(), ["layer1"], dpps.Contribution(clip=1.0, round_epsilon=1e3), topology=away).accuracy > 50
    )


def test_a_model_that_is_all_local_never_sends_a_byte():
    sent = []

    class Watched(dpps.Stacked):
        def mix(self, weights, *xs):
            sent.append(xs)
            return super().mix(weights, *xs)

    algorithm = dpps.PartPSP(
        tiny(),
        [],
        dpps.Ring(3),
        dpps.Contribution(clip=1.0, epsilon=1.0),
        batch_size=10,
        lr_local=0.5,
        fabric=Watched(3),
        sync_every=2,
    )
    run = algorithm.fit(toy_data(3), epochs=10, test=toy_data(1, seed=9)[0])
    assert sent == []
    assert sum(log.bytes for log in run.rounds) == 0
    assert "Nothing was sent" in run.privacy.statement
    assert run.accuracy > 50


def test_local_steps_move_the_total_and_clip_it():
    unit = dpps.NodeSwap(budget=5, noise_rate=0.0, sensitivity=dpps.Paper(0.8, 0.5), clip=0.05)
    one, four = (train(tiny(), ["layer1"], unit, local_steps=k, epochs=1) for k in (1, 4))
    assert (len(one.rounds), len(four.rounds)) == (4, 1)
    before = Partition(tiny(), ["layer1"]).initial()[0]
    assert float((four.learner.state.s - before).abs().sum(1).max()) <= 0.3 * 0.05 + 1e-6


def test_rates_decay_at_the_start_of_the_kth_epoch_and_restart_the_counters():
    algorithm = dpps.PartPSP(
        tiny(),
        ["layer1"],
        dpps.Exponential(4),
        dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.8, 0.5)),
        lr_step=2,
        batch_size=10,
    )
    learner = algorithm.start(toy_data(4), epochs=4)
    rates, clocks = [], []
    for epoch in range(1, 5):
        learner.start_epoch(epoch)
        for _ in range(learner.rounds_per_epoch):
            clocks.append(learner.state.clock)
            record, _ = learner.round()
            rates.append(record.epsilon)
    assert clocks == [0, 1, 2, 3, *range(8), 0, 1, 2, 3]
    np.testing.assert_allclose(rates, [5e3] * 4 + [5e4] * 8 + [5e5] * 4)


def test_any_optimizer_serves_the_local_part():
    plain = train(tiny(), ["layer1"], lr_local=0.3)
    same = train(tiny(), ["layer1"], local_optimizer=lambda p: torch.optim.SGD(p, lr=0.3))
    torch.testing.assert_close(plain.local, same.local)
    adam = train(tiny(), ["layer1"], local_optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    assert adam.accuracy > 60
    assert not torch.allclose(adam.local, plain.local)


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


def test_data_sets_that_are_slices_of_one_tensor_are_joined_without_a_copy():
    from dpps.learning.batches import NodeData

    x, y = torch.randn(3, 20, 6), torch.randint(0, 3, (3, 20))
    rows = NodeData([TensorDataset(x[k], y[k]) for k in range(3)])
    parts = NodeData([TensorDataset(x.view(60, 6)[a : a + 20], y.view(60)[a : a + 20]) for a in (0, 20, 40)])
    for data in (rows, parts):
        got, labels = data.slice(5, 4)
        assert torch.equal(got, x[:, 5:9])
        assert torch.equal(labels, y[:, 5:9])
        assert got.data_ptr() == x[:, 5:9].data_ptr()


def test_images_of_different_kinds_are_read_one_by_one():
    from dpps.learning.batches import NodeData

    grey, colour = (torch.randint(0, 256, (5, c, 2, 2), dtype=torch.uint8) for c in (1, 3))
    nodes = NodeData([dpps.data.Images(p, torch.arange(5), (0.0,) * 3, (1.0,) * 3) for p in (grey, colour)])
    x, labels = nodes.slice(1, 2)
    assert torch.equal(x[0], (grey[1:3] / 255).expand(-1, 3, -1, -1))
    assert torch.equal(x[1], colour[1:3] / 255)
    assert labels.tolist() == [[1, 2], [1, 2]]


def test_a_chain_shows_its_activations_as_they_are():
    torch.manual_seed(0)
    model = dpps.models.MLP((6, 4, 9, 3))
    partition = Partition(model, ["layer1"])
    chained, (s, l) = Chained(partition, F.cross_entropy, range(2)), partition.initial()
    x = torch.randn(2, 7, 6)
    chain = chained.chain
    chain.forward(chain.layers(s.repeat(2, 1), l.repeat(2, 1)), x)
    seen = chain.unfolded()
    assert [tuple(v.shape) for v in seen] == [(2, 7, 6), (2, 7, 4), (2, 7, 9), (2, 7, 3)]
    assert any(
        torch.is_nonzero((a != b).any()) for a, b in zip(seen, chain.inputs, strict=True)
    )  # something was folded
    h = x
    for layer, v in zip((model.layer1, model.layer2, model.layer3), seen[1:], strict=True):
        h = torch.tanh(layer(h))
        torch.testing.assert_close(v, h.detach(), rtol=1e-5, atol=1e-6)


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
        algorithm = dpps.PartPSP(net, ["layer1"], dpps.Ring(3), batch_size=7, privacy=unit, seed=0)
        runs.append(algorithm.fit(sets, epochs=3, test=whole))
    for run in runs[1:]:
        assert torch.equal(run.shared, runs[0].shared)
        assert torch.equal(run.local, runs[0].local)
        assert run.accuracy == runs[0].accuracy


def test_callbacks_models_and_saving(tmp_path):
    seen = []
    run = dpps.PartPSP(tiny(), ["layer1"], dpps.Ring(3), batch_size=10, seed=0).fit(
        toy_data(3), epochs=1, callbacks=[lambda training, log: seen.append(log.round)]
    )
    assert seen == [0, 1, 2, 3]
    models = run.models()
    torch.testing.assert_close(models[0].layer1.weight, models[2].layer1.weight)
    assert not torch.equal(models[0].layer2.weight, models[2].layer2.weight)
    from safetensors.torch import load_file

    paths = run.save(tmp_path)
    fresh = tiny(seed=99)
    fresh.load_state_dict(load_file(paths[2]))
    assert torch.equal(fresh.layer2.weight, models[2].layer2.weight)


# Units


def test_contribution_clips_in_the_protocol_whatever_the_caller_sends():
    unit = dpps.Contribution(clip=0.5, round_epsilon=10.0)
    learner = dpps.PartPSP(
        tiny(), ["layer1"], dpps.Ring(3), unit, batch_size=10, lr_shared=0.2, seed=0
    ).start(toy_data(3), epochs=1)
    before = learner.state.s.clone()
    learner.protocol.noise = Scripted([np.zeros((3, learner.partition.shared_size))] * 2)
    record = learner.protocol.step(learner.state, torch.full_like(before, 100.0))
    moved = learner.state.s - dpps.Stacked(3).mix(dpps.Ring(3).weights(0), before)[0]
    assert float(moved.abs().sum(1).max()) <= 0.2 * 0.5
    assert record.used == pytest.approx(2 * 0.2 * 0.5)
    assert record.epsilon == pytest.approx(10.0)


def test_the_target_epsilon_is_met_and_computed_from_what_was_charged():
    for unit in (
        dpps.Contribution(clip=1.0, epsilon=2.0),
        dpps.Contribution(clip=1.0, epsilon=2.0, mechanism="gaussian"),
        dpps.Record(epsilon=2.0),
        dpps.NodeSwap(epsilon=2.0, sensitivity=dpps.Certified()),
    ):
        run = train(tiny(), ["layer1"], unit)
        assert 1.99 < run.privacy.epsilon <= 2.0 + 1e-9, unit
        assert unit.name == run.privacy.unit


def test_a_round_beyond_those_paid_for_is_refused_before_it_is_sent():
    sent = []

    class Watched(dpps.Stacked):
        def mix(self, weights, *xs):
            sent.append(xs)
            return super().mix(weights, *xs)

    learner = dpps.PartPSP(
        tiny(),
        ["layer1"],
        dpps.Ring(3),
        dpps.Record(epsilon=1.0),
        batch_size=10,
        spare_rounds=2,
        fabric=Watched(3),
        seed=0,
    ).start(toy_data(3), epochs=1)
    for _ in range(4 + 2):
        learner.round()
    with pytest.raises(RunError, match="round 6 refused before sending: epsilon 1 was spread over 6 rounds"):
        learner.round()
    assert len(sent) == 6


def test_record_noise_hits_both_parts_with_the_right_deviation():
    """Gradients clipped to next to nothing leave only noise: deviation rate x clip x multiplier / expected batch."""
    model = nn.Sequential(nn.Linear(2000, 3, bias=False), nn.Linear(3, 2000, bias=False))
    data = [
        TensorDataset(torch.zeros(50, 2000), torch.zeros(50, dtype=torch.long)) for _ in range(3)
    ]  # zero inputs: zero gradients
    learner = dpps.PartPSP(
        model,
        ["0"],
        dpps.Complete(3),
        dpps.Record(noise_multiplier=2.0),
        batch_size=10,
        lr_shared=0.5,
        lr_local=0.25,
        seed=0,
    ).start(data, epochs=1)
    s0, l0 = learner.state.s.clone(), learner.local.clone()
    learner.round()
    shared, local = learner.state.s - s0, learner.local - l0
    assert float(shared.std()) == pytest.approx(
        0.5 * 2.0 / 10 / 3**0.5, rel=0.03
    )  # averaged over three nodes
    assert float(local.std()) == pytest.approx(0.25 * 2.0 / 10, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack([shared[0], local[0]]))[0, 1])) < 0.06  # no noise used twice


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny(sizes=(6, 4, 5, 3)),
        lambda: dpps.models.MLPResidual(1, 6, 3),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)),
    ],
)
def test_clipped_sums_of_both_ways_agree_and_each_example_counts_at_most_clip(make):
    torch.manual_seed(0)
    model = make()
    partition = Partition(model, [next(iter(model.named_parameters()))[0].split(".")[0]])
    s, l = partition.initial()
    y, local = s + torch.randn(4, len(s)), l + torch.randn(4, len(l))
    x, target, mask = torch.randn(4, 9, 6), torch.randint(0, 3, (4, 9)), torch.rand(4, 9) < 0.7
    quick = per_example(partition, F.cross_entropy, 0.1, x[0, 0])
    assert isinstance(quick, Linears)
    assert isinstance(quick, Chains) == is_chain(partition, 2)
    slow = Examples(partition, F.cross_entropy, 0.1)
    expected = slow.sums(y, local, x, target, mask)
    for way in (quick, Linears(partition, F.cross_entropy, 0.1)):
        for a, b in zip(way.sums(y, local, x, target, mask), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    alone = torch.zeros_like(mask)
    alone[:, 3] = True
    for way in (quick, slow):
        _, sum_s, sum_l = way.sums(y, local, x, target, alone)
        joint = torch.cat([sum_s, sum_l], 1).norm(dim=1)
        assert bool((joint <= 0.1).all())
        assert float(joint.max()) > 0.0999
    nobody = torch.zeros_like(mask)
    _, sum_s, sum_l = quick.sums(y, local, x, target, nobody)
    assert float(sum_s.abs().max()) == float(sum_l.abs().max()) == 0


def test_adding_one_example_moves_the_clipped_sum_by_at_most_clip():
    partition = Partition(tiny(), ["layer1"])
    s, l = partition.initial()
    x, target = torch.randn(1, 30, 6), torch.randint(0, 3, (1, 30))
    way = per_example(partition, F.cross_entropy, 0.05, x[0, 0])
    mask = torch.ones(1, 30, dtype=torch.bool)
    full = torch.cat(way.sums(s[None], l[None], x, target, mask)[1:], 1)
    for k in range(30):
        less = mask.clone()
        less[0, k] = False
        without = torch.cat(way.sums(s[None], l[None], x, target, less)[1:], 1)
        assert float((full - without).norm()) <= 0.05


class LowRank(nn.Linear):
    """A linear layer with two more parameters, as fine-tuning methods add them."""

    def __init__(self):
        super().__init__(6, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Centre(nn.Module):
    """Mixes the examples of a batch, below an innocent container."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        h = self.inner(x)
        return h - h.mean(0)


def tied():
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, second)


def hooked():
    model = nn.Sequential(nn.Linear(6, 3))
    model[0].register_forward_hook(lambda _, __, out: out - out.mean(0))
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(LowRank()),
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))),
        lambda: nn.Sequential(Centre(), nn.Linear(6, 3)),
        tied,
        hooked,
    ],
    ids=["low rank", "weight norm", "mixing below a container", "tied", "hooked"],
)
def test_what_only_looks_like_a_chain_of_linear_layers_takes_the_general_way(make):
    model = make()
    way = per_example(Partition(model, "all"), F.cross_entropy, 1.0, torch.randn(6))
    assert isinstance(way, Examples)


def test_an_example_that_is_not_finite_counts_as_zero_and_disturbs_nobody():
    partition = Partition(tiny(), ["layer1"])
    s, l = partition.initial()
    x, target = torch.randn(1, 6, 6), torch.randint(0, 3, (1, 6))
    for way in (kind(partition, F.cross_entropy, 1.0) for kind in (Chains, Linears, Examples)):
        mask = torch.tensor([[True] * 5 + [False]])
        mask[0, 2] = False
        expected = way.sums(s[None], l[None], x, target, mask)[1:]
        broken = x.clone()
        broken[0, 2], broken[0, 5] = float("inf"), float("nan")  # sampled below; padding
        mask[0, 2] = True
        for a, b in zip(way.sums(s[None], l[None], broken, target, mask)[1:], expected, strict=True):
            torch.testing.assert_close(a, b)


def test_where_messages_really_leave_a_failure_is_not_told():
    """A crafted example must not be able to stop the run: noise is sent instead."""

    class Elsewhere(dpps.Stacked):
        simulation = False

    data = toy_data(3)
    data[1].tensors[0][:] = float("nan")
    learner = dpps.PartPSP(
        tiny(),
        ["layer1"],
        dpps.Ring(3),
        dpps.Contribution(clip=1.0, round_epsilon=1.0),
        batch_size=10,
        fabric=Elsewhere(3),
        seed=0,
    ).start(data, epochs=1)
    learner.round()
    assert bool(torch.isfinite(learner.state.s).all())


def test_models_of_unknown_forward_never_take_the_quick_way():
    class Mixes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x - x.mean(0))

    way = per_example(Partition(Mixes(), "all"), F.cross_entropy, 1.0, torch.randn(6))
    assert isinstance(way, Examples)


# Bad input


def test_bad_input_is_refused_before_any_work():
    mlp, ring, data = tiny(), dpps.Ring(3), toy_data(3)
    cases = [
        (lambda: dpps.PartPSP(mlp, ["layer9"], ring), "layer9.*layer1.weight"),
        (lambda: dpps.PartPSP(nn.Flatten(), "all", ring), "no trainable parameters"),
        (lambda: dpps.PartPSP(mlp, "all", ring, batch_size=0), "batch_size is 0"),
        (lambda: dpps.PartPSP(mlp, "all", ring, lr_shared=-1), "lr_shared is -1"),
        (lambda: dpps.PartPSP(mlp, "all", ring).fit(data[:2], epochs=1), "2 data sets for 3 nodes"),
        (lambda: dpps.PartPSP(mlp, "all", ring).fit(data, epochs=0), "epochs is 0"),
        (
            lambda: dpps.PartPSP(mlp, "all", ring, batch_size=41).fit(data, epochs=1),
            "40 examples, fewer than a batch of 41",
        ),
        (
            lambda: dpps.PartPSP(batch_norm_model(), "all", ring, dpps.Record(epsilon=1)).fit(data, epochs=1),
            "1: BatchNorm.*GroupNorm",
        ),
        (
            lambda: dpps.PartPSP(
                mlp, ["layer1"], ring, dpps.Record(epsilon=1), batch_size=10, local_optimizer=torch.optim.SGD
            ).fit(data, epochs=1),
            "plain SGD",
        ),
        (
            lambda: dpps.PartPSP(mlp, "all", ring, batch_size=10).fit(
                data, epochs=1, test=(torch.randn(4, 6), torch.tensor([0, 1, 2, 7]))
            ),
            "labels run from 0 to 7",
        ),
        (
            lambda: dpps.PartPSP(
                mlp, ["layer1"], ring, dpps.Record(epsilon=1), batch_size=10, local_steps=2
            ).fit(data, epochs=1),
            "local_steps is 2",
        ),
        (
            lambda: dpps.PartPSP(mlp, [], ring, dpps.Record(epsilon=1), batch_size=10).fit(data, epochs=1),
            "nothing is shared",
        ),
        (
            lambda: dpps.PartPSP(
                nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)),
                ["0"],
                ring,
                dpps.Record(epsilon=1),
                batch_size=10,
            ).fit(data, epochs=1),
            "dropout masks",
        ),
        (dpps.Record, "neither was given"),
        (lambda: dpps.Record(epsilon=1, noise_multiplier=1), "both was given"),
        (lambda: dpps.Record(epsilon=0), "epsilon is 0"),
        (lambda: dpps.Record(epsilon=1, delta=0), "delta is 0"),
        (lambda: dpps.Record(epsilon=1, clip=-1), "clip is -1"),
        (lambda: dpps.Contribution(clip=1, epsilon=1, delta=0, mechanism="gaussian"), "delta is 0"),
        (lambda: dpps.Contribution(clip=1, epsilon=1, mechanism="gausian"), "did you mean 'gaussian'"),
        (dpps.NodeSwap, "neither was given"),
    ]
    for call, message in cases:
        with pytest.raises(UsageError, match=message):
            call()


def test_a_nan_loss_names_node_and_round_and_sends_nothing():
    data = toy_data(3)
    data[1].tensors[0][15] = float("nan")
    with pytest.raises(RunError, match="loss of node 1 is nan in round 1"):
        train(tiny(), ["layer1"], nodes=3, data=data)
