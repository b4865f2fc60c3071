"""Optimizers of released updates: compared with torch.optim, and in a run, where they must not change noise or charges."""

import math
from functools import partial

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.learning import Adam, LocalOptimizers, Momentum
from dpps.noise import Seeded
from tests.support.learning import make_run, tiny, toy_data, train

# Optimizers of released updates, compared with torch.optim, and with what the released values alone determine


def moved(optimizer, updates):
    rows = torch.zeros_like(updates[0])
    state = optimizer.start(rows)
    for update in updates:
        change, state = optimizer.step(state, update)
        rows = rows + change
    return rows, state


@pytest.fixture
def gradients():
    return torch.randn(12, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def reference(make, gradients):
    parameter = torch.nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def test_momentum_is_that_of_torch(gradients):
    rows, _ = moved(Momentum(0.9), [-0.1 * g for g in gradients])
    torch.testing.assert_close(rows, reference(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), gradients))


def test_momentum_zero_is_the_released_update(gradients):
    change, _ = Momentum(0.0).step(Momentum(0.0).start(gradients[0]), gradients[1])
    assert torch.equal(change, gradients[1])


@pytest.mark.parametrize("rate", [1.0, 0.01])
def test_adam_is_that_of_torch_whatever_the_rate_of_the_updates(gradients, rate):
    rows, _ = moved(Adam(0.1, epsilon=1e-12), [-rate * g for g in gradients])
    torch.testing.assert_close(rows, reference(lambda p: torch.optim.Adam(p, 0.1, eps=1e-12), gradients))


@pytest.mark.parametrize("optimizer", [Momentum(0.5), Adam(0.1)])
def test_arguments_are_not_changed(optimizer, gradients):
    state = optimizer.start(gradients[0])
    before = {name: t.clone() for name, t in state.items()}
    update = gradients[1].clone()
    optimizer.step(state, update)
    assert all(torch.equal(before[name], state[name]) for name in before)
    assert torch.equal(update, gradients[1])


def test_rows_that_are_away_keep_their_state(gradients):
    optimizer = Adam(0.1)
    _, old = optimizer.advance({}, gradients[0], None)
    _, new = optimizer.step(old, gradients[1])
    change, kept = optimizer.advance(old, gradients[1], torch.tensor([False, True, False]))
    assert change.any(1).tolist() == [True, False, True]
    assert torch.equal(kept["first"][1], old["first"][1])
    assert torch.equal(kept["second"][0], new["second"][0])
    assert kept["steps"].tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Momentum(1.0), "momentum is 1.0"),
        (lambda: Momentum(-0.1), r"-0\.1.*\[0, 1\)"),
        (lambda: Adam(0.0), "rate is 0.0"),
        (lambda: Adam(0.1, beta2=1.0), "beta2 is 1.0"),
    ],
)
def test_bad_values_are_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


# Optimizers and averaging in a run: what they make of released updates, and what they must not change


RECORD = dpps.Record(noise_multiplier=2.0)
CONTRIBUTION = dpps.Contribution(1.0, noise_multiplier=2.0, mechanism="gaussian")


def follow(monkeypatch, **options):
    """A run, and for every round the rows before, and what was released and sent of them."""
    seen = []
    release, post_process = dpps.DPPS.release, dpps.DPPS.post_process

    def releasing(self, state, perturbation=None):
        seen.append([state.s.clone(), perturbation.clone()])
        return release(self, state, perturbation)

    def processing(self, state, message, change, gain):
        seen[-1] += [message.rows - state.s, change.clone()]
        return post_process(self, state, message, change, gain)

    monkeypatch.setattr(dpps.DPPS, "release", releasing)
    monkeypatch.setattr(dpps.DPPS, "post_process", processing)
    return train(tiny(), ["layer1"], **options), seen


@pytest.mark.parametrize("unit", [RECORD, CONTRIBUTION], ids=lambda u: u.name)
def test_the_velocity_is_made_of_released_updates_alone(monkeypatch, unit):
    run, seen = follow(monkeypatch, unit=unit, optimizer=Momentum(0.8))
    velocity = torch.zeros_like(seen[0][0])
    for _, _, released, change in seen:
        velocity = 0.8 * velocity + released
        torch.testing.assert_close(change, velocity)
    torch.testing.assert_close(run.state.kept["released/velocity"], velocity)


