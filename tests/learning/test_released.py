"""Optimizers, schedules and averaging in a run: what they make of released updates, and what they must not change."""

import math

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.learning import Adam, Cosine, Momentum, WarmUp
from dpps.noise import Seeded
from tests.support.learning import tiny, toy_data, train

RECORD = dpps.Record(noise_multiplier=2.0)
CONTRIBUTION = dpps.Contribution(1.0, noise_multiplier=2.0, mechanism="gaussian")


def follow(monkeypatch, **options):
    """A run, and for every round the rows before, and what was released and sent of them."""
    seen = []
    step = dpps.DPPS.step

    def listening(self, state, perturbation=None, finish=None, gain=math.inf):
        before = state.s.clone()

        def finished(released):
            change = finish(released)
            seen.append((before, perturbation.clone(), released.clone(), change.clone()))
            return change

        return step(self, state, perturbation, finished, gain)

    monkeypatch.setattr(dpps.DPPS, "step", listening)
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
    run = dpps.Run(
        dpps.PartPSP(model, "all", batch_size=40, lr_shared=0.2, optimizer=Momentum(0.9)),
        [data[0], data[0]],
        topology=dpps.Complete(2),
        seed=0,
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
    with pytest.raises(UsageError, match=r"optimizer.*record or contribution"):
        protocol.step(state, torch.zeros(3, 1), lambda released: released)
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
            schedule=WarmUp(3, Cosine()),
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


def test_the_rates_follow_the_schedule_and_stand_in_the_contract():
    run = train(tiny(), ["layer1"], RECORD, schedule=Cosine(), lr_shared=1.0)
    factors = Cosine().factors(12)
    assert [rate for rate, _ in run.contract.plan.rounds] == list(factors)
    assert [log.used for log in run.log] == pytest.approx([f * 1.0 / 10 for f in factors], rel=1e-6)
    assert run.state.shared.clock == 12  # the counters of the topology do not restart


def test_a_schedule_and_rate_steps_exclude_each_other():
    with pytest.raises(UsageError, match=r"lr_step.*cosine"):
        dpps.PartPSP(tiny(), ["layer1"], lr_step=2, schedule=Cosine())


def test_what_comes_out_is_the_average():
    rows = []
    options = {"unit": RECORD, "averaging": 0.5}
    run = train(
        tiny(), ["layer1"], **options, callbacks=[lambda run, log: rows.append(run.state.shared.s.clone())]
    )
    torch.testing.assert_close(run.shared, torch.stack(rows[6:]).mean(0).mean(0))
    plain = train(tiny(), ["layer1"], RECORD)
    assert torch.equal(plain.state.shared.s, run.state.shared.s)  # and nothing else changes


@pytest.mark.parametrize("averaging", [-0.1, 1.5, math.nan])
def test_averaging_is_a_part(averaging):
    with pytest.raises(UsageError, match="averaging"):
        dpps.PartPSP(tiny(), ["layer1"], averaging=averaging)


def test_gradient_tracking_has_no_updates_to_optimize():
    from dpps.learning import GradientTracking

    with pytest.raises(UsageError, match=r"GradientTracking.*optimizer"):
        GradientTracking(tiny(), optimizer=Momentum(0.9))
