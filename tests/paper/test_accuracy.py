"""The accuracy table: the claims of the text follow from the printed numbers, and the telling cells come first."""

import pytest

from dpps.paper import Scope, accuracy, published


@pytest.mark.parametrize(("pair", "said"), published.CLAIMED_IMPROVEMENT.items())
def test_accuracy_table_gives_the_improvements_the_text_claims(pair, said):
    grid = {
        (a, b, m, t): accuracy.Entry(m, a, b, t).theirs
        for (a, b, m) in published.ACCURACY
        if b
        for t in published.TOPOLOGIES
    }
    assert len(grid) == 4 * 3 * 3 * 4
    assert accuracy.improvement(grid, *pair) == pytest.approx(said, abs=0.03)
    assert accuracy.wins(grid) == f"{published.CLAIMED_WINS} of 36"


def test_the_telling_cells_of_the_large_models_come_first():
    order = [e for e in accuracy.entries(Scope()) if e.model == "resnet18"]
    assert {(e.algorithm, e.budget, e.topology) for e in order[:4]} == {
        (a, b, "exp") for a in ("PartPSP-1", "SGPDP") for b in (1.0, None)
    }
