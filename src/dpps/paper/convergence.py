r"""Theorem 2 taken at its word, and measured.

A smooth non-convex problem whose constants are known, the theorem's step sizes and explicit bound, and a simulation that averages the
squared gradients: how they fall with T, and how much of them is due to the noise (the term $d_s S^2 / b^2$).
Assumption 4 says that the sensitivity is a constant S: `Unclipped(S)`, not the distance of the rows.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpps.noise import Laplace, Seeded
from dpps.paper.pages import Page, figure
from dpps.protocol import DPPS
from dpps.sensitivity import Unclipped
from dpps.topology import DOut, Topology

if TYPE_CHECKING:
    from dpps.paper.pages import Figure

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

    Attributes:
        mirror: v.
        centre: c.
        local_centre: e.
        coupling: beta.
    """

    mirror: Tensor
    centre: Tensor
    local_centre: Tensor
    coupling: float

    @classmethod
    def draw(cls, nodes: int, seeds: int, shared: int, local: int, coupling: float, seed: int) -> "Problem":
        """Random nodes that nearly agree on a minimum, at distance about 1 per coordinate from 0: where phi is not convex."""
        random = np.random.default_rng(seed)
        mirror = torch.from_numpy(random.standard_normal((nodes, seeds, shared)))
        mirror /= mirror.norm(dim=2, keepdim=True)
        common = torch.from_numpy(random.choice([-1.0, 1.0], (seeds, shared)))
        spread = torch.from_numpy(0.3 * random.standard_normal((nodes, seeds, shared)))
        local_centre = torch.from_numpy(random.choice([-1.0, 1.0], (nodes, seeds, local)))
        return cls(mirror, _reflect(mirror, common) + spread, local_centre, coupling)

    def _z(self, s: Tensor, l: Tensor) -> Tensor:
        z = _reflect(self.mirror, s) - self.centre
        z[..., : l.shape[2]] += self.coupling * l
        return z

    def value(self, s: Tensor, l: Tensor) -> Tensor:
        """F_i, (nodes, seeds)."""
        return phi(self._z(s, l)).sum(2) + phi(l - self.local_centre).sum(2)

    def gradient_shared(self, s: Tensor, l: Tensor) -> Tensor:
        """The gradient of F_i in s."""
        return _reflect(self.mirror, phi_slope(self._z(s, l)))

    def gradient_local(self, s: Tensor, l: Tensor) -> Tensor:
        """The gradient of F_i in l."""
        return self.coupling * phi_slope(self._z(s, l))[..., : l.shape[2]] + phi_slope(l - self.local_centre)

    def origin(self) -> tuple[Tensor, Tensor]:
        """s = 0, which all nodes share, and l = 0."""
        return torch.zeros_like(self.mirror[0]), torch.zeros_like(self.local_centre)

    def stationary(self) -> tuple[Tensor, Tensor]:
        """A stationary point of F, by plain gradient descent: a run that starts there shows the noise and nothing else."""
        s, l = self.origin()
        for _ in range(500):
            l = l - 0.4 * self.gradient_local(s, l)
            s = s - 0.4 * self.gradient_shared(s, l).mean(0)
        return s, l

    @property
    def shape(self) -> tuple[int, int, int]:
        """(N, seeds, d_s)."""
        n, seeds, d = self.mirror.shape
        return n, seeds, d


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
        beta, sigma_g = problem.coupling, 2 * STEEPEST * math.sqrt(problem.shape[2])
        return cls(2.0, 2 + 2 * beta**2, 2 * beta, topology.validate().contraction, sigma_s, sigma_l, sigma_g)

    def a(self, gamma_s: float) -> float:
        r"""$A = (L_{ls}^2/2 + \gamma_s L_{sc}^2/2 + 4 L_s L_{sc}^2 \gamma_s^2) \cdot 30 C^2/(1-q)^2$."""
        smooth = self.L_ls**2 / 2 + gamma_s * self.L_s**2 / 2 + 4 * self.L_s**3 * gamma_s**2
        return smooth * 30 * self.C**2 / (1 - self.q) ** 2


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
        return {
            "gamma_s < (1-q) / (2 sqrt(15) C L_sc)": (self.gamma_s, consensus),
            "gamma_s < 1 / (16 L_s + 8 A)": (self.gamma_s, 1 / (16 * k.L_s + 8 * k.a(self.gamma_s))),
            "gamma_l < 1 / (1 + L_l)": (self.gamma_l, 1 / (1 + k.L_l)),
            "gamma_n < gamma_s / 2": (self.gamma_n, self.gamma_s / 2),
        }

    def hold(self, k: Constants) -> bool:
        """Whether all conditions hold."""
        return all(value < limit for value, limit in self.conditions(k).values())


