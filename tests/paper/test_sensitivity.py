"""The figure of sensitivities: the authors' curves, and the growth of an estimate."""

from statistics import fmean

import pytest

from dpps.paper import Scope, published, sensitivity


def test_all_eight_curves_of_the_authors_are_shipped():
    for panel in sensitivity.panels(Scope()):
        curve = published.curve(panel.name)
        assert len(curve.real) == len(curve.estimated) == 120
    assert fmean(published.curve("mlp-1-2-out").real) == pytest.approx(64.398, abs=1e-3)
    assert fmean(published.curve("resnet18-2-exp").estimated) == pytest.approx(426.12, abs=1e-2)


def test_growth_is_that_of_the_rounds_before_a_synchronisation():
    estimated = [1.0, 5.0, 6.0, 7.0, 14.0, 1.0, 9.0, 2.0, 3.0, 6.0]
    assert sensitivity.growth(estimated, 5) == pytest.approx(2.0)
