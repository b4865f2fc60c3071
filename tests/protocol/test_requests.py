"""What the protocol is asked for: every bad input, and what a user plugs in."""

import math

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.noise import non_private
from tests.support.protocol import column_stochastic

RING = dpps.Ring(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dpps.Laplace(0), "budget is 0"),
        (lambda: dpps.Laplace(-1), "budget is -1"),
        (lambda: dpps.Laplace(1, -0.1), "noise rate is -0.1"),
        (lambda: dpps.Gaussian(0), "noise multiplier is 0"),
        (lambda: dpps.Paper(0, 0.5), "c_prime is 0"),
        (lambda: dpps.Paper(1, 1.0), "decay is 1.0"),
        (lambda: dpps.Paper(1, 0.0), "decay is 0.0"),
        (lambda: dpps.Paper(1, 0.5, "net"), "recursion is 'net'"),
        (lambda: dpps.Bounded(-1, clip=1), "distance is -1"),
        (lambda: dpps.DPPS(RING, dpps.Laplace(1)), r"Laplace.*Certified\(\)"),
        (lambda: dpps.DPPS(RING, sync_every=-1), "sync_every is -1"),
        (lambda: dpps.DPPS(RING, mixes=0), r"mixes.* 1 "),
        (lambda: dpps.DPPS(RING, mixes=-1), r"mixes.* 1 "),
        (lambda: dpps.DPPS(RING, dpps.Laplace(5.0), dpps.Certified(), mixes=2), "node-swap"),
        (lambda: dpps.DPPS(RING, fabric=dpps.Stacked(5)), "5 nodes"),
        (lambda: dpps.DPPS(RING, dpps.Gaussian(1), dpps.Paper(1, 0.5)), "L2 norm"),
        (lambda: dpps.DPPS(RING, dpps.Gaussian(1), dpps.Certified()), "L1"),
        (lambda: dpps.DPPS(column_stochastic(4), dpps.Laplace(1), dpps.Paper(1, 0.5)), "doubly stochastic"),
        (lambda: dpps.DPPS(RING).start(torch.zeros(3, 2)), r"\(3, 2\)"),
        (lambda: dpps.DPPS(RING).start(torch.zeros(4, 2, dtype=torch.int64)), "int64"),
        (lambda: dpps.DPPS(RING).start(torch.full((4, 2), math.nan)), "node 0, 1, 2, 3"),
        (lambda: dpps.DPPS(RING, sensitivity=dpps.Bounded(clip=1)).start(torch.eye(4)), "start_distance"),
    ],
)
def test_bad_arguments_name_the_value_and_the_remedy(call, message):
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_distributed_like_fabric_refuses_what_needs_everybodys_rows():
    class Elsewhere(dpps.Stacked):
        simulation = False

    ring = dpps.Ring(4)
    with pytest.raises(UsageError, match=r"Oracle\(\)"):
        dpps.DPPS(ring, dpps.Laplace(1), dpps.Oracle(), fabric=Elsewhere(4))
    with pytest.raises(UsageError, match="watch"):
        dpps.DPPS(ring, watch={"real": dpps.Oracle()}, fabric=Elsewhere(4))
    with pytest.raises(UsageError, match="common_start"):
        dpps.DPPS(ring, fabric=Elsewhere(4)).start(torch.zeros(4, 2))
    for mechanism, used, watched in (
        (dpps.Laplace(1), dpps.Bounded(2.0, clip=1.0), dpps.Certified()),
        (dpps.Laplace(1), dpps.Certified(), dpps.Paper(0.8, 0.5)),
    ):
        with pytest.raises(UsageError, match="watch"):
            dpps.DPPS(ring, mechanism, used, watch={"other": watched}, fabric=Elsewhere(4))


# What a user plugs in


def test_a_users_own_sensitivity_and_mechanism():
    class Constant(dpps.Sensitivity):
        def estimate(self, memory, view):
            return 3.0

    class Triangular(dpps.Mechanism):
        name, norm = "triangular", 1

        def scale(self, sensitivity):
            return 2.0 * sensitivity

        def draw(self, stream, out):
            out[...] = stream.random(out.shape) - stream.random(out.shape)

        def event(self, noise_multiplier):
            return non_private()

    ordinary = dpps.DPPS(dpps.Ring(3), dpps.Laplace(0.5), Constant())
    record = ordinary.step(ordinary.start(torch.zeros(3, 2)))
    assert (record.estimated, record.scale, record.epsilon) == pytest.approx((3.0, 6.0, 0.5))
    protocol = dpps.DPPS(dpps.Ring(4), Triangular(), Constant(), noise=dpps.Seeded(0))
    state = protocol.start(torch.zeros(4, 1000))
    record = protocol.step(state)
    assert (record.used, record.scale, record.epsilon) == (3.0, 6.0, math.inf)
    assert 0 < float(state.s.abs().max()) <= 6.0


def test_watched_sensitivities_do_not_change_the_run():
    runs = []
    for watch in ({}, {"certified": dpps.Certified(), "real": dpps.Oracle()}):
        protocol = dpps.DPPS(
            dpps.Exponential(8),
            dpps.Laplace(5, 1e-3),
            dpps.Paper(0.8, 0.5),
            sync_every=5,
            noise=dpps.Seeded(3),
            watch=watch,
        )
        state = protocol.start(torch.zeros(8, 200))
        records = [protocol.step(state, torch.full((8, 200), 0.01)) for _ in range(7)]
        runs.append(state.s)
    assert torch.equal(*runs)
    assert all(r.watched["certified"] >= r.watched["real"] for r in records)


def test_the_real_distance_may_be_watched_whatever_the_weights():
    watch = {"real": dpps.Oracle()}
    protocol = dpps.DPPS(column_stochastic(4), watch=watch)
    assert protocol.step(protocol.start(torch.arange(4.0)[:, None])).real == 3.0
    with pytest.raises(UsageError, match="doubly stochastic"):
        dpps.DPPS(column_stochastic(4), dpps.Laplace(1), dpps.Oracle(), watch=watch)