def test_noise_is_in_what_the_velocity_keeps(monkeypatch):
    _, seen = follow(monkeypatch, unit=RECORD, optimizer=Momentum(0.8), lr_shared=1.0)
    noise = torch.cat([(released - eps).flatten() for _, eps, released, _ in seen])
    expected = 2.0 * 1.0 / 10  # multiplier x rate x clip / batch
    assert float(noise.std()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("optimizer", [Momentum(0.9), Adam(0.05)], ids=lambda o: type(o).__name__)
def test_an_optimizer_changes_neither_noise_nor_charges(optimizer):
    plain, other = (train(tiny(), ["layer1"], RECORD, optimizer=o) for o in (None, optimizer))
    assert [log.scale for log in plain.log] == [log.scale for log in other.log]
    assert [log.used for log in plain.log] == [log.used for log in other.log]
    assert plain.privacy.epsilon == other.privacy.epsilon
    assert not torch.equal(plain.shared, other.shared)


def test_momentum_without_noise_is_that_of_torch():
    data = toy_data(1)
    model = tiny()
    run = make_run(
        shared="all",
        model=model,
        data=[data[0], data[0]],
        batch_size=40,
        lr_shared=0.2,
        optimizer=Momentum(0.9),
        topology=dpps.Complete(2),
    ).fit(epochs=5)
    reference = tiny()
    sgd = torch.optim.SGD(reference.parameters(), 0.2, momentum=0.9)
    for _ in range(5):
        sgd.zero_grad()
        torch.nn.functional.cross_entropy(reference(data[0].tensors[0]), data[0].tensors[1]).backward()
        sgd.step()
    expected = torch.cat([p.detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(run.shared, expected, atol=1e-5, rtol=1e-4)


def test_the_local_part_has_its_own_moments_in_the_unit_record():
    run = train(tiny(), ["layer1"], RECORD, optimizer=Adam(0.05))
    kept = run.nodes.updates.state()
    assert set(kept) == {"first", "second", "steps"}
    assert kept["first"].shape == run.local.shape
    assert kept["steps"].tolist() == [len(run.log)] * 4


@pytest.mark.parametrize("optimizer", [Momentum(0.9), Adam(0.05)], ids=lambda o: type(o).__name__)
def test_large_batches_whose_sums_are_float64(optimizer):
    options = {"data": toy_data(3, n=500), "nodes": 3, "batch_size": 300, "epochs": 2}
    run = train(tiny(), ["layer1"], RECORD, optimizer=optimizer, **options)
    kept = [*run.state.kept.values(), *run.nodes.updates.state().values()]
    assert {t.dtype for t in kept} <= {torch.float32, torch.int64}


def test_in_node_swap_the_sensitivity_counts_the_velocity():
    unit = dpps.NodeSwap(budget=5.0, noise_rate=1e-3)
    options = {"sync_every": 2, "topology": dpps.Complete(4), "lr_shared": 0.1}
    plain, moved = (train(tiny(), ["layer1"], unit, optimizer=o, **options) for o in (None, Momentum(0.9)))
    assert moved.log[-1].used > plain.log[-1].used
    assert all(log.epsilon == pytest.approx(5 / 1e-3) for log in moved.log)


def test_private_start_values_are_not_post_processed():
    unit = dpps.Bounded(clip=0.5, start_distance=2.0)
    protocol = dpps.DPPS(dpps.Ring(3), dpps.Gaussian(1.0), unit, noise=Seeded(1))
    state = protocol.start(torch.arange(3.0)[:, None], common_start=False)
    message = protocol.release(state, torch.zeros(3, 1))
    with pytest.raises(UsageError, match=r"optimizer.*record or contribution"):
        protocol.post_process(state, message, torch.zeros(3, 1))
    assert state.round == 0


def test_an_absent_node_keeps_its_velocity(monkeypatch):
    away = dpps.Complete(4).with_dropouts({1: [2]})
    run, seen = follow(monkeypatch, unit=RECORD, optimizer=Momentum(0.8), topology=away, epochs=1)
    assert len(run.log) == 4
    assert not seen[1][3][2].any()
    torch.testing.assert_close(seen[2][3][2], 0.8 * seen[0][2][2] + seen[2][2][2])


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    options = {"topology": dpps.Ring(3), "privacy": RECORD, "seed": 3}

    def algorithm():
        return dpps.PartPSP(
            tiny(),
            ["layer1"],
            batch_size=10,
            optimizer=Adam(0.05),
            averaging=0.5,
            lr_step=2,
        )

    whole = dpps.Run(algorithm(), toy_data(3), folder=tmp_path / "whole", **options).fit(epochs=3)
    first = dpps.Run(algorithm(), toy_data(3), folder=tmp_path / "parts", **options)
    first.callbacks.append(lambda run, log: run.stop() if log.round == 6 else None)
    first.fit(epochs=3)
    second = dpps.Run.open(tmp_path / "parts", algorithm(), toy_data(3), **options).fit(epochs=3)
    assert torch.equal(whole.shared, second.shared)
    assert torch.equal(whole.local, second.local)
    for name, rows in whole.state.kept.items():
        assert second.state.kept[name].dtype == rows.dtype
        assert torch.equal(second.state.kept[name], rows)


@pytest.mark.parametrize(("part", "first"), [(0.5, 6), (1.0, 0), (0.01, 11)])
def test_what_comes_out_is_the_average(part, first):
    rows = []
    options = {"unit": RECORD, "averaging": part}
    run = train(
        tiny(), ["layer1"], **options, callbacks=[lambda run, log: rows.append(run.state.shared.s.clone())]
    )
    torch.testing.assert_close(run.shared, torch.stack(rows[first:]).mean(0).mean(0))
    plain = train(tiny(), ["layer1"], RECORD)
    assert torch.equal(plain.state.shared.s, run.state.shared.s)  # and nothing else changes


@pytest.mark.parametrize("averaging", [-0.1, 1.5, math.nan])
def test_averaging_is_a_part(averaging):
    with pytest.raises(UsageError, match="averaging"):
        dpps.PartPSP(tiny(), ["layer1"], averaging=averaging)


def test_gradient_tracking_has_no_updates_to_optimize():
    with pytest.raises(UsageError, match=r"GradientTracking.*optimizer"):
        dpps.GradientTracking(tiny(), optimizer=Momentum(0.9))


# Every node has an optimizer of its own, whose memory can be taken out and put back


MAKES = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.1),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_steps_are_those_of_torch_for_every_row_by_itself(make) -> None:
    local, gradient = torch.randn(2, 3), torch.randn(2, 3)
    optimizers = LocalOptimizers(make, local)
    found = local.clone()
    for _ in range(3):
        found = optimizers.step(found, gradient, slice(0, 2))
    for k in range(2):
        parameter = torch.nn.Parameter(local[k].clone())
        own = make([parameter])
        for _ in range(3):
            parameter.grad = gradient[k].clone()
            own.step()
        torch.testing.assert_close(found[k], parameter.detach())


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_what_was_taken_out_is_put_back(make) -> None:
    local, gradient, only = torch.zeros(1, 3), torch.tensor([[1.0, -2.0, 0.5]]), slice(0, 1)
    optimizers = LocalOptimizers(make, local)
    optimizers.step(local, -3 * gradient, only)
    kept = optimizers.state()
    once = optimizers.step(local, gradient, only)
    again = optimizers.step(local, gradient, only)
    assert ((again - once).abs() > 0.01).all()  # the memory has moved on
    optimizers.load_state(kept)
    torch.testing.assert_close(optimizers.step(local, gradient, only), once)


def test_who_is_away_keeps_row_and_memory() -> None:
    local = torch.ones(2, 3)
    optimizers = LocalOptimizers(MAKES["momentum"], local)
    found = optimizers.step(local, torch.ones(2, 3), slice(0, 2), away={1})
    assert torch.equal(found[1], local[1])
    assert not any(name.startswith("1.") for name in optimizers.state())