NODES, OUT, LOCAL, COUPLING = 8, 6, 4, 0.2
SENSITIVITY, BUDGET, SHARED = 50.0, 10.0, 16
SIGMA, NOISE_ROUNDS = (0.5, 0.5), 1024
TOPOLOGY = DOut(NODES, OUT)


def theorem_rates(rounds: int, *, slower: bool = False) -> Rates:
    """gamma_s = 0.32/sqrt(T), gamma_l = 8/sqrt(T), gamma_n = 4/T: they meet the conditions from T = 1024 on.

    Args:
        rounds: T.
        slower: gamma_n = O(1/sqrt(T)) instead of O(1/T): enough where the noise has mean zero, since the proof's term (b1) is then 0.
    """
    root = math.sqrt(rounds)
    return Rates(rounds, 0.32 / root, 8.0 / root, 0.125 / root if slower else 4.0 / rounds)


class Averages(NamedTuple):
    """What one run gives, per seed: averages over t of Delta_s and Delta_l (Definition 8), and the value at the start."""

    delta_s: NDArray[np.float64]
    delta_l: NDArray[np.float64]
    start_value: float


def simulate(
    problem: Problem,
    rates: Rates,
    *,
    budget: float | None,
    sigma: tuple[float, float] = (0.0, 0.0),
    start: tuple[Tensor, Tensor] | None = None,
) -> Averages:
    """PartPSP (Algorithm 2) on the shipped protocol over `TOPOLOGY`, the seeds side by side in one row.

    Args:
        problem: the functions F_i.
        rates: T and the step sizes.
        budget: b; None: no noise at all.
        sigma: (sigma_s, sigma_l): stochastic gradients are the true ones plus Gaussian noise of this root mean square norm.
        start: (s, l) to start from; by default 0. All nodes start from the same s.
    """
    n, seeds, d = problem.shape
    protocol = (
        DPPS(TOPOLOGY)
        if budget is None
        else DPPS(TOPOLOGY, Laplace(budget, rates.gamma_n), Unclipped(SENSITIVITY), noise=Seeded(0))
    )
    s0, l = start or problem.origin()
    state = protocol.start(s0.reshape(1, -1).repeat(n, 1))
    random = torch.Generator().manual_seed(0)
    sum_s, sum_l = torch.zeros(2, seeds, dtype=torch.float64)
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


def explicit_bound(
    k: Constants, r: Rates, found: Averages, shared: int, budget: float
) -> tuple[float, float]:
    r"""Both sides of the inequality the theorem is read off (last but one of its proof), divided by T;
    with gamma_n where Lemma 4 (b3) writes gamma_s, which makes the right side smaller. Since F >= 0,
    F at the start bounds the first difference."""
    A, T, ratio = k.a(r.gamma_s), r.rounds, shared * SENSITIVITY**2 / budget**2
    left_l = (r.gamma_l - (1 + k.L_l) * r.gamma_l**2) * found.delta_l.mean()
    left_s = (r.gamma_s / 2 - r.gamma_n / 2 - (4 * k.L_s + 2 * A) * r.gamma_s**2) * found.delta_s.mean()
    right = found.start_value / T + (1 + k.L_l) * (r.gamma_l * k.sigma_l) ** 2
    right += (4 * k.L_s + A) * r.gamma_s**2 * (k.sigma_s**2 + k.sigma_g**2)
    right += (r.gamma_n + 2 * (k.L_s + A) * r.gamma_n**2) * ratio
    return float(left_l + left_s), right


# The experiment

TOLERANCE = {"T": 0.05, "d_s": 0.15, "b": 0.15}
"""The exponents are those of large T and of weak noise; finite runs may differ by this much."""


