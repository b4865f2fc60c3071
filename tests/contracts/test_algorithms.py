"""What every registered algorithm keeps: it learns, a round happens as a whole, a run can go on, and privacy is promised or refused."""

from pathlib import Path
from unittest import mock

import pytest
import torch

import dpps
from dpps.errors import RunError, UsageError
from dpps.learning import ALGORITHMS, Algorithm
from dpps.privacy import UNITS, Unit
from tests.support.learning import tiny, toy_data
from tests.support.protocol import Wire

NODES, EPOCHS = 3, 2
PROMISES: dict[str, Unit] = {
    "record": dpps.Record(epsilon=3.0, delta=1e-3),
    "contribution": dpps.Contribution(clip=1.0, epsilon=3.0),
    "node-swap": dpps.NodeSwap(budget=5.0),
}

pytestmark = pytest.mark.parametrize("name", ALGORITHMS.names())


def algorithm(name: str, **options: object) -> Algorithm:
    return ALGORITHMS[name](tiny(), "all", **{"batch_size": 10, "lr_shared": 0.2} | options)  # type: ignore[arg-type]


def make(name: str, unit: Unit | None = None, **options: object) -> dpps.Run:
    given = {"topology": dpps.Exponential(NODES), "privacy": unit, "seed": 0} | options
    return dpps.Run(algorithm(name), toy_data(NODES), **given)  # type: ignore[arg-type]


def everything(run: dpps.Run) -> dict[str, torch.Tensor]:
    return {key: rows.clone() for key, rows in run.nodes.tensors(run.state).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_it_learns(name: str) -> None:
    run = make(name).fit(epochs=10)
    assert run.log[-1].loss < 0.7 * run.log[0].loss
    assert run.shared.shape == (algorithm(name).partition.shared_size,)


def test_the_same_run_gives_the_same_bits(name: str) -> None:
    assert same(*(everything(make(name).fit(epochs=EPOCHS)) for _ in range(2)))


def test_what_a_promise_rests_on_is_fixed(name: str) -> None:
    with pytest.raises(UsageError, match="fixed"):
        algorithm(name).lr_shared = 100.0


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_failed_round_leaves_everything_as_it_was(name: str, rounds: int) -> None:
    run, whole = make(name).start(EPOCHS), make(name).fit(epochs=EPOCHS)
    for _ in range(rounds):
        run.step()
    before = everything(run)
    with (
        mock.patch.object(run.protocol.fabric, "collect", side_effect=RunError("lost")),
        pytest.raises(RunError, match="lost"),
    ):
        run.step()
    assert run.state.round == rounds
    assert same(everything(run), before)
    run.fit(epochs=EPOCHS)
    assert torch.equal(run.shared, whole.shared)


def test_a_run_that_stopped_goes_on_as_if_it_had_not(name: str, tmp_path: Path) -> None:
    whole = make(name).fit(epochs=EPOCHS)
    for log in make(name, folder=tmp_path / "run").rounds(epochs=EPOCHS):
        if log.round == 4:
            break
    options = {"topology": dpps.Exponential(NODES), "seed": 0}
    again = dpps.Run.open(tmp_path / "run", algorithm(name), toy_data(NODES), **options).fit(epochs=EPOCHS)
    assert same(everything(again), everything(whole))


@pytest.mark.parametrize("unit", UNITS.names())
def test_a_unit_is_kept_or_refused_before_anything_is_sent(name: str, unit: str) -> None:
    """Kept means: every message is charged before it leaves, has noise on every coordinate, and the target is met."""
    wire = Wire(NODES)
    try:
        algorithm(name).unit(PROMISES[unit])
    except UsageError:
        with pytest.raises(UsageError):
            make(name, PROMISES[unit], deployment=dpps.Simulation(wire)).start(EPOCHS)
        assert not wire.sent
        return
    assert ALGORITHMS[name].noisy
    run = make(name, PROMISES[unit], deployment=dpps.Simulation(wire)).start(EPOCHS)
    while run.state.round < run.plan.count:
        before, sent = run.state.shared.s.clone(), len(wire.sent)
        log = run.step()
        assert len(wire.sent) == sent + 1
        assert run.ledger.messages == sum(each.scale > 0 for each in run.log)
        assert log.scale == 0 or float((wire.sent[-1] != before).float().mean()) > 0.99
    promised = PROMISES[unit].epsilon
    assert promised is None or run.privacy.epsilon <= promised


def test_ever_less_noise_and_ever_larger_clips_are_no_noise(name: str) -> None:
    """The limit in which a private algorithm is its plain self; one without noise promises nothing."""
    if not ALGORITHMS[name].noisy:
        for unit in PROMISES.values():
            with pytest.raises(UsageError, match=unit.name):
                algorithm(name).unit(unit)
        return
    quiet = dpps.Contribution(clip=1e4, mechanism="gaussian", noise_multiplier=1e-12)
    plain, private = (make(name, each).fit(epochs=EPOCHS) for each in (None, quiet))
    torch.testing.assert_close(private.shared, plain.shared, atol=1e-4, rtol=1e-3)
