"""Is it worth it? What a plan costs, who sets the noise, what colluders would learn, and what is bound to go wrong."""

import json

import pytest
import torch

import dpps
from dpps.cli.plan import plan as plan_main
from dpps.errors import UsageError
from dpps.noise import Laplace, gaussian, sampled
from dpps.privacy import (
    Charge,
    Coalition,
    Contribution,
    LimitingNode,
    NodeSwap,
    Outlook,
    Plan,
    Record,
    certified_bounds,
    foresee,
    outlook,
    planned_charges,
    refuse_large_delta,
    total,
)
from dpps.topology import Exponential

PLAN = Plan(((1.0, 120),), 0.1, 100, declared_sizes=(1000,) * 10)


def test_an_outlook_says_what_to_expect_and_warns() -> None:
    plan = Plan(((1.0, 4), (0.1, 4)), 1.0, 2, sampling=(0.5, 0.5), spare=2, declared_sizes=(4, 4))
    found = Outlook.of(Contribution(1.0, epsilon=1.0, delta=0.0), plan, 1000, Exponential(2), 0)
    assert found.epsilon == pytest.approx(1.0, rel=1e-3)
    assert found.epsilon_per_round == pytest.approx(0.1, rel=1e-3)
    assert found.signal_to_noise is not None
    assert found.signal_to_noise_averaged == pytest.approx(found.signal_to_noise * 2**0.5)
    assert any("learn" in warning for warning in found.warnings)
    useless = Outlook.of(Contribution(1.0, round_epsilon=10.0), plan, 10, Exponential(2), 0)
    assert any("meaningful" in warning for warning in useless.warnings)
    assert any("example" in w for w in Outlook.of(NodeSwap(), plan, 10, Exponential(2), 0).warnings)


def test_more_colluders_than_declared_cost_what_the_accountant_says() -> None:
    plan = Plan(((1.0, 50),), lr_shared=0.5, batch_size=10, sampling=(0.1,) * 6, declared_sizes=(100,) * 6)
    unit = Record(noise_multiplier=1.3, trust=dpps.Pairs(2))
    calibration = unit.calibrate(plan)
    found = Coalition.of(unit, plan, calibration)
    assert found is not None
    counts, epsilons = zip(*found.epsilons, strict=True)
    assert counts == (2, 3, 4, 5)
    assert list(epsilons) == sorted(epsilons)
    only_own = Record(noise_multiplier=1.3 * found.sigma)
    all_others = only_own.total(planned_charges(only_own.calibrate(plan), plan)).epsilon
    assert epsilons[-1] == pytest.approx(all_others, rel=1e-6)
    promised = unit.total(planned_charges(calibration, plan)).epsilon
    assert epsilons[0] == pytest.approx(promised, rel=1e-6)


def test_plan_shows_the_trade(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_main(["--noise-multiplier", "1.5", "--trust", "pairs", "--colluders", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["coalition"]
    assert (found["colluders"], found["degree"], found["strength"], found["absences"]) == (3, 9, 7, 1)
    assert [count for count, _ in found["epsilons"]] == [3, 4, 6, 9]
    assert [other["mean_variance"] for other in found["trade"]] == [1.1, 1.25, 1.5625, 2, 4]
    noise = [other["message_noise"] for other in found["trade"]]
    assert noise == sorted(noise, reverse=True)
    assert found["message_noise"] == noise[1]
    again = ["--noise-multiplier", "1.5", "--trust", "pairs", "--colluders", "3", "--mean-variance", "1.5625"]
    assert plan_main([*again, "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["coalition"]
    assert (other["message_noise"], other["absences"]) == (noise[2], 2)
    assert plan_main(["--noise-multiplier", "1.5", "--trust", "pairs", "--colluders", "3"]) == 0
    assert "9 colluders" in capsys.readouterr().out


# Who sets the noise of all


def plan_of(sizes, batches):
    mean = sum(batches) / len(batches)
    rates = tuple(b / n for b, n in zip(batches, sizes, strict=True))
    return Plan(((1.0, 20),), 0.1, mean, rates, declared_sizes=sizes, batches=tuple(batches))


def test_the_node_that_draws_most_often_limits_and_each_epsilon_is_that_of_its_own_rate():
    unit, own = dpps.Record(epsilon=2.0), plan_of((40, 200, 100), (10, 10, 10))
    found = LimitingNode.of(unit, own)
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
    assert LimitingNode.of(dpps.Record(epsilon=2.0), plan_of((40, 200), (4, 20))) is None
    assert LimitingNode.of(dpps.Contribution(clip=1.0, epsilon=2.0), plan_of((40, 200), (4, 4))) is None


def test_of_many_rates_the_dearest_and_the_cheapest_are_shown(monkeypatch):
    monkeypatch.setattr(outlook, "SHOWN", 3)
    sizes = tuple(range(100, 120, 4))
    found = LimitingNode.of(dpps.Record(noise_multiplier=2.0), plan_of(sizes, (10,) * len(sizes)))
    assert len(found.epsilons) == 3
    assert found.epsilons[-1][0] == len(sizes) - 1
    assert found.noise_multiplier_at_part == found.noise_multiplier == 2.0


# What is told before the first round


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
            refuse_large_delta(unit, (10, size))
    else:
        refuse_large_delta(unit, (10, size))


def test_a_run_asks_before_its_first_round():
    data = [(torch.randn(200, 6), torch.randint(0, 3, (200,))) for _ in range(3)]
    algorithm = dpps.PartPSP(dpps.models.MLP((6, 4, 3)), batch_size=10)
    run = dpps.Run(algorithm, data, topology="ring", privacy=dpps.Record(noise_multiplier=1.0, delta=0.01))
    with pytest.raises(UsageError, match=r"delta.*0\.01.*200 records"):
        run.start(epochs=1)
    with pytest.raises(UsageError, match=r"delta.*0\.1.*\[0, 0\.1\)"):
        dpps.Record(epsilon=1, delta=0.1)


def test_a_batch_larger_than_a_node_is_told():
    unit = dpps.Record(epsilon=1)
    (told,) = foresee(unit, Plan(((1.0, 9),), 0.1, 100, declared_sizes=(500, 35)), 10, dpps.Ring(2), 0)
    assert "node 1 has 35 examples" in told
