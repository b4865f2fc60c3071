"""Registries: names are found, numbers are read, a wrong or second name is refused."""

import ast
from pathlib import Path

import pytest

import dpps
from dpps.data import DATA_SETS
from dpps.errors import UsageError
from dpps.learning import ALGORITHMS
from dpps.models import MODELS
from dpps.noise import MECHANISMS, Gaussian, Laplace
from dpps.privacy import UNITS, PrivacyOptions, Record
from dpps.registry import Registry
from dpps.sensitivity import SENSITIVITIES, Certified
from dpps.topology import TOPOLOGIES, DOut, Exponential, parse


def test_all_topologies_of_the_package_are_there():
    assert set(TOPOLOGIES.names()) == {"exp", "K-out", "ring", "complete", "base-K", "random"}
    assert TOPOLOGIES["exp"] is Exponential
    assert TOPOLOGIES.find("4-out") == (DOut, [4])
    assert repr(parse("4-out", 7)) == "DOut(7, 4)"


@pytest.mark.parametrize("text", ["4-outs", "-out", "EXP", ""])
def test_a_wrong_name_is_refused_with_the_right_ones(text):
    with pytest.raises(UsageError, match=r"topology .*exp"):
        parse(text, 4)


def test_a_name_with_its_letter_is_told_that_it_stands_for_a_number():
    with pytest.raises(UsageError, match=r"topology 'K-out': .*'2-out'"):
        parse("K-out", 4)


def test_a_name_has_one_meaning():
    names = Registry("thing", "dpps.topology")
    thing = object()
    assert names.register("one")(thing) is thing
    names.register("one")(thing)
    with pytest.raises(UsageError, match="'one'"):
        names.register("one")(object())
    assert "one" in names
    assert "two" not in names


def test_units_mechanisms_and_sensitivities_have_names():
    assert set(UNITS.names()) == {"contribution", "node-swap", "record"}
    assert set(MECHANISMS.names()) == {"gaussian", "laplace"}
    assert set(SENSITIVITIES.names()) == {"certified", "oracle", "paper", "worst-case"}


def test_a_unit_is_made_of_options():
    options = PrivacyOptions(epsilon=2.0, delta=1e-6, clip=0.5)
    assert UNITS["record"].from_options(options) == Record(epsilon=2.0, delta=1e-6, clip=0.5)
    swap = UNITS["node-swap"].from_options(PrivacyOptions(budget=3.0, delta=1e-4))
    assert vars(swap)["sensitivity"] == Certified(1e-4)


def test_a_mechanism_is_made_of_its_amount_of_noise():
    assert MECHANISMS["laplace"].of(0.25) == Laplace(budget=0.25)
    assert MECHANISMS["gaussian"].of(2.0) == Gaussian(noise_multiplier=2.0)


NAMED_ON_PURPOSE = {"cli/privacy.py": "an attack is written for one unit"}
"""Beside `paper/`, which repeats experiments with given models and units."""


def test_no_module_switches_on_a_registered_name():
    """Whoever adds a unit, an algorithm or a model would have to find such a place; an attribute of the class says it."""
    registries = (UNITS, MECHANISMS, SENSITIVITIES, ALGORITHMS, MODELS, DATA_SETS, TOPOLOGIES)
    names = {name for registry in registries for name in registry.names()}
    source = Path(dpps.__file__).parent
    switches = set()
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and n.value in names}
                place = str(path.relative_to(source))
                if texts and place not in NAMED_ON_PURPOSE and not place.startswith("paper/"):
                    switches.add(f"{place}:{node.lineno} {sorted(texts)}")
    assert not switches
