"""The authors' own numbers (their published logs), on full MNIST; slow. One small pinned case runs with every `make test`."""

import os
from statistics import fmean, median

import pytest

from dpps.paper import EXPERIMENTS, Cell, Scope, paper_cell, published, run

slow = pytest.mark.slow
needs_data = pytest.mark.skipif(
    not os.environ.get("DPPS_DATA"), reason="set DPPS_DATA to a folder with mnist/"
)


def test_a_pinned_small_case():
    """Part of MNIST, one layer, EXP, 20 rounds: moves only when the algorithm, the split, the noise or the seeds move."""
    options = {"model": "mlp-residual", "data": "mnist-mini", "sensitivity": "paper", "sync_every": 5}
    result = run(paper_cell(**options, epochs=2, lr_step=0, seed=7))
    assert fmean(result["real"]) == pytest.approx(80.1623, rel=1e-3)
    assert fmean(result["estimated"]) == pytest.approx(89.5967, rel=1e-3)
    assert result["accuracy"] == pytest.approx(77.3, abs=0.5)


def cells(name: str, *labels: object) -> tuple[Cell, ...]:
    """The runs behind one point of an experiment, a run for each seed."""
    points = EXPERIMENTS[name].points(Scope(models=("mlp",)))
    return next(point.cells for point in points if point.labels == labels)


@slow
@needs_data
@pytest.mark.parametrize("degree", published.FACTORS)
def test_mean_real_sensitivity_by_connectivity(degree):
    real = fmean(fmean(run(cell)["real"]) for cell in cells("factors", "1", degree))
    assert real == pytest.approx(published.FACTORS[degree], rel=0.05)


@slow
@needs_data
@pytest.mark.parametrize("topology", ["2-out", "exp"])
@pytest.mark.parametrize("shared", ["1", "2"])
@pytest.mark.parametrize("noise", ["real", "paper"])
def test_real_against_estimated_noise(noise, shared, topology):
    k = ["2-out", "exp"].index(topology)
    accuracy = published.REAL_VS_ESTIMATED[noise, shared, "mlp"][k]
    real = published.REAL_VS_ESTIMATED_RAS[noise, shared, "mlp"][k]
    results = [run(cell) for cell in cells("real-vs-estimated", noise, shared, "mlp", topology)]
    assert fmean(r["accuracy"] for r in results) == pytest.approx(accuracy, abs=1.5 if shared == "1" else 3.0)
    assert fmean(fmean(r["real"]) for r in results) == pytest.approx(real, rel=0.08)


@slow
@needs_data
@pytest.mark.parametrize("topology", ["2-out", "exp"])
@pytest.mark.parametrize("shared", ["1", "2"])
def test_the_four_curves_of_the_sensitivity_figure(shared, topology):
    theirs = published.curve(f"mlp-{shared}-{topology}")
    results = [run(cell) for cell in cells("sensitivity", "mlp", shared, topology)]
    ours = [
        fmean(measure(r[line]) for r in results) for line in ("real", "estimated") for measure in (fmean, max)
    ]
    wanted = [measure(line) for line in theirs for measure in (fmean, max)]
    assert ours == pytest.approx(wanted, rel=0.10)


# Beyond the paper


@slow
@needs_data
@pytest.mark.parametrize(
    ("shared", "epsilon", "least"),
    [("1", 3.0, 88.5), ("all", 3.0, 89.0), ("1", 1.0, 82.0), ("all", 1.0, 87.0)],
)
def test_record_unit_is_useful_at_a_real_budget(shared, epsilon, least):
    rates = {"lr_step": 0, "lr_shared": 1.0, "lr_local": 1.0}
    result = run(paper_cell(unit="record", shared=shared, epsilon=epsilon, budget=None, seed=0, **rates))
    assert result["accuracy"] >= least


@slow
@needs_data
@pytest.mark.parametrize(("shared", "least"), [("1", 86.0), ("2", 86.0), ("all", 80.0)])
def test_contribution_at_the_papers_noise(shared, least):
    result = run(
        paper_cell(unit="contribution", shared=shared, budget=1.0, clip=30.0, epochs=3, lr_step=0, seed=0)
    )
    assert result["accuracy"] >= least


@slow
@needs_data
@pytest.mark.parametrize("period", [4, 5])
@pytest.mark.parametrize("shared", ["1", "2"])
@pytest.mark.parametrize("nodes", [10, 20, 50])
@pytest.mark.parametrize("topology", ["2-out", "4-out", "6-out", "8-out", "exp"])
def test_certified_is_never_exceeded_and_not_far_above(topology, nodes, shared, period):
    options = {"model": "mlp-residual", "sensitivity": "certified", "sync_every": period, "shared": shared}
    options |= {"topology": topology, "nodes": nodes, "seed": 0, "epochs": 2, "lr_step": 0, "tests": 0}
    result = run(paper_cell(**options))
    ratios = [e / r for r, e in zip(result["real"], result["estimated"], strict=True)]
    assert min(ratios) >= 1
    assert median(ratios) <= (2.0 if nodes == 10 else 2.3)
