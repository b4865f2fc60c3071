"""Every registered unit keeps the contract of a unit, with everybody whom a node may trust: a new one is tested by being registered."""

import json
from dataclasses import fields, replace

import pytest
import torch
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.noise import MECHANISMS, non_private
from dpps.privacy import (
    TRUSTS,
    UNITS,
    Contract,
    Ledger,
    Plan,
    PrivacyOptions,
    Release,
    Unit,
    account,
    planned_charges,
)
from dpps.runs import Options
from dpps.sensitivity import Known
from tests.support.learning import tiny, toy_data

NODES, SIZE = 4, 40
PLAN = Plan(
    ((1.0, 6), (0.1, 6)), lr_shared=0.5, batch_size=10, sampling=(0.25,) * 4, declared_sizes=(SIZE,) * 4
)


def unit(name: str, trust: str = "nobody") -> Unit:
    """As `dpps train --unit NAME --trust TRUST` makes it, with Gaussian noise where partners need it."""
    mechanism = UNITS[name].fixed_mechanism or ("gaussian" if trust != "nobody" else "laplace")
    options = PrivacyOptions(trust=trust, mechanism=mechanism)
    known = {f.name for f in fields(PrivacyOptions)}
    filled = {k: v for k, v in UNITS[name].defaults(options).items() if k in known}
    made = UNITS[name].from_options(replace(options, **filled))  # type: ignore[arg-type]
    return made.for_network(NODES)


UNIT_AND_TRUST = [(n, t) for n in UNITS.names() for t in TRUSTS if t == "nobody" or not UNITS[n].no_partners]
every_unit = pytest.mark.parametrize("name", UNITS.names())
every_unit_and_trust = pytest.mark.parametrize(("name", "trust"), UNIT_AND_TRUST)


@every_unit
def test_it_is_made_of_the_defaults_of_the_command_line(name: str) -> None:
    made = UNITS[name].usual()
    assert made.name == name
    assert made == unit(name)
    assert set(UNITS[name].defaults(PrivacyOptions.of(Options(unit=name)))) >= {"lr_shared", "lr_local"}
    Options(unit=name).check()


@every_unit_and_trust
def test_it_says_whom_it_protects_and_what_is_not_covered(name: str, trust: str) -> None:
    made = unit(name, trust)
    for words in (made.who(), made.not_covered()):
        assert words
        assert "\n" not in words
    assert (made.who() != unit(name).who()) == (trust != "nobody"), "who is trusted is named"


@every_unit_and_trust
def test_nothing_is_solved_for_twice(name: str, trust: str) -> None:
    made = unit(name, trust)
    noise = made.noise(PLAN)
    found = made.calibrate(PLAN, noise)
    assert found == made.calibrate(PLAN)
    assert found.mechanism.name in MECHANISMS
    assert found.mechanism.scale(1.0) > 0
    assert (found.partners is not None) == (trust != "nobody")


@every_unit_and_trust
def test_the_planned_rounds_keep_the_promise(name: str, trust: str) -> None:
    made = unit(name, trust)
    charges = planned_charges(made.calibrate(PLAN), PLAN)
    assert sum(charge.count for charge in charges) == PLAN.paid
    total = made.total(charges)
    assert total.delta == made.delta
    if made.epsilon is not None:
        assert 0.99 * made.epsilon <= total.epsilon <= made.epsilon * (1 + 1e-9)
    assert made.total([*charges, *charges]).epsilon > total.epsilon
    replaced = made.replacement(charges)
    assert replaced is None or replaced.epsilon >= total.epsilon


@every_unit_and_trust
def test_whom_a_node_trusts_changes_no_number_of_the_promise(name: str, trust: str) -> None:
    made = unit(name, trust)
    alone = replace(made, trust=dpps.Nobody()) if trust != "nobody" else made  # type: ignore[type-var]
    assert alone.calibrate(PLAN) == replace(made.calibrate(PLAN), partners=None)


