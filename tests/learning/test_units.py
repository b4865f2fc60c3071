"""PartPSP in each privacy unit: clips, noise on both parts, and rounds that are paid for."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dpps
from dpps.errors import RunError
from dpps.noise import SecureNoise
from tests.support.learning import make_run, tiny, toy_data, train
from tests.support.protocol import Scripted, Wire


def test_contribution_clips_in_the_protocol_whatever_the_caller_sends():
    unit = dpps.Contribution(clip=0.5, round_epsilon=10.0)
    learner = make_run(unit, lr_shared=0.2, seed=0, noise=Scripted([np.zeros((3, 28))] * 2)).start(epochs=1)
    before = learner.state.shared.s.clone()
    record = learner.protocol.step(learner.state.shared, torch.full_like(before, 100.0))
    moved = learner.state.shared.s - dpps.Stacked(3).mix(dpps.Ring(3).weights(0), before)[0]
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
    wire = Wire(3)
    learner = make_run(dpps.Record(epsilon=1.0), spare_rounds=2, deployment=dpps.Simulation(wire)).start(
        epochs=1
    )
    for _ in range(4 + 2):
        learner.step()
    with pytest.raises(RunError, match=r"round 6 .*epsilon 1 .*6 rounds"):
        learner.step()
    assert len(wire.sent) == 6


def test_where_messages_really_leave_a_failure_is_not_told():
    """A crafted example must not be able to stop the run: noise is sent instead."""

    class Elsewhere(dpps.Stacked):
        simulation = False

    data = toy_data(3)
    data[1].tensors[0][:] = float("nan")
    learner = make_run(
        dpps.Contribution(clip=1.0, round_epsilon=1.0), data=data, deployment=dpps.Simulation(Elsewhere(3))
    ).start(epochs=1)
    learner.step()
    assert bool(torch.isfinite(learner.state.shared.s).all())


@pytest.mark.parametrize(
    "unit",
    [dpps.Record(epsilon=3.0, delta=1e-3), dpps.Contribution(clip=1.0, epsilon=3.0)],
    ids=lambda u: u.name,
)
@pytest.mark.parametrize("shared", [["layer1"], "all"])
def test_one_process_with_secure_noise_never_stops_because_of_data(unit, shared):
    """One finite example of 3e38 made the loss NaN; stopping for it would be a message without noise."""
    data = toy_data(3)
    data[1].tensors[0][4] = 3e38
    run = make_run(unit, shared=shared, data=data, lr_shared=0.1, noise=SecureNoise())
    run.fit(epochs=2)
    assert run.state.round == 8
    assert run.privacy.epsilon <= 3.0
    assert "simulation" not in run.privacy.statement
    assert bool(torch.isfinite(run.state.shared.s).all())


class Secret(dpps.Seeded):
    """Somebody's own source of noise that nobody knows."""

    private = True


def test_where_nobody_knows_the_noise_nobody_knows_the_batches():
    """With known batches amplification by sampling is void."""
    data = toy_data(3)
    options = {"topology": dpps.Ring(3), "privacy": dpps.Record(noise_multiplier=2.0), "seed": 7}

    def batches(noise):
        algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
        run = dpps.Run(algorithm, data, noise=noise, **options).start(epochs=1)
        return [run.nodes.updates.sampler.batch(t)[2].sum().item() for t in range(20)]

    assert batches(dpps.Seeded(1)) == batches(dpps.Seeded(2))
    assert batches(Secret(1)) != batches(Secret(1))


class Fussy(nn.Module):
    """Fails on some examples: its embedding lacks a word."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1, self.words, self.layer2 = nn.Linear(6, 5), nn.Embedding(100, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.layer2(self.layer1(x).tanh() + self.words(x[:, 0].abs().long()))


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LAPLACE = dpps.Contribution(clip=1.0, epsilon=3.0)


@pytest.mark.parametrize("engine", ["loop", "vectorised"])
@pytest.mark.parametrize(
    ("unit", "options"),
    [
        (dpps.Record(epsilon=3.0, delta=1e-3), {}),
        (LAPLACE, {}),
        (LAPLACE, {"local_optimizer": SGD}),
        (LAPLACE, {"kind": dpps.PEDFL, "shared": "all"}),
    ],
)
def test_secret_noise_is_sent_all_the_same_where_the_model_fails_on_an_example(unit, engine, options):
    """A model can be made to fail on certain examples; whoever sees the run stop would know that a node has one."""
    data = toy_data(3)
    data[1].tensors[0][4] = 3000.0
    given = {"model": Fussy(), "data": data, "engine": engine} | options
    run = make_run(unit, **given, noise=SecureNoise()).start(epochs=1)
    before = run.local.clone()
    run.step()
    assert bool(torch.isfinite(run.state.shared.s).all())
    if unit is LAPLACE and len(before[0]):
        assert (run.local != before).any(1).tolist() == [True, False, True]  # its batch holds that example
    run.fit(epochs=1)
    assert run.ledger.messages == run.plan.count
    if (
        unit is LAPLACE
    ):  # whose batches hold all examples: a simulation with known noise says where the model fails
        with pytest.raises(IndexError, match="index"):
            make_run(unit, **given).fit(epochs=1)


class OneOddExample(Dataset):
    """Somebody's own data set whose example 4 is not as the others are."""

    def __init__(self, of, odd):
        self.of, self.odd = of, odd

    def __len__(self):
        return len(self.of)

    def __getitem__(self, k):
        x, label = self.of[k]
        if k != 4:
            return x, label
        if self.odd == "cannot be read":
            raise OSError("a broken file")
        odd = {"longer": (torch.ones(7), label), "double": (x.double(), label), "no class": (x, label + 30)}
        return odd[self.odd]


@pytest.mark.parametrize("odd", ["cannot be read", "longer", "double", "no class"])
@pytest.mark.parametrize(
    "unit",
    [dpps.Record(epsilon=3.0, delta=1e-3), dpps.Contribution(clip=1.0, epsilon=3.0)],
    ids=lambda u: u.name,
)
def test_nor_because_of_an_example_that_is_not_as_the_others_are(unit, odd):
    """A broken file, a picture of another size, a label that is no class: nobody may see that a node has one."""
    data = toy_data(3)
    data[1] = OneOddExample(data[1], odd)
    algorithm = dpps.PartPSP(tiny(), "all", batch_size=10, lr_shared=0.1)
    options = {"topology": dpps.Ring(3), "privacy": unit}
    run = dpps.Run(algorithm, data, noise=SecureNoise(), **options).fit(epochs=2)
    assert run.ledger.messages == run.plan.count
    with pytest.raises(
        (OSError, RuntimeError, IndexError)
    ):  # a simulation with known noise says what is wrong
        dpps.Run(algorithm, data, seed=0, **options).fit(epochs=2)


@pytest.mark.parametrize("secret", [True, False])
def test_nor_does_it_stop_because_of_an_example_it_is_measured_on(secret):
    """Metrics on a node's own examples are taken after every epoch: stopping there would tell of them, too."""
    held_out = [each.tensors for each in toy_data(3, n=10, seed=5)]
    held_out[1][0][4] = 3000.0
    run = make_run(
        dpps.Contribution(clip=1.0, epsilon=3.0),
        model=Fussy(),
        held_out=held_out,
        metrics=["accuracy"],
        noise=SecureNoise() if secret else dpps.Seeded(1),
    )
    if not secret:
        with pytest.raises(IndexError):
            run.fit(epochs=2)
        return
    run.fit(epochs=2)
    assert run.ledger.messages == run.plan.count
    assert run.own_accuracy is None
    assert run.summary.metrics_by_node == {}
