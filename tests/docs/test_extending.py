"""Every worked example of docs/architecture.md runs by itself, and the thing it adds works by its name."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from dpps.cli import PlanConfig, answer
from dpps.data import DATA_SETS
from dpps.learning import ALGORITHMS
from dpps.models import MODELS
from dpps.noise import MECHANISMS
from dpps.privacy import UNITS
from dpps.report import read_run
from dpps.runs import Options
from dpps.topology import TOPOLOGIES

PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


@pytest.fixture(autouse=True)
def registries_as_before():
    """What an example registers is gone after its test."""
    kept = [(registry, dict(registry._entries)) for registry in _registries() if registry.names()]
    yield
    for registry, entries in kept:
        registry._entries = entries


def _registries():
    return TOPOLOGIES, MECHANISMS, UNITS, ALGORITHMS, MODELS, DATA_SETS


def example(heading):
    """The names that the block under this heading leaves, in a namespace of its own."""
    section = PAGE.split(f"\n### {heading}\n")[1].split("\n### ")[0]
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    names = {"__name__": "__extending__"}
    exec(compile(block, f"<extending: {heading}>", "exec"), names)
    return names


def test_a_topology_is_found_by_its_name():
    found = example("A topology")
    assert isinstance(Options(topology="star", nodes=6).network(), found["Star"])
    assert found["star"].doubly_stochastic
    assert torch.allclose(found["state"].y, torch.full((6, 1), 2.5), atol=1e-4)


def test_a_model_is_found_by_its_name():
    found = example("A model")
    Options(model="two-layers").check()
    assert found["shared"] == ("0",)
    assert sum(p.numel() for p in found["model"].parameters()) == 5 * 16 + 17 * 3


def test_a_data_set_is_found_by_its_name():
    found = example("A data set")
    Options(data="stripes").check()
    x, label = found["stripes"].test[1]
    assert (tuple(x.shape), float(x.mean()), int(label)) == ((1, 8, 8), 1.0, 1)


def test_a_mechanism_has_the_epsilon_that_its_density_says():
    found = example("A mechanism")
    privacy = found["run"].privacy
    assert privacy.mechanism == "logistic"
    assert privacy.epsilon == pytest.approx(8 * 0.25)
    # the claim itself: the ratio of two densities one sensitivity apart, everywhere, and attained far out
    scale = found["Logistic"](0.25).scale(1.0)
    x = np.linspace(-60 * scale, 60 * scale, 20_001)
    loss = np.abs(_log_density(x, scale) - _log_density(x - 1.0, scale))
    assert loss.max() <= 0.25 * (1 + 1e-9)
    assert loss.max() == pytest.approx(0.25, rel=1e-6)
    # and at every epsilon it reveals no more than the Laplace noise that is charged for
    dx, epsilons = x[1] - x[0], np.linspace(0.0, 0.25, 6)
    logistic = [np.exp(_log_density(x, scale)), np.exp(_log_density(x - 1.0, scale))]
    laplace = [np.exp(-np.abs(x - shift) / scale) / (2 * scale) for shift in (0.0, 1.0)]
    for epsilon in epsilons:
        own, charged = (np.clip(p - np.exp(epsilon) * q, 0, None).sum() * dx for p, q in (logistic, laplace))
        assert own <= charged + 1e-6


def _log_density(x, scale):
    return -np.abs(x) / scale - 2 * np.log1p(np.exp(-np.abs(x) / scale)) - math.log(scale)


def test_a_mechanism_is_solved_for_and_charged_for_by_its_event():
    example("A mechanism")
    options = {"unit": "contribution", "mechanism": "logistic", "epsilon": 4.0, "rounds": 40, "delta": 1e-5}
    result, _ = answer(PlanConfig(**options))
    accountant = PLDAccountant()
    accountant.compose(dp_event.LaplaceDpEvent(1 / result.epsilon_per_round), 40)
    assert 0.98 * 4.0 <= accountant.get_epsilon(1e-5) <= 4.0 * 1.001
    assert result.epsilon_per_round > 4.0 / 40


def test_a_unit_promises_what_an_accountant_of_others_finds():
    found = example("A unit")
    run = found["run"]
    multiplier = run.contract.noise
    accountant = PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(multiplier), 8)
    assert run.privacy.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=0.01)
    assert 1.99 < run.privacy.epsilon <= 2.0
    # the noise is sqrt(2) times what the unit contribution adds: two nodes change together
    assert run.log[0].scale == pytest.approx(multiplier * 2 * math.sqrt(2) * 0.1)
    assert found["Household"](2.0).who() in run.privacy.statement
    # its local part is trained without noise, so the report does not pass its accuracy on
    assert not read_run(run, "run").summary.accuracy_is_covered


def test_a_unit_is_found_by_its_name():
    found = example("A unit")
    assert Options(unit="household").resolve().privacy() == found["Household"](3.0, 1e-5, 1.0)
    assert answer(PlanConfig(unit="household", epsilon=1.0))[0].epsilon <= 1.0


def test_an_algorithm_learns_and_keeps_its_momentum():
    found = example("An algorithm")
    assert ALGORITHMS["sgp-momentum"] is found["MomentumPush"]
    assert found["run"].accuracy > 85
    assert "kept/momentum" in found["run"].nodes.tensors(found["run"].state)


def test_a_loss_of_ones_own_trains_a_protected_run():
    found = example("A loss")
    outputs, targets = torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([0, 0])
    losses = found["focal_loss"](outputs, targets)
    assert losses[0] == pytest.approx(math.log(2) / 4)
    assert losses[1] < 1e-9
    assert found["run"].algorithm.loss is found["focal_loss"]
    assert 0 < found["run"].log[-1].loss < math.log(3)
    assert found["run"].privacy.epsilon <= 3


def test_a_transport_carries_the_same_run():
    found = example("A transport")
    run, other = found["run"], found["other"]
    # two of the 8 rounds synchronise; in the others each of the 4 nodes sends to both of its neighbours
    assert found["mailboxes"].delivered == 6 * 4 * 2
    assert torch.allclose(run.shared, other.shared, atol=1e-5)
    assert run.privacy.epsilon == other.privacy.epsilon


def test_a_graph_or_a_sensitivity_without_a_class():
    found = example("A graph or a sensitivity without a class")
    assert found["protocol"].privacy(delta=0).epsilon == pytest.approx(1.0)