@every_unit
def test_a_unit_without_partners_says_why(name: str) -> None:
    kind = UNITS[name]
    if kind.no_partners:
        with pytest.raises(UsageError, match=rf"--trust pairs .*--unit {name}"):
            Options(unit=name, trust="pairs").resolve()


@every_unit_and_trust
def test_its_contract_survives_the_ledger(name: str, trust: str) -> None:
    made = unit(name, trust)
    contract = Contract.first(made, PLAN)
    again = Contract.from_json(json.loads(json.dumps(contract.to_json())), "the ledger")
    assert again == contract
    again.check(made, PLAN)
    assert again.calibrate(made) == made.calibrate(PLAN)
    assert (again.budget(made) is None) == (made.epsilon is None)
    with pytest.raises(UsageError, match="clip"):
        again.check(replace(made, clip=0.123), PLAN)  # type: ignore[type-var]


@every_unit
def test_no_noise_is_never_private(name: str) -> None:
    made, ledger = unit(name), Ledger(range(NODES))
    ledger.charge(Release(0, non_private(), "none", 1.0, 0.0))
    found = account(made, ledger, private_noise=True)
    assert (found.epsilon, found.mechanism) == (None, "none")


def one_round(made: Unit, data: list[TensorDataset]) -> dpps.Run:
    """Every example of every node is in the batch."""
    algorithm = dpps.PartPSP(tiny(), "all", batch_size=SIZE, lr_shared=0.5)
    sizes = [SIZE] * NODES
    run = dpps.Run(
        algorithm, data, topology=dpps.Ring(NODES), privacy=made, seed=3, declared_sizes=sizes, sync_every=0
    )
    return run.fit(epochs=1)


@every_unit_and_trust
def test_what_is_protected_moves_a_message_by_no_more_than_the_sensitivity(name: str, trust: str) -> None:
    """Two runs with the same noise; in the second, all that is protected at node 0 is something else.

    Only its message differs, and columns of the weights sum to 1: the difference of the states, summed over the nodes, is that
    of the messages.
    """
    made, data = unit(name, trust), toy_data(NODES, n=SIZE)
    if not made.per_example:
        made = replace(made, clip=0.1)  # type: ignore[type-var]  # so small that every update is clipped
    features, labels = data[0].tensors
    first = one_round(made, [TensorDataset(features, torch.zeros_like(labels)), *data[1:]])
    if made.per_example:  # an example that teaches nothing, which is the same as none
        other = TensorDataset(features[1:], torch.zeros_like(labels[1:]))
    else:  # updates that point to the other side
        other = TensorDataset(features, torch.ones_like(labels))
    second = one_round(made, [other, *data[1:]])
    mechanism, bound = first.nodes.calibration.mechanism, first.nodes.calibration.sensitivity
    moved = (first.state.shared.s.double() - second.state.shared.s.double()).sum(0).norm(mechanism.norm)
    assert moved > 0
    if isinstance(bound, Known):
        assert moved <= bound.distance * (1 + 1e-3)
        assert moved > bound.distance / 2, "a claim of half of it would be refuted"


@every_unit_and_trust
def test_a_run_is_charged_for_every_round_and_states_it(name: str, trust: str) -> None:
    made = unit(name, trust)
    algorithm = dpps.PartPSP(tiny(), "all", batch_size=10)
    run = dpps.Run(algorithm, toy_data(NODES, n=SIZE), topology=dpps.Ring(NODES), privacy=made, seed=0)
    found = run.fit(epochs=1).privacy
    charges = run.ledger.charges_by_row()
    assert {sum(c.count for c in paid) for paid in charges.values()} == {len(run.log)}
    assert found.epsilon == pytest.approx(max(made.total(paid).epsilon for paid in charges.values()))
    assert (found.unit, found.simulated) == (name, True)
    assert made.who() in found.statement
    assert made.not_covered() in found.statement
    assert not torch.equal(run.state.shared.s[0], run.state.shared.s[1])
