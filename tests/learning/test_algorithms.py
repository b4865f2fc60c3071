"""Algorithms: Algorithm 2 against the NumPy oracle, the baselines by hand, the limits that must coincide, and what is refused."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import SGP, SGPDP, Partition
from dpps.privacy import Pairs, Unit
from tests.support import oracle
from tests.support.learning import batch_norm_model, make_run, tiny, toy_data, train
from tests.support.protocol import Scripted

# Algorithm 2 against the NumPy oracle, the limits that must coincide, and every bad input


def test_equals_the_oracle_for_twenty_rounds_under_injected_noise():
    n, rounds, batch, rng = 5, 20, 8, np.random.default_rng(1)
    model = tiny().double()
    sets = [TensorDataset(d.tensors[0].double(), d.tensors[1]) for d in toy_data(n)]
    w1, b1, w2, b2 = (p.detach().numpy().copy() for p in model.parameters())
    d_s = w1.size + b1.size
    noise = rng.laplace(size=(rounds, n, d_s))
    unit = dpps.NodeSwap(budget=2.0, noise_rate=0.01, sensitivity=dpps.Paper(0.8, 0.6), clip=0.7)
    algorithm = dpps.PartPSP(model, ["layer1"], lr_shared=0.3, lr_local=0.2, batch_size=batch)
    algorithm.partition.initial = lambda: tuple(  # type: ignore[method-assign]
        torch.cat([p.detach().flatten() for p in part])
        for part in ((model.layer1.weight, model.layer1.bias), (model.layer2.weight, model.layer2.bias))
    )
    options = {"topology": dpps.Exponential(n), "privacy": unit, "sync_every": 4, "noise": Scripted(noise)}
    learner = dpps.Run(algorithm, sets, **options).start(epochs=4)
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
        record = learner.step()
        assert record.used == pytest.approx(sensitivity, rel=1e-8)
        np.testing.assert_allclose(learner.state.shared.s.numpy(), s, rtol=1e-8, atol=1e-10)
        flat = np.stack([np.concatenate([a.ravel(), b]) for a, b in locals_])
        np.testing.assert_allclose(learner.state.local.numpy(), flat, rtol=1e-8, atol=1e-10)


def test_a_seed_repeats_bit_for_bit_and_another_differs():
    unit = dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.8, 0.5))
    a, b, c = (train(tiny(), ["layer1"], unit, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(a.shared, b.shared)
    assert torch.equal(a.local, b.local)
    assert not torch.equal(a.shared, c.shared)


# Limits that must coincide


def test_sgp_by_hand():
    """All shared, no noise: s <- W (s - lr gradient), nothing else."""
    model, data = tiny(), toy_data(4)
    run = make_run(shared="all", model=model, data=data, lr_shared=0.3, topology=dpps.DOut(4, 2)).fit(
        epochs=1
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
    torch.testing.assert_close(run.state.shared.s, rows)


def test_two_nodes_and_dropouts_work():
    assert train(tiny(), ["layer1"], nodes=2, topology=dpps.Exponential(2)).accuracy > 50
    away = dpps.Exponential(4).with_dropouts(0.3, seed=1)
    assert (
        train(tiny(), ["layer1"], dpps.Contribution(clip=1.0, round_epsilon=1e3), topology=away).accuracy > 50
    )


def test_any_optimizer_serves_the_local_part():
    plain = train(tiny(), ["layer1"], lr_local=0.3)
    same = train(tiny(), ["layer1"], local_optimizer=lambda p: torch.optim.SGD(p, lr=0.3))
    torch.testing.assert_close(plain.local, same.local)
    adam = train(tiny(), ["layer1"], local_optimizer=lambda p: torch.optim.Adam(p, lr=0.05))
    assert adam.accuracy > 60
    assert not torch.allclose(adam.local, plain.local)


# Bad input


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: dpps.PartPSP(tiny(), ["layer9"]), "layer9.*layer1.weight"),
        (lambda: dpps.PartPSP(nn.Flatten(), "all"), "Flatten"),
        (dpps.Record, "epsilon.*noise_multiplier"),
        (lambda: dpps.Record(epsilon=1, noise_multiplier=1), "epsilon.*noise_multiplier"),
        (lambda: dpps.Record(epsilon=0), "epsilon is 0"),
        (lambda: dpps.Record(epsilon=1, delta=0), "delta is 0"),
        (lambda: dpps.Record(epsilon=1, clip=-1), "clip is -1"),
        (lambda: dpps.Contribution(clip=1, epsilon=1, delta=0, mechanism="gaussian"), "delta is 0"),
        (lambda: dpps.Contribution(clip=1, epsilon=1, mechanism="gausian"), "'gausian'.*'gaussian'"),
        (lambda: dpps.NodeSwap(budget=5, epsilon=3), "budget or epsilon"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()


DROPOUT = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("model", "shared", "options", "run", "said"),
    [
        (tiny(), "all", {}, {"data": toy_data(2)}, "2 data sets.*3 nodes"),
        (tiny(), "all", {}, {"epochs": 0}, "epochs is 0"),
        (tiny(), "all", {"batch_size": 41}, {}, "40 examples.*41"),
        (tiny(), "all", {}, {"test": (torch.randn(4, 6), torch.tensor([0, 1, 2, 7]))}, "0 to 7"),
        (batch_norm_model(), "all", {}, {"privacy": dpps.Record(epsilon=1)}, "1: BatchNorm.*GroupNorm"),
        (
            tiny(),
            ["layer1"],
            {"local_optimizer": torch.optim.SGD},
            {"privacy": dpps.Record(epsilon=1)},
            "plain SGD",
        ),
        (tiny(), ["layer1"], {"local_steps": 2}, {"privacy": dpps.Record(epsilon=1)}, "local_steps is 2"),
        (tiny(), [], {}, {"privacy": dpps.Record(epsilon=1)}, "shared"),
        (DROPOUT, ["0"], {}, {"privacy": dpps.Record(epsilon=1)}, "dropout masks"),
    ],
)
def test_a_run_that_cannot_work_is_refused_before_any_work(model, shared, options, run, said):
    run = {"data": toy_data(3), "epochs": 1} | run
    algorithm = dpps.PartPSP(model, shared, **{"batch_size": 10} | options)
    data, epochs = run.pop("data"), run.pop("epochs")
    with pytest.raises(UsageError, match=said):
        dpps.Run(algorithm, data, topology=dpps.Ring(3), **run).fit(epochs=epochs)


# Where gradients are taken: in the unit record both at l(t), otherwise the shared one at l(t+1), as the paper has it


def shared_after_one_round(unit: Unit, lr_local: float) -> torch.Tensor:
    torch.manual_seed(0)
    data = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(2)]
    model = dpps.models.MLP((4, 5, 3))
    algorithm = dpps.PartPSP(model, ["layer1"], batch_size=8, lr_shared=0.1, lr_local=lr_local)
    run = dpps.Run(algorithm, data, topology=dpps.Ring(2), privacy=unit, seed=3)
    run.start(epochs=1)
    run.step()
    return run.state.shared.s.clone()


@pytest.mark.parametrize(
    ("unit", "before_the_local_step"),
    [
        (dpps.Record(noise_multiplier=1e-6), True),
        (dpps.Contribution(clip=100.0, mechanism="gaussian", noise_multiplier=1e-6), False),
    ],
)
def test_the_shared_gradient_is_taken_before_or_after_the_local_step(
    unit: Unit, before_the_local_step: bool
) -> None:
    near, far = (shared_after_one_round(unit, lr_local) for lr_local in (1e-3, 3.0))
    assert torch.equal(near, far) == before_the_local_step


# SGP and SGPDP are PartPSP with everything shared; SGP has no noise


DATA = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]


def _shared(algorithm, **options) -> torch.Tensor:
    run = dpps.Run(algorithm, DATA, topology=dpps.Ring(3), seed=0, **options).fit(1)
    return run.shared


def test_without_noise_all_three_are_the_same() -> None:
    assert SGP.shares("1") == SGPDP.shares("1") == "all"
    found = []
    for kind in (dpps.PartPSP, SGP, SGPDP):
        torch.manual_seed(0)
        found.append(_shared(kind(nn.Linear(3, 2), "all", batch_size=4)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_sgpdp_has_the_noise_of_partpsp() -> None:
    model, unit = nn.Linear(3, 2), dpps.Record(noise_multiplier=1.0)
    noisy = _shared(SGPDP(model, "all", batch_size=4), privacy=unit)
    assert torch.equal(noisy, _shared(dpps.PartPSP(model, "all", batch_size=4), privacy=unit))
    assert not torch.allclose(noisy, _shared(SGPDP(model, "all", batch_size=4)))


# PEDFL is D-PSGD with noise: the gradient at the old point is added after mixing, and leaves with the next message


def pedfl(unit=None, **options):
    algorithm = dpps.PEDFL(tiny(), "all", batch_size=10, lr_shared=0.2)
    return dpps.Run(algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0, **options)


def test_without_noise_it_is_decentralised_parallel_sgd():
    run = pedfl().start(epochs=1)
    weights = torch.from_numpy(run.topology.weights(0).dense())
    partition = run.algorithm.partition
    x = partition.initial()[0].repeat(3, 1)
    for _ in range(3):
        batch, labels, _ = run.nodes.updates.sampler.batch(run.state.round)
        x.requires_grad_()
        for i in range(3):
            named = partition.views(x[i], x[i, :0])
            F.cross_entropy(functional_call(run.algorithm.model, named, (batch[i],)), labels[i]).backward()
        gradient, x = x.grad, x.detach()
        x = (weights.to(x) @ x) - 0.2 * gradient
        run.step()
        assert torch.allclose(run.state.shared.s + run.state.kept["update"], x, atol=1e-6)


def test_calibrated_to_a_clip_the_noise_is_constant_and_the_epsilon_that_of_the_rounds():
    run = pedfl(dpps.Contribution(clip=5.0, round_epsilon=0.5, delta=0.0)).fit(epochs=1)
    assert [log.scale for log in run.log] == pytest.approx([2 * 0.2 * 5.0 / 0.5] * 4)
    assert run.privacy.epsilon == pytest.approx(4 * 0.5)


def test_an_update_leaves_clipped_whatever_the_gradient():
    run = pedfl(dpps.Contribution(clip=1e-3, round_epsilon=1e9, delta=0.0)).start(epochs=1)
    run.step()
    before = run.state.shared.s
    run.step()
    moved = run.state.shared.s - torch.from_numpy(run.topology.weights(0).dense()).to(before) @ before
    assert float(moved.abs().sum(1).max()) <= 0.2 * 1e-3 * 1.01


def test_the_real_distance_is_used_in_node_swap():
    run = pedfl(dpps.NodeSwap(budget=5.0)).start(epochs=1)
    assert run.step().used == 0.0
    assert run.step().used > 0


def test_the_unit_record_is_refused():
    with pytest.raises(UsageError, match=r"PEDFL.*unit record"):
        pedfl(dpps.Record(epsilon=1.0))


# Gradient tracking reaches the common optimum at a constant rate, where SGP stays beside it


NODES, EXAMPLES = 5, 12


def regression():
    """Nodes whose own optima lie far apart; one batch is all of a node's data."""
    rng = torch.Generator().manual_seed(1)
    sets = []
    for _ in range(NODES):
        x = torch.randn(EXAMPLES, 3, generator=rng, dtype=torch.float64)
        centre = 5 * torch.randn(3, 1, generator=rng, dtype=torch.float64)
        sets.append(TensorDataset(x, x @ centre))
    return sets


