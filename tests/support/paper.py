"""What tests of the paper's statements share."""

import numpy as np
import pytest
import torch

import dpps
from dpps.paper import Problem, Scope, paper_cell, runner

SLACK = 1 + 1e-9
QUICK = Scope("quick", (7,), ("mlp",))
TINY = paper_cell(data="mnist-mini", batch_size=5, examples=100, tests=20, epochs=1, sync_every=2, seed=7)


def solve_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of settings alone: how much noise they need takes the accountant a second each. Nothing of it is kept."""
    for place in ("dpps.privacy.units", "dpps.learning.suggestion"):
        monkeypatch.setattr(f"{place}.noise_for", lambda *_, **__: 1.0)
    monkeypatch.setattr(runner, "_config", runner._config.__wrapped__)


class Constant(dpps.Sensitivity):
    """Assumption 4 taken at its word: S(t) = S."""

    def __init__(self, value):
        self.value = value

    def estimate(self, memory, view):
        return self.value


class Recorder(dpps.Seeded):
    """Keeps what a round's messages were made of."""

    def release(self, mechanism, scale, out):
        self.half, self.perturbation = out.half.clone(), out.perturbation.clone()
        norms = super().release(mechanism, scale, out)
        self.message, self.added = out.half.clone(), out.half - self.half
        return norms


def rows(n, d, seed, scale=1.0):
    return scale * torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_ratio(message, row, other, scale):
    """log p(message | row) - log p(message | other) for Laplace noise of this scale on every coordinate."""
    return float(((message - other).abs() - (message - row).abs()).sum() / scale)


def mixing(topology, q, size):
    """The smallest C with size(W(t-1)...W(k)) <= C q^(t-k), proved: the product over a long window contracts by q per round."""
    n, window = topology.nodes, 8 * topology.period
    worst = 1.0
    for k in range(topology.period):
        product = np.eye(n)
        for steps in range(1, window + 1):
            product = topology.weights(k + steps - 1).dense() @ product
            worst = max(worst, size(product) / q**steps)
        assert size(product) <= q**window, "q is too small for this topology"
    return worst


def spectral(product):
    return np.linalg.norm(product - 1 / len(product), 2)


def dobrushin(product):
    return max(np.abs(a - b).sum() / 2 for a in product for b in product)


CONNECTED = [(dpps.DOut(4, 2), 0.85), (dpps.DOut(6, 4), 0.7), (dpps.Exponential(8), 0.8), (dpps.Ring(5), 0.8)]


def problem_and_point(seed, n=4, d=5, local=2, coupling=0.3, spread=1.0):
    problem = Problem.draw(n, 1, d, local, coupling, seed)
    return problem, rows(n, d, seed, spread)[:, None], rows(n, local, seed + 1, spread)[:, None]


def replicate(problem, s, l, copies):
    """The same problem and point, many times side by side: expectations become means."""
    wide = [x.expand(-1, copies, -1) for x in (problem.mirror, problem.centre, problem.local_centre, s, l)]
    return Problem(*wide[:3], problem.coupling), wide[3], wide[4].clone()
