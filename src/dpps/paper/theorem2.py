r"""Theorem 2 taken at its word: a smooth non-convex problem whose constants are known,
the theorem's step sizes and explicit bound, and a simulation that averages the squared gradients.

Assumption 4 says that the sensitivity is a constant S: `Unclipped(S)`, not the distance of the rows.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpps.noise.mechanisms import Laplace
from dpps.noise.source import Seeded
from dpps.protocol import DPPS
from dpps.sensitivity import Unclipped
from dpps.topology import Topology

STEEPEST = 3 * math.sqrt(3) / 8
"""The largest |phi'|, at z = 1/sqrt(3)."""


def phi(z: Tensor) -> Tensor:
    """z^2 / (1 + z^2): smooth, bounded, convex for |z| < 1/sqrt(3) only; |phi''| <= 2."""
    return 1 - 1 / (1 + z * z)


def phi_slope(z: Tensor) -> Tensor:
    """phi'(z) = 2 z / (1 + z^2)^2."""
    return 2 * z / (1 + z * z) ** 2


@dataclass(frozen=True)
class Problem:
    r"""$F_i(s, l) = \sum_k \phi(z_k) + \sum_k \phi(l_k - e_{ik})$, $z = R_i s + \beta E l - c_i$,
    for N nodes and several seeds at once.

    R_i = I - 2 v_i v_i^T is a reflection, so every shared direction is curved; E puts the d_l local coordinates in front. Every
    node has its own v_i, c_i and e_i. Tensors are (nodes, seeds, coordinates).
    """

    mirror: Tensor
    """v"""
    centre: Tensor
    """c"""
    local_centre: Tensor
    """e"""
    coupling: float
    """beta"""

    @classmethod
    def draw(cls, nodes: int, seeds: int, shared: int, local: int, coupling: float, seed: int) -> "Problem":
        """Random nodes that nearly agree on a minimum, at distance about 1 per coordinate from 0: where phi is not convex."""
        random = np.random.default_rng(seed)
        mirror = _tensor(random.standard_normal((nodes, seeds, shared)))
        mirror /= mirror.norm(dim=2, keepdim=True)
        common = _tensor(random.choice([-1.0, 1.0], (seeds, shared)))
        spread = _tensor(0.3 * random.standard_normal((nodes, seeds, shared)))
        local_centre = _tensor(random.choice([-1.0, 1.0], (nodes, seeds, local)))
        return cls(mirror, _reflect(mirror, common) + spread, local_centre, coupling)

    def _slopes(self, s: Tensor, l: Tensor) -> Tensor:
        """phi'(z_k)."""
        return phi_slope(self._z(s, l))

    def _z(self, s: Tensor, l: Tensor) -> Tensor:
        z = _reflect(self.mirror, s) - self.centre
        z[..., : l.shape[2]] += self.coupling * l
        return z

    def value(self, s: Tensor, l: Tensor) -> Tensor:
        """F_i, (nodes, seeds)."""
        return phi(self._z(s, l)).sum(2) + phi(l - self.local_centre).sum(2)

    def gradient_shared(self, s: Tensor, l: Tensor) -> Tensor:
        """Gradient of F_i in s."""
        return _reflect(self.mirror, self._slopes(s, l))

    def gradient_local(self, s: Tensor, l: Tensor) -> Tensor:
        """Gradient of F_i in l."""
        return self.coupling * self._slopes(s, l)[..., : l.shape[2]] + phi_slope(l - self.local_centre)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, seeds, d_s)."""
        n, seeds, d = self.mirror.shape
        return n, seeds, d


def _tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values)


def _reflect(mirror: Tensor, x: Tensor) -> Tensor:
    """R_i x = x - 2 v_i (v_i . x) for every node."""
    return x - 2 * mirror * (mirror * x).sum(2, keepdim=True)


@dataclass(frozen=True)
class Constants:
    r"""Assumptions 1 to 3 in numbers. L_sc = L_s: Assumption 2(d) at s_1 = s_2 says that the clip never acts.

    C and q: $\|W^{(t-1)} \cdots W^{(k)} - \mathbf{1}\mathbf{1}^T/N\|_2 \le C q^{t-k}$. For one circulant W, C = 1 and q is its
    second singular value.
    """

    L_s: float
    L_l: float
    L_ls: float
    q: float
    sigma_s: float
    sigma_l: float
    sigma_g: float
    C: float = 1.0

    @classmethod
    def of(cls, problem: Problem, topology: Topology, sigma_s: float, sigma_l: float) -> "Constants":
        """From |phi''| <= 2, |phi'| <= 3 sqrt(3)/8 and the norms of R_i (1) and beta E (beta)."""
        beta, d = problem.coupling, problem.shape[2]
        q = topology.validate().contraction
        sigma_g = 2 * STEEPEST * math.sqrt(d)
        return cls(2.0, 2 + 2 * beta**2, 2 * beta, q, sigma_s, sigma_l, sigma_g)

    def a(self, gamma_s: float) -> float:
        r"""$A = (L_{ls}^2/2 + \gamma_s L_{sc}^2/2 + 4 L_s L_{sc}^2 \gamma_s^2) \cdot 30 C^2/(1-q)^2$."""
        L = self.L_s
        return (
            (self.L_ls**2 / 2 + gamma_s * L**2 / 2 + 4 * L**3 * gamma_s**2)
            * 30
            * self.C**2
            / (1 - self.q) ** 2
        )


