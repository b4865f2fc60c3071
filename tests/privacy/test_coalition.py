"""Units with partners: what they promise, to whom, and what more colluders would cost."""

import json

import numpy as np
import pytest
import torch

import dpps
from dpps.cli.plan import plan as plan_main
from dpps.errors import UsageError
from dpps.noise import SecureNoise, SecurePairs, SeededPairs
from dpps.privacy import Contract, Contribution, Plan, Record, Unit, coalition, planned_charges
from dpps.runs import Options

PLAN = Plan(((1.0, 50),), lr_shared=0.5, batch_size=10, sampling=(0.1,) * 6, declared_sizes=(100,) * 6)


def units() -> list[Unit]:
    return [
        Record(noise_multiplier=1.3, trust=dpps.Pairs(2)),
        Contribution(1.0, mechanism="gaussian", noise_multiplier=4.0, trust=dpps.Pairs(2)),
    ]


@pytest.mark.parametrize("unit", units(), ids=["record", "contribution"])
def test_partners_change_no_number_of_the_promise(unit: Unit) -> None:
    with_pairs = unit.calibrate(PLAN)
    alone = type(unit)(**{**unit.__dict__, "trust": dpps.Nobody()}).calibrate(PLAN)
    assert with_pairs.mechanism == alone.mechanism
    assert with_pairs.sensitivity == alone.sensitivity
    assert unit.total(planned_charges(with_pairs, PLAN)) == unit.total(planned_charges(alone, PLAN))
    assert alone.partners is None
    assert isinstance(with_pairs.source(dpps.Seeded(1)), SeededPairs)
    assert isinstance(with_pairs.source(SecureNoise()), SecurePairs)
    assert isinstance(alone.source(dpps.Seeded(1)), dpps.Seeded)


@pytest.mark.parametrize("unit", units(), ids=["record", "contribution"])
def test_the_coalition_is_named(unit: Unit) -> None:
    assert "up to 2 " in unit.who()
    assert "secrets" in unit.limits()
    assert "secrets" in Record(1.0, trust=dpps.Pairs(0)).who()
    assert "a third" in Record(1.0, trust=dpps.Pairs()).who()
    assert "up to 3 " in Record(1.0, trust=dpps.Pairs()).for_network(10).who()
    assert "secrets" not in Record(1.0).who() + Record(1.0).limits()


def test_the_contract_holds_what_the_promise_rests_on() -> None:
    unit = units()[0]
    contract = Contract.first(unit, PLAN)
    kept = json.loads(json.dumps(contract.to_json()))
    assert kept["trust"]["colluders"] == 2
    assert kept["trust"]["graph"] == "complete"
    assert kept["noise"] == 1.3
    shares = dpps.Pairs(2).partners(6).shares()
    assert (kept["trust"]["sigma"], kept["trust"]["tau"]) == (shares.independent, shares.pair)
    again = Contract.from_json(kept, "test")
    again.check(unit, PLAN)
    for other in (dpps.Pairs(1), dpps.Pairs(2, mean_variance=1.2), dpps.Nobody()):
        with pytest.raises(UsageError, match=r"trust .*'colluders': 2"):
            again.check(Record(noise_multiplier=1.3, trust=other), PLAN)


def test_more_colluders_than_declared_cost_what_the_accountant_says() -> None:
    unit = Record(noise_multiplier=1.3, trust=dpps.Pairs(2))
    calibration = unit.calibrate(PLAN)
    found = coalition(unit, PLAN, calibration)
    assert found is not None
    counts, epsilons = zip(*found.epsilons, strict=True)
    assert counts == (2, 3, 4, 5)
    assert list(epsilons) == sorted(epsilons)
    only_own = Record(noise_multiplier=1.3 * found.sigma)
    all_others = only_own.total(planned_charges(only_own.calibrate(PLAN), PLAN)).epsilon
    assert epsilons[-1] == pytest.approx(all_others, rel=1e-6)
    promised = unit.total(planned_charges(calibration, PLAN)).epsilon
    assert epsilons[0] == pytest.approx(promised, rel=1e-6)


def test_laplace_noise_does_not_cancel() -> None:
    with pytest.raises(UsageError, match=r"pairs.*laplace.*gaussian"):
        Contribution(1.0, 3.0, trust=dpps.Pairs(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unit": "node-swap", "trust": "pairs"}, "--trust pairs .*--unit node-swap"),
        ({"unit": "none", "trust": "pairs"}, "--trust pairs .*--unit none"),
        ({"unit": "contribution", "trust": "pairs"}, "--mechanism laplace"),
        ({"colluders": 2}, "--colluders .*--trust pairs"),
        ({"mean_variance": 2.0}, "--mean-variance .*--trust pairs"),
        ({"trust": "pairs", "mean_variance": 1.0}, r"mean_variance.*1\.0.*above 1"),
        ({"trust": "pairs", "colluders": 9}, "colluders.*9.* 8 "),
        ({"trust": "everybody"}, "trust"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Options(**options).resolve()  # type: ignore[arg-type]


def test_what_is_left_open_is_named_in_the_statement() -> None:
    config = Options(noise_multiplier=1.0, trust="pairs").resolve()
    assert (config.colluders, config.mean_variance) == (3, 1.25)
    unit = config.privacy()
    assert unit is not None
    assert "up to 3 " in unit.who()


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


def test_on_a_complete_graph_the_mean_is_central_dp_sgd_with_a_quarter_more_variance() -> None:
    """One exact averaging: every node's row is the mean of the updates plus noise of 1.25 / N^2 of a message's variance."""
    nodes, d, clip = 8, 60_000, 1.0
    unit = Contribution(
        clip, mechanism="gaussian", noise_multiplier=3.0, trust=dpps.Pairs(0, mean_variance=1.25)
    )
    plan = Plan(((1.0, 1),), lr_shared=1.0, batch_size=1, declared_sizes=(1,) * nodes)
    calibration = unit.calibrate(plan)
    assert calibration.partners is not None
    protocol = dpps.DPPS(
        dpps.Complete(nodes),
        calibration.mechanism,
        calibration.sensitivity,
        noise=calibration.source(dpps.Seeded(3)),
    )
    state = protocol.start(torch.zeros(nodes, d, dtype=torch.float64))
    update = torch.zeros(nodes, d, dtype=torch.float64)
    update[:, 0] = torch.linspace(-1, 1, nodes)
    record = protocol.step(state, update)
    server = (record.scale / nodes) ** 2
    rows = state.y.numpy()
    assert np.allclose(rows, rows[0])
    assert rows[0, 1:].var() == pytest.approx(1.25 * server, rel=0.03)
    independent = record.scale**2 / nodes
    assert rows[0, 1:].var() < independent / 5
