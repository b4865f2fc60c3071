"""Who sets the noise of all when nodes draw at different rates."""

import pytest

import dpps
from dpps.noise import gaussian, sampled
from dpps.privacy import SHOWN, Charge, Plan, limits, total


def plan(sizes, batches):
    mean = sum(batches) / len(batches)
    rates = tuple(b / n for b, n in zip(batches, sizes, strict=True))
    return Plan(((1.0, 20),), 0.1, mean, rates, declared_sizes=sizes, batches=tuple(batches))


def test_the_node_that_draws_most_often_limits_and_each_epsilon_is_that_of_its_own_rate():
    unit, own = dpps.Record(epsilon=2.0), plan((40, 200, 100), (10, 10, 10))
    found = limits(unit, own)
    assert (found.node, found.size) == (0, 40)
    assert found.noise_multiplier == unit.noise(own)
    assert found.part == pytest.approx(30 / 340)
    assert found.noise_multiplier_at_part < found.noise_multiplier / 2
    assert [node for node, *_ in found.epsilons] == [0, 2, 1]
    for _, size, batch, rate, epsilon in found.epsilons:
        assert rate == batch / size
        charge = Charge(sampled(rate, gaussian(found.noise_multiplier)), 20)
        assert epsilon == pytest.approx(total([charge], 1e-5).epsilon, rel=1e-6)


def test_nobody_limits_anybody_at_one_rate_or_in_other_units():
    assert limits(dpps.Record(epsilon=2.0), plan((40, 200), (4, 20))) is None
    assert limits(dpps.Contribution(clip=1.0, epsilon=2.0), plan((40, 200), (4, 4))) is None


def test_of_many_rates_the_dearest_and_the_cheapest_are_shown():
    sizes = tuple(range(100, 160, 3))
    found = limits(dpps.Record(noise_multiplier=2.0), plan(sizes, (10,) * len(sizes)))
    assert len(found.epsilons) == SHOWN
    assert found.epsilons[-1][0] == len(sizes) - 1
    assert found.noise_multiplier_at_part == found.noise_multiplier == 2.0
