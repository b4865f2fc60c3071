r"""Theorem 2 taken at its word, and measured.

A smooth non-convex problem whose constants are known, the theorem's step sizes and explicit bound, and a simulation that averages the
squared gradients: how they fall with T, and what of them is due to the noise (the term $d_s S^2 / b^2$).
Assumption 4 says that the sensitivity is a constant S: `Unclipped(S)`, not the distance of the rows.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpps.errors import needs_extra
from dpps.noise import Laplace, Seeded
from dpps.paper.pages import Page, Table
from dpps.protocol import DPPS
from dpps.sensitivity import Unclipped
from dpps.topology import DOut, Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


# The experiment


@dataclass(frozen=True)
class Series:
    """One quantity measured along one axis: a row of values per seed, and what the theorem says of the slope."""

    name: str
    axis: str
    x: tuple[float, ...]
    values: NDArray[np.float64]
    """(points, seeds)."""
    exponent: float
    """Of the term in the theorem's bound."""

    def slope(self) -> float:
        """Of the mean over seeds, on log axes."""
        return float(_slopes(self.x, self.values.mean(1)))

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the slope: seeds drawn with replacement."""
        random = np.random.default_rng(0)
        seeds = self.values.shape[1]
        picks = random.integers(0, seeds, (2000, seeds))
        slopes = _slopes(self.x, self.values[:, picks].mean(2))
        low, high = np.quantile(slopes, [0.025, 0.975]).tolist()
        return low, high

    def agrees(self) -> bool:
        """Within `TOLERANCE` of the theorem's exponent; in T, where it is an upper bound, also when falling faster."""
        excess = self.slope() - self.exponent
        return excess <= TOLERANCE[self.axis] if self.axis == "T" else abs(excess) <= TOLERANCE[self.axis]


TOLERANCE = {"T": 0.05, "d_s": 0.15, "b": 0.15}
"""The exponents are those of large T and of weak noise; this much is granted to finite runs."""