def optimum(sets):
    x, y = (torch.cat(part) for part in zip(*(s.tensors for s in sets), strict=True))
    return torch.linalg.lstsq(x, y).solution[:, 0]


def tracked(kind, topology, epochs=600):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    loss = nn.functional.mse_loss
    algorithm = kind(model, lr_shared=0.05, batch_size=EXAMPLES, loss=loss)
    algorithm.partition.initial = lambda: (model.weight.detach().flatten().clone(), torch.empty(0).double())
    return dpps.Run(algorithm, regression(), topology=topology, seed=0).fit(epochs=epochs)


@pytest.mark.parametrize("topology", [dpps.Ring(NODES), dpps.Exponential(NODES), dpps.DOut(NODES, 2)])
def test_every_node_ends_at_the_common_optimum(topology):
    best = optimum(regression())
    run = tracked(dpps.GradientTracking, topology)
    apart = (run.algorithm.shared_parameters(run.state.shared.y) - best).norm(dim=1)
    assert float(apart.max()) < 1e-6
    beside = (tracked(dpps.SGP, topology).state.shared.y - best).norm(dim=1)
    assert float(beside.max()) > 0.05


def test_the_trackers_add_up_to_the_gradients():
    run = tracked(dpps.GradientTracking, dpps.DOut(NODES, 2), epochs=7)
    z = run.state.shared.s[:, run.algorithm.partition.shared_size :]
    torch.testing.assert_close(z.sum(0), run.state.kept["gradient"].sum(0))


