r"""Theorem 2, measured: how the average squared gradients fall with T and what of them is due to the noise
(the term $d_s S^2 / b^2$)."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpps.errors import needs_extra
from dpps.paper.pages import Page, Table
from dpps.paper.theorem2 import (
    BUDGET,
    COUPLING,
    LOCAL,
    NODES,
    OUT,
    SENSITIVITY,
    SHARED,
    Averages,
    Constants,
    Problem,
    Rates,
    explicit_bound,
    simulate,
    slower_rates,
    stationary,
    theorem_rates,
)
from dpps.topology import DOut, Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    _write_csv(out / "convergence.csv", experiment.rows)
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


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


SYMBOLS = {"T": "$T$", "d_s": "$d_s$", "b": "$b$"}
TYPESET = {
    "Delta_s": r"$\Delta_{\bar s}$",
    "Delta_l": r"$\Delta_l$",
    "gamma_n": r"$\gamma_n$",
    "sqrt(T)": r"$\sqrt{T}$",
}


def _typeset(text: str) -> str:
    for plain, symbol in TYPESET.items():
        text = text.replace(plain, symbol)
    return text


def _draw(series: list[Series]) -> "Figure":
    with needs_extra("plots"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for axis, name in zip(figure.subplots(1, 3), SYMBOLS, strict=True):
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
    axis.set(xscale="log", yscale="log", xlabel=SYMBOLS[name], ylabel="average squared gradient")
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
    table = Table(("measured", "against", "slope", "95 % interval", "theorem", "agrees"))
    for s in summary["slopes"]:
        interval = "{:.2f} to {:.2f}".format(*s["interval"])
        verdict = "yes" if s["agrees"] else "no"
        table.add(s["series"], s["axis"], f"{s['slope']:.2f}", interval, f"{s['theorem']:+g}", verdict)
    return table