@dataclass(frozen=True)
class Series:
    """One quantity measured along one axis.

    Attributes:
        values: (points, seeds).
        exponent: of the term in the theorem's bound.
    """

    name: str
    axis: str
    x: tuple[float, ...]
    values: NDArray[np.float64]
    exponent: float

    @cached_property
    def slope(self) -> float:
        """Of the mean over seeds, on log axes."""
        return float(_slopes(self.x, self.values.mean(1)))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the slope: seeds drawn with replacement."""
        seeds = self.values.shape[1]
        picks = np.random.default_rng(0).integers(0, seeds, (2000, seeds))
        low, high = np.quantile(_slopes(self.x, self.values[:, picks].mean(2)), [0.025, 0.975]).tolist()
        return low, high

    @property
    def agrees(self) -> bool:
        """Within `TOLERANCE` of the theorem's exponent; in T, where it is an upper bound, also when falling faster."""
        excess = self.slope - self.exponent
        return (excess if self.axis == "T" else abs(excess)) <= TOLERANCE[self.axis]


def _slopes(x: Sequence[float], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares on log axes, one fit per column of y (points, columns)."""
    return np.asarray(np.polyfit(np.log(x), np.log(y), 1)[0], dtype=np.float64)


class Size(NamedTuple):
    """How much is computed."""

    seeds: int
    rounds: tuple[int, ...]
    shared: tuple[int, ...]
    budgets: tuple[float, ...]


QUICK = Size(16, (1024, 2048), (8, 32), (10.0, 40.0))
FULL = Size(32, (1024, 2048, 4096, 8192, 16384, 32768), (8, 16, 32, 64, 128), (10.0, 20.0, 40.0, 80.0, 160.0))


def _measure(
    rows: list[dict[str, Any]], size: Size, sweep: str, rates: Rates, d: int, b: float | None
) -> Averages:
    """One run with a row of the CSV file for every seed. The sweeps over d_s and b start at a stationary point, with exact gradients."""
    problem = Problem.draw(NODES, size.seeds, d, LOCAL, COUPLING, seed=d)
    sigma, start = (SIGMA, None) if sweep.startswith("T ") else ((0.0, 0.0), problem.stationary())
    found = simulate(problem, rates, budget=b, sigma=sigma, start=start)
    k = Constants.of(problem, TOPOLOGY, *sigma)
    left, right = explicit_bound(k, rates, found, d, b or math.inf)
    row = {"sweep": sweep, "T": rates.rounds, "d_s": d, "b": b or "none", "S": SENSITIVITY}
    row |= {"gamma_s": rates.gamma_s, "gamma_l": rates.gamma_l, "gamma_n": rates.gamma_n if b else 0.0}
    row |= {"epsilon_of_a_round": b / rates.gamma_n if b else "inf", "conditions_hold": rates.hold(k)}
    for seed, (s, l) in enumerate(zip(found.delta_s, found.delta_l, strict=True)):
        rows.append(row | {"seed": seed, "delta_s": s, "delta_l": l, "left": left, "right": right})
    return found


def run(out: Path, quick: bool = False) -> list[Series]:
    """The experiment: writes convergence.csv, convergence.svg, convergence.png and convergence.html to `out`.

    Returns:
        Every measured series, with its slope and the theorem's exponent: Delta_s and Delta_l against T, and what the noise adds
        against d_s and b.
    """
    size, rows = QUICK if quick else FULL, list[dict[str, Any]]()
    still = theorem_rates(NOISE_ROUNDS)
    theorem = [_measure(rows, size, "T theorem", theorem_rates(t), SHARED, BUDGET) for t in size.rounds]
    slower = [
        _measure(rows, size, "T slower", theorem_rates(t, slower=True), SHARED, BUDGET) for t in size.rounds
    ]
    by_dimension = [_measure(rows, size, "d_s", still, d, BUDGET) for d in size.shared]
    by_budget = [_measure(rows, size, "b", still, SHARED, b) for b in size.budgets]
    quiet = _measure(rows, size, "no noise", still, size.shared[-1], None).delta_s.mean()

    def shared(name: str, axis: str, x: tuple[float, ...], found: list[Averages], exponent: float) -> Series:
        return Series(name, axis, x, np.stack([each.delta_s for each in found]), exponent)

    local, noise = np.stack([each.delta_l for each in theorem]), "Delta_s from a stationary point"
    series = [
        shared("Delta_s, gamma_n = 4/T", "T", size.rounds, theorem, -0.5),
        Series("Delta_l, gamma_n = 4/T", "T", size.rounds, local, -0.5),
        shared("Delta_s, gamma_n = 0.125/sqrt(T) (not in the theorem)", "T", size.rounds, slower, -0.5),
        shared(noise, "d_s", size.shared, by_dimension, 1.0),
        shared(noise, "b", size.budgets, by_budget, -2.0),
    ]
    lines = list(_findings(size, series, rows, quiet))
    title = "Theorem 2: convergence on a non-convex problem with known constants"
    mark = "quick run: fewer seeds and rounds" if quick else ""
    page = Page(out, title, [_PROBLEM, f"{size.seeds} seeds.", *lines], mark)
    with (out / "convergence.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    page.figure("convergence", _draw(series), dpi=150)
    page.save("convergence.html")
    print(*lines, sep="\n")
    return series


def _findings(size: Size, series: list[Series], rows: list[dict[str, Any]], quiet: float) -> Iterator[str]:
    """What is printed, and stands on the page."""
    first, last = theorem_rates(size.rounds[0]), theorem_rates(size.rounds[-1])
    problem = Problem.draw(NODES, 1, SHARED, LOCAL, COUPLING, seed=SHARED)
    yield f"Step sizes at T = {first.rounds} (they shrink with T):"
    for name, (value, limit) in first.conditions(Constants.of(problem, TOPOLOGY, *SIGMA)).items():
        yield f"  {name}: {value:.5g} < {limit:.5g}"
    yield f"  all conditions hold in all runs: {all(row['conditions_hold'] for row in rows)}"
    yield "Slopes on log axes, 95 % bootstrap interval over seeds:"
    for s in series:
        measured = f"{s.slope:.2f} [{s.interval[0]:.2f}, {s.interval[1]:.2f}]"
        verdict = "agrees" if s.agrees else "DIFFERS"
        yield f"  {s.name} against {s.axis}: {measured}, theorem {s.exponent:+g}: {verdict}"
    least = min(s.values.mean(1).min() for s in series if s.axis != "T")
    share = max(row["left"] / row["right"] for row in rows)
    yield f"Left over right side of the proof's last inequality: at most {share:.3g}"
    yield f"Without noise, the sweeps over d_s and b have at most {quiet / least:.2g} of what they show"
    yield f"Epsilon of one round, b / gamma_n: {BUDGET / first.gamma_n:,.0f} at the smallest T, {BUDGET / last.gamma_n:,.0f} at the largest"


_PROBLEM = (
    f"N = {NODES}, {OUT}-Out; each seed has its own problem and its own noise. F_i(s, l) = Σ_k z_k²/(1 + z_k²), z = R_i s + "
    f"βEl − c_i, and the same of l − e_i. The sensitivity is held at S = {SENSITIVITY:g} (Assumption 4). The exponent in T is "
    "an upper bound: a steeper fall agrees. Against d_s and b the runs start at a stationary point with exact gradients, T = "
    f"{NOISE_ROUNDS}, so that the noise is all there is to see."
)


def _draw(series: list[Series]) -> "Figure":
    fig, axes = figure(3, columns=3)
    fig.set_size_inches(11, 4.6)
    axis_of = dict(zip(TOLERANCE, axes, strict=True))
    for s in series:
        axis, mean, (low, high) = axis_of[s.axis], s.values.mean(1), s.interval
        spread = 1.96 * s.values.std(1, ddof=1) / math.sqrt(s.values.shape[1])
        label = f"{s.name}\nslope {s.slope:.2f} [{low:.2f}, {high:.2f}]"
        points = axis.errorbar(s.x, mean, yerr=spread, fmt="o-", markersize=4, label=label)
        guide = mean[0] * (np.array(s.x) / s.x[0]) ** s.exponent
        axis.plot(s.x, guide, ":", color=points[0].get_color(), linewidth=1)
        axis.set_title(f"dotted: the theorem's exponent {s.exponent:+g}", fontsize=9)
        axis.set(xscale="log", yscale="log", xlabel=s.axis, ylabel="average squared gradient")
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
    return fig