@dataclass(frozen=True)
class Rates:
    """Step sizes of Theorem 2 for one T."""

    rounds: int
    gamma_s: float
    gamma_l: float
    gamma_n: float

    def conditions(self, k: Constants) -> dict[str, tuple[float, float]]:
        """Each step-size condition of Theorem 2: the value and what it has to stay below."""
        consensus = (1 - k.q) / (2 * math.sqrt(15) * k.C * k.L_s)
        descent = 1 / (16 * k.L_s + 8 * k.a(self.gamma_s))
        return {
            "gamma_s < (1-q) / (2 sqrt(15) C L_sc)": (self.gamma_s, consensus),
            "gamma_s < 1 / (16 L_s + 8 A)": (self.gamma_s, descent),
            "gamma_l < 1 / (1 + L_l)": (self.gamma_l, 1 / (1 + k.L_l)),
            "gamma_n < gamma_s / 2": (self.gamma_n, self.gamma_s / 2),
        }

    def hold(self, k: Constants) -> bool:
        """Whether all conditions hold."""
        return all(value < limit for value, limit in self.conditions(k).values())


NODES, OUT, LOCAL, COUPLING = 8, 6, 4, 0.2
SENSITIVITY, BUDGET, SHARED = 50.0, 10.0, 16
GAMMA_S, GAMMA_L, GAMMA_N = 0.32, 8.0, 4.0
"""gamma_s = 0.32/sqrt(T), gamma_l = 8/sqrt(T), gamma_n = 4/T: they meet the conditions from T = 1024 on."""


def theorem_rates(rounds: int) -> Rates:
    """As Theorem 2 asks: gamma_n = O(1/T)."""
    root = math.sqrt(rounds)
    return Rates(rounds, GAMMA_S / root, GAMMA_L / root, GAMMA_N / rounds)


def slower_rates(rounds: int) -> Rates:
    """gamma_n = O(1/sqrt(T)) instead: enough where the noise has mean zero, since the proof's term (b1) is then 0."""
    root = math.sqrt(rounds)
    return Rates(rounds, GAMMA_S / root, GAMMA_L / root, GAMMA_N / 32 / root)


@dataclass(frozen=True)
class Averages:
    """What one run gives, per seed: averages over t of Delta_s and Delta_l (Definition 8), and the value at the start."""

    delta_s: NDArray[np.float64]
    delta_l: NDArray[np.float64]
    start_value: float

    @property
    def total(self) -> NDArray[np.float64]:
        """Delta_s + Delta_l."""
        return self.delta_s + self.delta_l