def _slopes(x: Sequence[float], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares on log axes, one fit per column of y (points, columns)."""
    fits = np.polyfit(np.log(x), np.log(y), 1)
    return np.asarray(fits[0], dtype=np.float64)


@dataclass(frozen=True)
class Size:
    """How much is computed."""

    seeds: int
    rounds: tuple[int, ...]
    shared: tuple[int, ...]
    budgets: tuple[float, ...]


QUICK = Size(16, (1024, 2048), (8, 32), (10.0, 40.0))
FULL = Size(32, (1024, 2048, 4096, 8192, 16384, 32768), (8, 16, 32, 64, 128), (10.0, 20.0, 40.0, 80.0, 160.0))
SIGMA = (0.5, 0.5)
NOISE_ROUNDS = 1024


@dataclass
class _Experiment:
    size: Size
    topology: Topology
    rows: list[dict[str, Any]]

    def problem(self, shared: int) -> Problem:
        return Problem.draw(NODES, self.size.seeds, shared, LOCAL, COUPLING, seed=shared)

    def run(
        self, sweep: str, problem: Problem, rates: Rates, budget: float | None, **options: Any
    ) -> Averages:
        """One run, written down: a line per seed, the step sizes and both sides of the explicit inequality."""
        found = simulate(problem, rates, topology=self.topology, budget=budget, **options)
        k = Constants.of(problem, self.topology, *options.get("sigma", (0.0, 0.0)))
        d = problem.shape[2]
        left, right = explicit_bound(k, rates, found, d, budget or math.inf)
        for seed, (s, l) in enumerate(zip(found.delta_s, found.delta_l, strict=True)):
            self.rows.append(
                {
                    "sweep": sweep,
                    "T": rates.rounds,
                    "d_s": d,
                    "b": budget or "none",
                    "S": SENSITIVITY,
                    "gamma_s": rates.gamma_s,
                    "gamma_l": rates.gamma_l,
                    "gamma_n": rates.gamma_n if budget else 0.0,
                    "epsilon_of_a_round": budget / rates.gamma_n if budget else "inf",
                    "conditions_hold": rates.hold(k),
                    "seed": seed,
                    "delta_s": s,
                    "delta_l": l,
                    "left": left,
                    "right": right,
                }
            )
        return found

    def against_rounds(self) -> list[Series]:
        problem, x = self.problem(SHARED), tuple(float(t) for t in self.size.rounds)
        series = []
        for name, schedule in {"theorem": theorem_rates, "slower": slower_rates}.items():
            runs = [
                self.run(f"T {name}", problem, schedule(t), BUDGET, sigma=SIGMA) for t in self.size.rounds
            ]
            rule = "gamma_n = 4/T" if name == "theorem" else "gamma_n = 0.125/sqrt(T) (not in the theorem)"
            for what in ("delta_s", "delta_l") if name == "theorem" else ("delta_s",):
                values = np.stack([getattr(run, what) for run in runs])
                series.append(Series(f"{what.capitalize()}, {rule}", "T", x, values, -0.5))
        return series

    def against_dimension(self) -> Series:
        runs = []
        for d in self.size.shared:
            problem = self.problem(d)
            runs.append(self.noise_only("d_s", problem, BUDGET))
        x = tuple(float(d) for d in self.size.shared)
        return Series("Delta_s from a stationary point", "d_s", x, np.stack([r.delta_s for r in runs]), 1.0)

    def against_budget(self) -> Series:
        problem = self.problem(SHARED)
        runs = [self.noise_only("b", problem, b) for b in self.size.budgets]
        return Series(
            "Delta_s from a stationary point",
            "b",
            self.size.budgets,
            np.stack([r.delta_s for r in runs]),
            -2.0,
        )

    def floor(self) -> float:
        """Delta_s of the same runs without any noise: what the sweeps over d_s and b must stay well above."""
        quiet = self.noise_only("no noise", self.problem(self.size.shared[-1]), None)
        return float(quiet.delta_s.mean())

    def noise_only(self, sweep: str, problem: Problem, budget: float | None) -> Averages:
        return self.run(sweep, problem, theorem_rates(NOISE_ROUNDS), budget, start=stationary(problem))


def run(out: Path, quick: bool = False) -> dict[str, Any]:
    """The experiment: writes convergence.csv, convergence.svg, convergence.png and convergence.html to `out`.

    Returns:
        The summary the page shows: step-size conditions, slopes with 95 % intervals and the theorem's exponents.
    """
    out.mkdir(parents=True, exist_ok=True)
    experiment = _Experiment(QUICK if quick else FULL, DOut(NODES, OUT), [])
    series = [*experiment.against_rounds(), experiment.against_dimension(), experiment.against_budget()]
    summary = _summary(experiment, series)
    with (out / "convergence.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(experiment.rows[0]))
        writer.writeheader()
        writer.writerows(experiment.rows)
    page = Page(
        out,
        "Theorem 2: convergence on a non-convex problem with known constants",
        [_PROBLEM, f"{summary['seeds']} seeds.", *_lines(summary)],
        "quick run: fewer seeds and rounds" if quick else "",
    )
    page.figure("convergence", _draw(series), dpi=150)
    page.show("Slopes on log axes", _table(summary))
    page.save("convergence.html")
    for line in _lines(summary):
        print(line)
    return summary


def _summary(experiment: _Experiment, series: list[Series]) -> dict[str, Any]:
    k = Constants.of(experiment.problem(SHARED), experiment.topology, *SIGMA)
    rates = theorem_rates(experiment.size.rounds[0])
    floor = experiment.floor()
    noise = [s for s in series if s.axis != "T"]
    return {
        "conditions": {name: list(pair) for name, pair in rates.conditions(k).items()},
        "conditions_hold": all(row["conditions_hold"] for row in experiment.rows),
        "smallest_rounds": rates.rounds,
        "slopes": [
            {
                "series": s.name,
                "axis": s.axis,
                "slope": s.slope(),
                "interval": list(s.interval()),
                "theorem": s.exponent,
                "agrees": s.agrees(),
            }
            for s in series
        ],
        "share_of_bound_max": max(row["left"] / row["right"] for row in experiment.rows),
        "floor_share_max": floor / min(float(s.values.mean(1).min()) for s in noise),
        "epsilon_of_a_round": [BUDGET / theorem_rates(t).gamma_n for t in experiment.size.rounds],
        "seeds": experiment.size.seeds,
        "rounds": list(experiment.size.rounds),
    }


# Output


def _lines(summary: dict[str, Any]) -> list[str]:
    lines = [f"Step sizes at T = {summary['smallest_rounds']} (they shrink with T):"]
    lines += [
        f"  {name}: {value:.5g} < {limit:.5g}" for name, (value, limit) in summary["conditions"].items()
    ]
    lines.append(f"  all conditions hold in all runs: {summary['conditions_hold']}")
    lines.append("Slopes on log axes, 95 % bootstrap interval over seeds:")
    for s in summary["slopes"]:
        low, high = s["interval"]
        verdict = "agrees" if s["agrees"] else "DIFFERS"
        text = f"  {s['series']} against {s['axis']}: {s['slope']:.2f} [{low:.2f}, {high:.2f}]"
        lines.append(f"{text}, theorem {s['theorem']:+g}: {verdict}")
    lines.append(
        f"Left over right side of the proof's last inequality: at most {summary['share_of_bound_max']:.3g}"
    )
    lines.append(
        f"Without noise, the sweeps over d_s and b have at most {summary['floor_share_max']:.2g} of what they show"
    )
    first, last = summary["epsilon_of_a_round"][0], summary["epsilon_of_a_round"][-1]
    lines.append(
        f"Epsilon of one round, b / gamma_n: {first:,.0f} at the smallest T, {last:,.0f} at the largest"
    )
    return lines


_TYPESET = {
    "Delta_s": r"$\Delta_{\bar s}$",
    "Delta_l": r"$\Delta_l$",
    "gamma_n": r"$\gamma_n$",
    "sqrt(T)": r"$\sqrt{T}$",
}


def _typeset(text: str) -> str:
    for plain, symbol in _TYPESET.items():
        text = text.replace(plain, symbol)
    return text


def _draw(series: list[Series]) -> "Figure":
    with needs_extra("plots"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for axis, name in zip(figure.subplots(1, 3), TOLERANCE, strict=True):
        _panel(axis, name, [s for s in series if s.axis == name])
    return figure


def _panel(axis: Any, name: str, series: list[Series]) -> None:
    for s in series:
        mean, (low, high) = s.values.mean(1), s.interval()
        spread = 1.96 * s.values.std(1, ddof=1) / math.sqrt(s.values.shape[1])
        label = f"{_typeset(s.name)}\nslope {s.slope():.2f} [{low:.2f}, {high:.2f}]"
        points = axis.errorbar(s.x, mean, yerr=spread, fmt="o-", markersize=4, label=label)
        guide = mean[0] * (np.array(s.x) / s.x[0]) ** s.exponent
        axis.plot(s.x, guide, ":", color=points[0].get_color(), linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel=f"${name}$", ylabel="average squared gradient")
    axis.set_title(f"dotted: the theorem's exponent {series[0].exponent:+g}", fontsize=9)
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)


_PROBLEM = (
    f"N = {NODES}, {OUT}-Out; each seed has its own problem and its own noise. F_i(s, l) = Σ_k z_k²/(1 + "
    "z_k²), z = R_i s + βEl − c_i, and "
    f"the same of l − e_i. The sensitivity is held at S = {SENSITIVITY:g} (Assumption 4). The exponent in T "
    "is an upper bound: a steeper fall "
    "agrees. Against d_s and b the runs start at a stationary point with exact gradients, T = "
    f"{NOISE_ROUNDS}, so that the noise is all there is to see."
)


def _table(summary: dict[str, Any]) -> Table:
    table = Table("measured | against | slope | 95 % interval | theorem | agrees")
    for s in summary["slopes"]:
        interval = "{:.2f} to {:.2f}".format(*s["interval"])
        verdict = "yes" if s["agrees"] else "no"
        table.add(s["series"], s["axis"], f"{s['slope']:.2f}", interval, f"{s['theorem']:+g}", verdict)
    return table
