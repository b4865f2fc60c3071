"""Algorithm 2 against the NumPy oracle, the limits that must coincide, and every bad input."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import Partition
from tests.support import oracle
from tests.support.learning import batch_norm_model, tiny, toy_data, train
from tests.support.protocol import Scripted


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


def test_no_noise_equals_sgp():
    noiseless = dpps.NodeSwap(budget=1.0, noise_rate=0.0, sensitivity=dpps.Paper(0.8, 0.5))
    a, b = train(tiny(), "all", noiseless), train(tiny(), "all", None)
    assert torch.equal(a.shared, b.shared)


def test_sgp_by_hand():
    """All shared, no noise: s <- W (s - lr gradient), nothing else."""
    model, data = tiny(), toy_data(4)
    run = dpps.Run(
        dpps.PartPSP(model, "all", batch_size=10, lr_shared=0.3), data, topology=dpps.DOut(4, 2), seed=0
    ).fit(epochs=1)
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


def test_callbacks_models_and_saving(tmp_path):
    seen = []
    run = dpps.Run(
        dpps.PartPSP(tiny(), ["layer1"], batch_size=10),
        toy_data(3),
        topology=dpps.Ring(3),
        seed=0,
        callbacks=[lambda training, log: seen.append(log.round)],
    ).fit(epochs=1)
    assert seen == [0, 1, 2, 3]
    models = run.models()
    torch.testing.assert_close(models[0].layer1.weight, models[2].layer1.weight)
    assert not torch.equal(models[0].layer2.weight, models[2].layer2.weight)
    from safetensors.torch import load_file

    paths = run.save(tmp_path)
    fresh = tiny(seed=99)
    fresh.load_state_dict(load_file(paths[2]))
    assert torch.equal(fresh.layer2.weight, models[2].layer2.weight)


# Bad input


def test_bad_input_is_refused_before_any_work():
    mlp, ring, data = tiny(), dpps.Ring(3), toy_data(3)
    cases = [
        (lambda: dpps.PartPSP(mlp, ["layer9"]), "layer9.*layer1.weight"),
        (lambda: dpps.PartPSP(nn.Flatten(), "all"), "Flatten"),
        (lambda: dpps.PartPSP(mlp, "all", batch_size=0), "batch_size is 0"),
        (lambda: dpps.PartPSP(mlp, "all", lr_shared=-1), "lr_shared is -1"),
        (
            lambda: dpps.Run(dpps.PartPSP(mlp, "all"), data[:2], topology=ring).fit(epochs=1),
            "2 data sets.*3 nodes",
        ),
        (lambda: dpps.Run(dpps.PartPSP(mlp, "all"), data, topology=ring).fit(epochs=0), "epochs is 0"),
        (
            lambda: dpps.Run(dpps.PartPSP(mlp, "all", batch_size=41), data, topology=ring).fit(epochs=1),
            "40 examples.*41",
        ),
        (
            lambda: dpps.Run(
                dpps.PartPSP(batch_norm_model(), "all"), data, topology=ring, privacy=dpps.Record(epsilon=1)
            ).fit(epochs=1),
            "1: BatchNorm.*GroupNorm",
        ),
        (
            lambda: dpps.Run(
                dpps.PartPSP(mlp, ["layer1"], batch_size=10, local_optimizer=torch.optim.SGD),
                data,
                topology=ring,
                privacy=dpps.Record(epsilon=1),
            ).fit(epochs=1),
            "plain SGD",
        ),
        (
            lambda: dpps.Run(
                dpps.PartPSP(mlp, "all", batch_size=10),
                data,
                topology=ring,
                test=(torch.randn(4, 6), torch.tensor([0, 1, 2, 7])),
            ).fit(epochs=1),
            "0 to 7",
        ),
        (
            lambda: dpps.Run(
                dpps.PartPSP(mlp, ["layer1"], batch_size=10, local_steps=2),
                data,
                topology=ring,
                privacy=dpps.Record(epsilon=1),
            ).fit(epochs=1),
            "local_steps is 2",
        ),
        (
            lambda: dpps.Run(
                dpps.PartPSP(mlp, [], batch_size=10), data, topology=ring, privacy=dpps.Record(epsilon=1)
            ).fit(epochs=1),
            "shared",
        ),
        (
            lambda: dpps.Run(
                dpps.PartPSP(
                    nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)), ["0"], batch_size=10
                ),
                data,
                topology=ring,
                privacy=dpps.Record(epsilon=1),
            ).fit(epochs=1),
            "dropout masks",
        ),
        (dpps.Record, "epsilon.*noise_multiplier"),
        (lambda: dpps.Record(epsilon=1, noise_multiplier=1), "epsilon.*noise_multiplier"),
        (lambda: dpps.Record(epsilon=0), "epsilon is 0"),
        (lambda: dpps.Record(epsilon=1, delta=0), "delta is 0"),
        (lambda: dpps.Record(epsilon=1, clip=-1), "clip is -1"),
        (lambda: dpps.Contribution(clip=1, epsilon=1, delta=0, mechanism="gaussian"), "delta is 0"),
        (lambda: dpps.Contribution(clip=1, epsilon=1, mechanism="gausian"), "'gausian'.*'gaussian'"),
        (lambda: dpps.NodeSwap(budget=5, epsilon=3), "budget or epsilon"),
    ]
    for call, message in cases:
        with pytest.raises(UsageError, match=message):
            call()