def simulate(
    problem: Problem,
    rates: Rates,
    *,
    topology: Topology,
    budget: float | None,
    sigma: tuple[float, float] = (0.0, 0.0),
    start: tuple[Tensor, Tensor] | None = None,
    sensitivity: float = SENSITIVITY,
    seed: int = 0,
) -> Averages:
    """PartPSP (Algorithm 2) on the shipped protocol, the seeds side by side in one row. `budget` None: no noise at all.

    Args:
        problem: the functions F_i.
        rates: T and the step sizes.
        topology: who sends to whom.
        budget: b.
        sigma: (sigma_s, sigma_l): the stochastic gradients are the true ones plus Gaussian noise of this total deviation.
        start: (s, l) to start from; by default 0. All nodes start from the same s.
        sensitivity: the constant S of Assumption 4.
        seed: of the noises.
    """
    n, seeds, d = problem.shape
    protocol = (
        DPPS(topology)
        if budget is None
        else DPPS(topology, Laplace(budget, rates.gamma_n), Unclipped(sensitivity), noise=Seeded(seed))
    )
    zero = torch.zeros_like(problem.local_centre)
    s0, l = start or (torch.zeros(seeds, d, dtype=torch.float64), zero)
    state = protocol.start(s0.reshape(1, -1).repeat(n, 1))
    random = torch.Generator().manual_seed(seed)
    sum_s, sum_l = torch.zeros(seeds, dtype=torch.float64), torch.zeros(seeds, dtype=torch.float64)
    start_value = float(problem.value(s0, l).mean())
    for _ in range(rates.rounds):
        y = state.y.view(n, seeds, d)
        g_l = problem.gradient_local(y, l)
        sum_l += g_l.square().sum(2).mean(0)  # Delta_l: y_i^(t), l_i^(t)
        l = l - rates.gamma_l * _noised(g_l, sigma[1], random)
        mean = state.s.view(n, seeds, d).mean(0)
        sum_s += problem.gradient_shared(mean, l).mean(0).square().sum(1)  # Delta_s: mean s^(t), L^(t+1)
        g_s = _noised(problem.gradient_shared(y, l), sigma[0], random)
        protocol.step(state, (-rates.gamma_s * g_s).view(n, -1))
    return Averages((sum_s / rates.rounds).numpy(), (sum_l / rates.rounds).numpy(), start_value)


def _noised(gradient: Tensor, sigma: float, random: torch.Generator) -> Tensor:
    if sigma == 0:
        return gradient
    noise = torch.randn(gradient.shape, generator=random, dtype=torch.float64)
    return gradient + sigma / math.sqrt(gradient.shape[2]) * noise


def stationary(problem: Problem) -> tuple[Tensor, Tensor]:
    """A stationary point of F, by plain gradient descent: a run that starts there shows the noise and nothing else."""
    _, seeds, d = problem.shape
    s = torch.zeros(seeds, d, dtype=torch.float64)
    l = torch.zeros_like(problem.local_centre)
    for _ in range(500):
        l = l - 0.4 * problem.gradient_local(s, l)
        s = s - 0.4 * problem.gradient_shared(s, l).mean(0)
    return s, l


def explicit_bound(
    k: Constants, r: Rates, found: Averages, shared: int, budget: float
) -> tuple[float, float]:
    r"""Both sides of the inequality the theorem is read off, (last but one of its proof), divided by T;
    with gamma_n where Lemma 4 (b3) writes gamma_s, which makes the right side smaller. Since F >= 0,
    F at the start bounds the first difference."""
    A, T, ratio = k.a(r.gamma_s), r.rounds, shared * SENSITIVITY**2 / budget**2
    left_l = (r.gamma_l - (1 + k.L_l) * r.gamma_l**2) * found.delta_l.mean()
    left_s = (r.gamma_s / 2 - r.gamma_n / 2 - (4 * k.L_s + 2 * A) * r.gamma_s**2) * found.delta_s.mean()
    right = found.start_value / T + (1 + k.L_l) * (r.gamma_l * k.sigma_l) ** 2
    right += (4 * k.L_s + A) * r.gamma_s**2 * (k.sigma_s**2 + k.sigma_g**2)
    right += (r.gamma_n + 2 * (k.L_s + A) * r.gamma_n**2) * ratio
    return float(left_l + left_s), right


# Sweeps