def test_it_is_offered_without_noise_and_with_everything_shared():
    sets = regression()
    with pytest.raises(UsageError, match=r"GradientTracking.*record"):
        dpps.Run(
            dpps.GradientTracking(nn.Linear(3, 1)),
            sets,
            topology=dpps.Ring(NODES),
            privacy=dpps.Record(epsilon=1),
        )
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    run = dpps.Run(dpps.GradientTracking(model, ["0"], batch_size=4), sets, topology=dpps.Ring(NODES))
    with pytest.raises(UsageError, match='shared="all", local_steps=1'):
        run.start(epochs=1)


# What every algorithm refuses, and the plan it makes of sizes and epochs


def _algorithm(**options) -> dpps.PartPSP:
    return dpps.PartPSP(nn.Linear(4, 2), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr_shared": -1.0}, r"lr_shared.*-1\.0"),
        ({"lr_local": float("nan")}, "lr_local.*nan"),
        ({"lr_shared": "0.1"}, r"lr_shared.*'0\.1'"),
        ({"loss": "mse"}, r"loss.*'mse'.*\(outputs, targets\)"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"lr_step": -1}, "lr_step is -1"),
        ({"lr_step": 1.5}, "lr_step is 1.5"),
        ({"local_steps": 1.5}, "local_steps is 1.5"),
        ({"optimizer": "adam"}, r"optimizer.*'adam'.*dpps\.Momentum"),
        ({"optimizer": torch.optim.Adam}, "local_optimizer="),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        _algorithm(**options)


@pytest.mark.parametrize("model", ["mlp", nn.Linear])
def test_a_model_is_a_module(model) -> None:
    with pytest.raises(UsageError, match=r"model.*nn\.Module"):
        dpps.PartPSP(model)


def test_rounds_and_sampling_rates_follow_from_the_declared_sizes() -> None:
    plan = _algorithm(batch_size=10, lr_step=2).plan([100, 50], epochs=4, spare_rounds=3)
    assert dict(plan.rounds) == {1.0: 7, 0.1: 14, 0.01: 7}
    assert plan.sampling == (0.1, 0.2)
    assert (plan.count, plan.paid, plan.coordinates) == (28, 31, 10)
    with pytest.raises(UsageError, match=r"epochs.*0"):
        _algorithm().plan([100], epochs=0)


def test_noise_that_cancels_needs_an_optimizer_that_is_linear() -> None:
    unit = dpps.Record(epsilon=3, trust=Pairs(1))
    assert _algorithm(optimizer=dpps.Momentum(0.9)).unit(unit) is unit
    with pytest.raises(UsageError, match=r"Adam.*Momentum.*trust=Pairs"):
        _algorithm(optimizer=dpps.Adam()).unit(unit)
