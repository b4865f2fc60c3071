"""The audit of noise that cancels: claims hold against a coalition, and every sabotage is found."""

from dataclasses import replace

import numpy as np
import pytest

from dpps.audit import Observer, PairsCase, audit, coalition_cases
from dpps.noise import SecurePairs
from dpps.privacy import Pairs

CASES = coalition_cases()
CLAIMS = [case for case in CASES if not case.leaks]
SABOTAGED = [case for case in CASES if case.leaks]


@pytest.mark.parametrize("case", CLAIMS, ids=lambda case: f"{case.name}, {case.kind}")
@pytest.mark.parametrize("secure", [True, False], ids=["secure", "seeded"])
def test_claims_hold_and_a_third_less_noise_is_caught(case: PairsCase, secure: bool) -> None:
    finding = audit(case, trials=6_000 if case.name == "record" else 20_000, secure_noise=secure)
    assert finding.holds
    assert finding.caught


@pytest.mark.parametrize("case", SABOTAGED, ids=lambda case: case.kind)
def test_sabotage_is_found(case: PairsCase) -> None:
    finding = audit(case, secure_noise=True)
    assert not finding.holds
    assert finding.as_expected
    assert case.secure_only


def test_each_sabotage_is_what_the_attack_finds_and_not_the_attack_itself() -> None:
    """The same observers, with the same suspicions, stay within the claim where nothing is wrong."""
    for case in SABOTAGED:
        declared = case.unit.trust.partners(case.nodes)
        assert declared is not None
        honest = replace(case, make=SecurePairs, known=declared.colluders, leak_trials=0)
        assert audit(honest, trials=20_000, secure_noise=True).holds


def test_the_coalition_sits_where_it_learns_most() -> None:
    """In two cliques that share the nodes 5 and 6, whoever is in node 0's own tells more than somebody in the other."""
    import networkx

    mine, other = networkx.complete_graph([0, 3, 5, 6]), networkx.complete_graph([1, 2, 4, 5, 6, 7])
    partners = Pairs(1, graph=networkx.compose(mine, other)).partners(8)
    found = {
        c: float(np.linalg.inv(Observer(partners, 0)._covariance([k for k in range(8) if k != c]))[0, 0])
        for c in range(1, 8)
    }
    assert Observer(partners, 1).coalition == (max(found, key=found.__getitem__),)
    assert min(found[c] for c in (3, 5, 6)) > 1.0001 * max(found[c] for c in (1, 2, 4, 7))
    assert Observer(partners, 1).coalition[0] != 1


def test_an_observer_scores_by_the_explicit_likelihood_ratio() -> None:
    partners = Pairs(1).partners(4)
    observer = Observer(partners, 1)
    honest = [k for k in range(4) if k not in observer.coalition]
    sigma = observer._covariance(honest)
    rows = [np.random.default_rng(k).normal(size=(4, 3)) for k in (0, 1)]
    along, square = observer.scores(rows, [0.3, -0.2])
    seen = np.concatenate([r[honest] for r in rows])
    shift = np.zeros(6)
    shift[0], shift[3] = 0.3, -0.2
    for k in range(3):
        x = seen[:, k]
        ratio = -0.5 * (x - shift) @ np.linalg.solve(sigma, x - shift) + 0.5 * x @ np.linalg.solve(sigma, x)
        assert along[k] - square / 2 == pytest.approx(ratio)
