"""What is bound to go wrong is told before the run: diverging bounds, deltas that hide nothing, batches larger than a node."""

import pytest
import torch

import dpps
from dpps.errors import UsageError
from dpps.noise import Laplace
from dpps.privacy import Plan, certified_bounds, foresee
from dpps.privacy.foresight import check_delta

PLAN = Plan(((1.0, 120),), 0.1, 100, declared_sizes=(1000,) * 10)


def test_a_certified_bound_that_outgrows_all_numbers_is_refused_with_a_period_that_does_not():
    unit, topology = dpps.NodeSwap(budget=5.0), dpps.Exponential(10)
    with pytest.raises(UsageError, match=r"certified .*--sync-every \d+") as refused:
        foresee(unit, PLAN, 7850, topology, 0)
    advised = int(str(refused.value).partition("--sync-every ")[2].partition(",")[0])
    assert foresee(unit, PLAN, 7850, topology, advised) == []
    assert foresee(unit, PLAN, 10, topology, 0) == []  # few parameters: the gain is below 1


def test_where_two_rounds_are_too_many_no_period_is_advised():
    with pytest.raises(UsageError, match="certified") as refused:
        foresee(dpps.NodeSwap(epsilon=3.0), PLAN, 7850, dpps.Exponential(10), 0)
    assert "sync" not in str(refused.value)


def test_the_papers_estimate_is_warned_of_and_not_refused():
    unit = dpps.NodeSwap(budget=1.0, sensitivity=dpps.Paper(0.78, 0.55))
    (warning,) = foresee(unit, PLAN, 7850, dpps.Exponential(10), 0)
    assert "paper sensitivity" in warning


def test_the_foreseen_bounds_are_those_of_the_run():
    """But for rounding: the certified sensitivity itself, in a protocol whose perturbations all have norm 1."""
    topology, mechanism = dpps.Exponential(5), Laplace(5.0, 1e-3)
    protocol = dpps.DPPS(topology, mechanism, dpps.Certified(), noise=dpps.Seeded(0))
    state = protocol.start(torch.zeros(5, 400), common_start=True)
    step = torch.zeros(5, 400)
    step[:, 0] = 1.0
    used = [protocol.step(state, step.clone()).estimated for _ in range(6)]
    assert certified_bounds(dpps.Certified(), mechanism, topology, 400, 6) == pytest.approx(used, rel=1e-4)


@pytest.mark.parametrize(
    ("delta", "size", "refused"), [(1e-2, 100, True), (1e-2, 99, False), (2e-3, 1000, True)]
)
def test_a_delta_of_one_over_the_records_protects_nobody(delta, size, refused):
    unit = dpps.Record(epsilon=1, delta=delta)
    if refused:
        with pytest.raises(UsageError, match=rf"delta.*{delta:g}.*{size} records"):
            check_delta(unit, (10, size))
    else:
        check_delta(unit, (10, size))


def test_a_run_asks_before_its_first_round():
    data = [(torch.randn(200, 6), torch.randint(0, 3, (200,))) for _ in range(3)]
    algorithm = dpps.PartPSP(dpps.models.MLP((6, 4, 3)), batch_size=10)
    run = dpps.Run(algorithm, data, topology="ring", privacy=dpps.Record(epsilon=1, delta=0.01))
    with pytest.raises(UsageError, match=r"delta.*0\.01.*200 records"):
        run.start(epochs=1)
    with pytest.raises(UsageError, match=r"delta.*0\.1.*\[0, 0\.1\)"):
        dpps.Record(epsilon=1, delta=0.1)


def test_a_batch_larger_than_a_node_is_told(caplog):
    unit = dpps.Record(epsilon=1)
    (told,) = foresee(unit, Plan(((1.0, 9),), 0.1, 100, declared_sizes=(500, 35)), 10, dpps.Ring(2), 0)
    assert "node 1 has 35 examples" in told
