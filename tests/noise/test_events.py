"""Events: they are dp-accounting's, written down and read back, and a mechanism's event decides its total."""

import json
import math

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent

import dpps
from dpps.errors import UsageError
from dpps.noise import Event, gaussian, laplace, non_private, sampled
from dpps.privacy import Charge, total

EVENTS = [
    dp_accounting.LaplaceDpEvent(2.0),
    dp_accounting.GaussianDpEvent(1.5),
    dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(1.5)),
    dp_accounting.NonPrivateDpEvent(),
    dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(3.0), 7),
    dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(3.0), dp_accounting.LaplaceDpEvent(4.0)]),
    MixtureOfGaussiansDpEvent(2.0, np.array([0.0, 1.0]), [0.5, 0.5]),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_survives_a_ledger_line(event: dp_accounting.DpEvent) -> None:
    ours = Event.of(event)
    again = Event.from_json(json.loads(json.dumps(ours.to_json(), allow_nan=False)))
    assert again == ours
    assert hash(again) == hash(ours)
    assert Event.of(again.dp_event()) == ours


def test_the_short_forms_are_the_same_events() -> None:
    assert laplace(2.0) == Event.of(EVENTS[0])
    assert gaussian(1.5) == Event.of(EVENTS[1])
    assert sampled(0.25, gaussian(1.5)) == Event.of(EVENTS[2])
    assert sampled(1.0, gaussian(1.5)) == gaussian(1.5)
    assert non_private() == Event.of(EVENTS[3])
    assert Event.from_json(json.loads(json.dumps(laplace(math.inf).to_json(), allow_nan=False))).free


class Staircase(dpps.Mechanism):
    """A user's noise: a Gaussian in disguise, so that its right total is known."""

    name, norm = "disguised", 2

    def scale(self, sensitivity: float) -> float:
        return 5.0 * sensitivity

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        stream.standard_normal(dtype=out.dtype, out=out)

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(noise_multiplier)])


class Costless(Staircase):
    """The same without a word about its cost."""

    event = dpps.Mechanism.event


class Free(Staircase):
    """The same, said to cost nothing."""

    def event(self, noise_multiplier: float) -> dp_accounting.DpEvent:
        return dp_accounting.NoOpDpEvent()


def test_a_users_mechanism_with_a_right_event_has_a_right_total() -> None:
    cost = Staircase().cost(2.0, 10.0)
    ours = total([Charge(cost, 20)], 1e-5)
    right = total([Charge.gaussian(5.0, count=20)], 1e-5)
    assert ours.epsilon == pytest.approx(right.epsilon, rel=0.01)
    # a group of three: converted from one record's guarantee, which is never below the exact mixture
    pair = total([Charge.gaussian(5.0, 0.1, 20)], 1e-5, group=3).epsilon
    assert pair <= total([Charge(sampled(0.1, cost), 20)], 1e-5, group=3).epsilon < math.inf


def test_a_mechanism_that_states_no_cost_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Costless.*event\(self, noise_multiplier\)"):
        dpps.DPPS(dpps.Ring(3), Costless(), dpps.Bounded(clip=0.5))
    with pytest.raises(UsageError, match=r"Costless.*of\(cls, noise\)"):
        Costless.of(1.0)
    with pytest.raises(UsageError, match=r"Free .*sensitivity 2 .*non_private"):
        Free().cost(2.0, 10.0)
    assert Free().cost(0.0, 10.0).free
    dpps.DPPS(dpps.Ring(3), Staircase(), dpps.Bounded(clip=0.5)).start(torch.zeros(3, 2), common_start=True)
