"""The paper's tables and figures whose numbers come from training runs, next to the published numbers.

An `Experiment` declares its points, each with a cell for every seed, and writes their results as tables and figures.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from math import isfinite, prod
from pathlib import Path
from typing import Any, ClassVar, Literal

from dpps.errors import UsageError, unknown
from dpps.learning import ALGORITHMS
from dpps.paper import published
from dpps.paper.pages import Page, Table, figure, spread
from dpps.paper.runner import Cell, Result, Store, mean_real, rounds_above
from dpps.topology import parse

Options = dict[str, Any]
Results = Mapping[Cell, Result]

SEEDS = (2024, 2025, 2026)
MODELS = ("mlp", "resnet18", "vit")
AUTHORS: Options = {
    "data": "mnist",
    "unit": "node-swap",
    "sensitivity": "oracle",
    "budget": 5.0,
    "epochs": 12,
}
AUTHORS |= {"batch_size": 100, "lr_shared": 0.1, "lr_local": 0.1, "lr_step": 5, "seed": SEEDS[0]}
"""The authors' settings, where a table says nothing else; the defaults N = 10, EXP and gamma_n = 0.001 are theirs too."""


def paper_cell(**options: Any) -> Cell:
    """A run with the authors' settings except these. The real sensitivity is recorded unless it sets the noise anyway."""
    cell = Cell.of(**AUTHORS | options)
    used_anyway = cell["sensitivity"] == "oracle" or ALGORITHMS[cell["algorithm"]].own_sensitivity
    tracked = cell["unit"] == "node-swap" and not used_anyway
    return cell.but(track_real=options.get("track_real", tracked))


@dataclass(frozen=True)
class Scope:
    """How much is computed. full: as in the paper. quick: minutes, on mnist-mini."""

    size: Literal["full", "quick"] = "full"
    seeds: Sequence[int] = SEEDS
    models: Sequence[str] = MODELS
    bandwidth: float = 1e9
    """Bits per second."""

    def __post_init__(self) -> None:
        for model in self.models:
            if model not in MODELS:
                raise unknown("model", model, MODELS)
        if not self.seeds:
            raise UsageError("--seeds is 0: it must be 1 or more")
        if not (self.bandwidth > 0 and isfinite(self.bandwidth)):
            raise UsageError(f"--bandwidth is {self.bandwidth}: it must be positive, in bits a second")

    def fit(self, cell: Cell) -> Cell:
        """The cell at this size. A quick MLP run has as many rounds as two epochs of a full one."""
        if self.size == "full":
            return cell
        small = cell.but(data="mnist-mini")
        if cell["model"].startswith("mlp"):
            return small.but(epochs=12)
        few = 3 * cell["nodes"] * cell["batch_size"]
        return small.but(epochs=1, examples=few, tests=0 if cell.tests == 0 else 200)

    def seeded(self, cell: Cell, seeds: Sequence[int] | None = None) -> tuple[Cell, ...]:
        """The cell at this size with every seed."""
        return tuple(self.fit(cell.but(seed=seed)) for seed in seeds or self.seeds)


@dataclass(frozen=True)
class Point:
    """A row of a table or a point of a figure: its labels, and a cell for each seed.

    `part` names the table of the experiment that it belongs to. Points of a smaller `rank` are run first.
    """

    labels: tuple[Any, ...]
    cells: tuple[Cell, ...]
    part: str = ""
    rank: float = 0


class Experiment(ABC):
    """One table or figure. The docstring of a subclass stands on its page."""

    name: ClassVar[str]
    """What `dpps paper` calls it."""
    what: ClassVar[str]
    title: ClassVar[str]
    took: ClassVar[tuple[str, str, str]]
    """How long it takes with --quick, with --models mlp, and as a whole."""

    @abstractmethod
    def points(self, scope: Scope) -> list[Point]:
        """What is run."""

    @abstractmethod
    def write(self, results: Results, points: list[Point], scope: Scope, page: Page) -> None:
        """Puts the results next to the published numbers."""

    def cells(self, scope: Scope) -> list[Cell]:
        """All runs, in the order in which they begin: by rank, and the first seed of everything before the second."""
        ranked = [(p.rank, k, cell) for p in self.points(scope) for k, cell in enumerate(p.cells)]
        return list(dict.fromkeys(cell for *_, cell in sorted(ranked, key=lambda entry: entry[:2])))

    def page(self, store: Store, scope: Scope, out: Path, notes: Sequence[str] = ()) -> Path:
        """Write the page of the results that are there."""
        cells = self.cells(scope)
        results = store.all(cells)
        ran = f"{len(results)} of {len(cells)} cells run; seeds {', '.join(map(str, scope.seeds))}"
        about = " ".join(str(self.__doc__).split())
        mark = "" if scope.size == "full" else "quick run on mnist-mini, not the paper's data and rounds"
        page = Page(out / self.name, self.title, ["; ".join((ran, *notes)), about], mark)
        self.write(results, self.points(scope), scope, page)
        return page.save()


def _done(results: Results, point: Point, needs: str) -> list[Result]:
    """The runs of a point that have a value for "real" or "accuracy"."""
    found = (results.get(cell) for cell in point.cells)
    return [r for r in found if r and r.get(needs) not in (None, [])]


def _shown(results: Results, cell: Cell) -> float | str:
    """The accuracy of one run, or why there is none."""
    if cell not in results:
        return "not run"
    accuracy: float | None = results[cell]["accuracy"]
    return "broke off" if accuracy is None else accuracy


def _above(found: Sequence[Result], bound: str = "estimated") -> int:
    return sum(len(rounds_above(r, bound)) for r in found)


_PANELS: dict[tuple[str, str], Options] = {
    ("mlp", "1"): {"shared": "1", "c_prime": 0.78, "decay": 0.55},
    ("mlp", "2"): {"shared": "2", "c_prime": 0.78, "decay": 0.62},
    ("resnet18", "1"): {"shared": "conv1,bn1", "c_prime": 0.86, "decay": 0.53},
    ("resnet18", "2"): {"shared": "conv1,bn1,layer1", "c_prime": 0.78, "decay": 0.7, "lr_shared": 1e-5},
}
_KIND: dict[str, Options] = {
    "mlp": {"model": "mlp-residual"},
    "resnet18": {"model": "resnet18", "data": "fashion-mnist", "clip": 100.0},
}


class Sensitivity(Experiment):
    """Section V-B, figure "Comparison of Real Sensitivity and Estimated Sensitivity": eight panels, and the certified bound.
    The paper says C' = .78 for all; the names of the authors' logs and the growth of their curves say C' = .86 for
    ResNet-18 with one shared layer, which there is conv1 and bn1, and a shared rate of 1e-5 with two."""

    name, took = "sensitivity", ("1 min", "2 min", "27 min")
    what = "real against estimated sensitivity, round by round: eight panels"
    title = "Real and estimated sensitivity, round by round (Section V-B)"

    def points(self, scope: Scope) -> list[Point]:
        points, models = [], [m for m in _KIND if m in scope.models]
        common = {"sensitivity": "paper", "sync_every": 5, "epochs": 2, "lr_step": 0, "tests": 0}
        for model, topology, layers in product(models, ("2-out", "exp"), ("1", "2")):
            options = common | _KIND[model] | _PANELS[model, layers]
            cell = paper_cell(topology=topology, certified=True, **options)
            cells = scope.seeded(cell, scope.seeds if model == "mlp" else scope.seeds[:1])
            points.append(Point((model, layers, topology), cells, rank=float(model != "mlp")))
        return points

    def write(self, results: Results, points: list[Point], scope: Scope, page: Page) -> None:
        table = Table(
            "panel | mean real | mean real, authors | peak real | peak real, authors | mean estimated | "
            "mean estimated, authors | peak estimated | peak estimated, authors | seeds"
        )
        checks = Table(
            "panel | rounds | real above estimated | of these right after a synchronisation | real above certified | "
            "mean certified / mean real | growth a round, predicted | growth, measured"
        )
        fig, axes = figure(len(points), columns=4)
        for axis, point in zip(axes, points, strict=True):
            name, found, cell = "-".join(point.labels), _done(results, point, "real"), point.cells[0]
            theirs, first = published.curve(name), results.get(cell)
            axis.plot(theirs.real, color="#bbbbbb", linewidth=2.5, label="real, authors")
            axis.plot(theirs.estimated, color="#f3c9a5", linewidth=2.5, label="estimated, authors")
            if first and first.get("real"):
                axis.plot(first["real"], color="black", linewidth=0.8, label="real")
                axis.plot(first["estimated"], color="#c05a00", linewidth=0.8, label="estimated (Remark 1)")
                axis.plot(first["certified"], color="#0057a8", linewidth=0.8, label="certified")
            axis.set(yscale="log", title=name + ("" if first else " (not run)"), xlabel="round")
            if not found:
                table.add(name, *("not run", "") * 4, 0)
                continue
            ours = [_mean_and_peak(r["real"], r["estimated"]) for r in found]
            both = zip(map(spread, zip(*ours, strict=True)), _mean_and_peak(*theirs), strict=True)
            table.add(name, *chain.from_iterable(both), len(found))
            noise = 2 * cell["c_prime"] * cell["noise_rate"] * found[0]["shared_parameters"] / cell["budget"]
            synchronised = sum(t % 5 == 0 for r in found for t in rounds_above(r))
            certified = sum(sum(r["certified"]) / sum(r["real"]) for r in found) / len(found)
            row = [sum(r["rounds"] for r in found), _above(found), synchronised, _above(found, "certified")]
            measured = spread([growth(r["estimated"], 5) for r in found])
            checks.add(name, *row, certified, cell["decay"] * (1 + noise), measured)
        axes[0].set_ylabel("sensitivity (L1)")
        axes[0].legend(fontsize=6)
        caption = "Sensitivity: ours (mean over seeds ± standard deviation) and the authors'"
        page.table("sensitivity", caption, table)
        page.table("checks", "Does the estimate hold, and how does it grow", checks)
        page.figure("sensitivity", fig)


def _mean_and_peak(real: list[float], estimated: list[float]) -> list[float]:
    return [sum(real) / len(real), max(real), sum(estimated) / len(estimated), max(estimated)]


def growth(estimated: list[float], period: int) -> float:
    """Geometric mean of S(t+1)/S(t) over the last rounds before synchronisations, where the noise dominates."""
    ratios = [b / a for t, (a, b) in enumerate(pairwise(estimated)) if t % period == period - 2]
    return float(prod(ratio ** (1 / len(ratios)) for ratio in ratios))


_LAYERS = {"1": 1, "2": 2, "all": 3}
_CONNECTIVITY: Options = {"model": "mlp-residual", "sensitivity": "paper", "c_prime": 0.95, "decay": 0.55}
_CONNECTIVITY |= {"clip": 200.0, "sync_every": 4, "lr_step": 0, "tests": 0}


class Factors(Experiment):
    """Section V-C, figure "RAS about partial communication and network connectivity": 1, 2, 3 shared layers, d = 2..10."""

    name, took = "factors", ("2 min", "13 min", "13 min")
    what = "mean real sensitivity against shared layers and connectivity: 27 points"
    title = "Mean real sensitivity against shared layers and connectivity (Section V-C)"

    def points(self, scope: Scope) -> list[Point]:
        def cell(shared: str, d: int) -> Cell:
            return paper_cell(shared=shared, topology=f"{d}-out", epochs=2, **_CONNECTIVITY)

        return [Point(place, scope.seeded(cell(*place))) for place in product(_LAYERS, range(2, 11))]

    def write(self, results: Results, points: list[Point], scope: Scope, page: Page) -> None:
        table = Table(
            "shared layers | d | RAS | authors | difference % | rounds | real above estimated | seeds"
        )
        ras: dict[tuple[str, int], float] = {}
        for point in points:
            (shared, d), found = point.labels, _done(results, point, "real")
            own = [mean_real(r) for r in found]
            ras[shared, d] = spread(own).mean
            theirs = published.FACTORS[d] if shared == "1" else None
            difference = 100 * (ras[shared, d] / theirs - 1) if theirs and own else None
            row = (_LAYERS[shared], d, spread(own) if own else "not run", theirs, difference)
            table.add(*row, sum(r["rounds"] for r in found), _above(found), len(found))
        caption = "Mean real sensitivity (RAS), ours (mean over seeds ± standard deviation) and the authors'"
        page.table("factors", caption, table)
        fig, (left, right) = figure(2, columns=2)
        degrees = sorted({d for _, d in ras})
        for d in degrees:
            left.plot(list(_LAYERS.values()), [ras[s, d] for s in _LAYERS], marker=".", label=f"d = {d}")
        for s, layers in _LAYERS.items():
            right.plot(degrees, [ras[s, d] for d in degrees], marker=".", label=f"{layers} shared")
        right.plot(
            *zip(*published.FACTORS.items(), strict=True), "k--", linewidth=0.8, label="1 shared, authors"
        )
        for axis, label in ((left, "shared layers"), (right, "d of d-Out")):
            axis.set(xlabel=label, ylabel="mean real sensitivity", yscale="log")
            axis.legend(fontsize=6)
        left.set_xticks(list(_LAYERS.values()))
        page.figure("factors", fig)


RESNET_ROUNDS = 10


class Scale(Experiment):
    """Section V-C, figure "RAS about network scale", and beyond it: do C' and lambda tuned at N = 10 carry over? The paper does
    not give the settings: the MLP takes those of the figure before it, ResNet-18 those of the sensitivity figure. Every MLP
    run has 120 rounds, whatever N, so that all are at the same stage of training; N = 1000 has 40 rounds and batch 50. Runs
    of ResNet-18 have 10 rounds."""

    name, took = "scale", ("1 min", "10 min", "14 min")
    what = "mean real sensitivity against network scale, up to 1000 nodes"
    title = "Mean real sensitivity against network scale (Section V-C), and up to 1000 nodes"

    def points(self, scope: Scope) -> list[Point]:
        full = scope.size == "full"
        few, large = ((10, 20, 30, 40, 50), (100, 300, 1000)) if full else ((10, 20, 50), ())
        places: list[tuple[str, int, int]] = [
            *product(("mlp",), few, (2, 4, 6, 8)),
            *product(("mlp",), large, (2, 8)),
        ]
        places += product(("resnet18",), (10, 20), (2, 8))
        return [Point(place, (self._cell(*place, scope),)) for place in places if place[0] in scope.models]

    @staticmethod
    def _cell(model: str, n: int, d: int, scope: Scope) -> Cell:
        options: Options = {"nodes": n, "topology": f"{d}-out", "seed": scope.seeds[0]}
        if model == "resnet18":
            options |= {"sensitivity": "paper", "sync_every": 5, "epochs": 1, "lr_step": 0, "tests": 0}
            options |= {"examples": RESNET_ROUNDS * n * 100, **_KIND[model], **_PANELS[model, "1"]}
            return scope.fit(paper_cell(**options))
        full = scope.size == "full"
        batch, rounds = (10, 60) if not full else (50, 40) if n == 1000 else (100, 120)
        epochs = max(1, rounds // ((60_000 if full else 10_000) // (n * batch)))
        options |= {"data": "mnist" if full else "mnist-mini", "epochs": epochs, "batch_size": batch}
        return paper_cell(**options, **_CONNECTIVITY)

    def write(self, results: Results, points: list[Point], scope: Scope, page: Page) -> None:
        table = Table(
            "model | N | d | rounds | RAS | RAS / RAS at N=10 | real above estimated | largest real / estimated"
        )
        lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
        for point in points:
            (model, n, d), result = point.labels, results.get(point.cells[0])
            ras = mean_real(result) if result else None
            if result is None or ras is None:
                table.add(model, n, d, "not run", *[None] * 4)
                continue
            line = lines.setdefault((model, d), [])
            line.append((n, ras))
            largest = max(r / e for r, e in zip(result["real"], result["estimated"], strict=True))
            table.add(model, n, d, result["rounds"], ras, ras / line[0][1], _above([result]), largest)
        page.table("scale", "Mean real sensitivity (RAS) by network scale, one seed", table)
        fig, axes = figure(2, columns=2)
        for axis, model in zip(axes, ("mlp", "resnet18"), strict=True):
            for (own, d), line in lines.items():
                if own == model:
                    axis.plot(*zip(*line, strict=True), marker=".", label=f"{d}-Out")
            axis.set(xlabel="N", ylabel="mean real sensitivity", xscale="log", title=model)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=6)
        page.figure("scale", fig)


PERIOD = {"mlp": 7, "resnet18": 5, "vit": 5}
_PERIODS = (0, 3, 4, 5, 6, 7, 8, 10)
_WHOLE_PERIODS = (1, 2, 3, 4, 7)
_BUDGETS = (3.0, 2.0, 1.0)
_ALGORITHMS: dict[str, Options] = {
    "PartPSP-1": {"shared": "1"},
    "PartPSP-2": {"shared": "2"},
    "SGPDP": {"algorithm": "sgpdp", "shared": "all"},
    "PEDFL": {"algorithm": "pedfl", "shared": "all"},
}
_UNITS: dict[str, tuple[tuple[float, ...], Options]] = {
    "record": ((1.0, 3.0, 8.0), {"lr_shared": 1.0, "lr_local": 1.0, "clip": 1.0}),
    "contribution": ((8.0, 100.0, 1000.0), {"clip": 30.0}),
}
"""The other units: total epsilons (delta 1e-5), and options."""
VIT_EXAMPLES = 4_000

Grid = Mapping[tuple[Any, ...], float]
"""Accuracies by (model, algorithm, b, topology)."""


class Accuracy(Experiment):
    """Section V-D, table "The Final Test Accuracy (%)": four algorithms, b = 1, 2, 3 and none, four graphs, three model/data
    pairs. The noise is calibrated to the real sensitivity, as in the paper. The synchronisation period is not in the paper;
    the study of periods compares several for the MLP. ResNet-18 and ViT start from random weights here (the authors' from
    pretrained ones) and run for two epochs, the ViT on a part of the data. PEDFL is our reading of it: no code was published."""

    name, took = "accuracy", ("5 min", "50 min", "8 h")
    what = "the big accuracy table, the study of synchronisation periods, the other units"
    title = "Final test accuracy (Section V-D), and the other units of privacy"

    def points(self, scope: Scope) -> list[Point]:
        """The MLP block, the study of periods, the other units, then the large models, the most informative cells first."""
        points = []
        every = product(scope.models, (*_BUDGETS, None), published.ALGORITHMS, published.TOPOLOGIES)
        for model, budget, algorithm, topology in every:
            first = topology == "exp" and algorithm in ("PartPSP-1", "SGPDP") and budget in (1.0, None)
            rank = 0 if model == "mlp" else 7 if not first else 5 if model == "resnet18" else 6
            labels = (model, algorithm, budget, topology)
            points.append(Point(labels, (_accuracy_cell(scope, *labels),), "accuracy", rank))
        return points + (list(self._study(scope)) if "mlp" in scope.models else [])

    @staticmethod
    def _study(scope: Scope) -> Iterator[Point]:
        """Of the MLP: other seeds, periods and clips of PartPSP-1 at b = 3, shorter periods of SGPDP, the other units."""

        def cell(topology: str, algorithm: str = "PartPSP-1", budget: float = 3.0, **changes: Any) -> Cell:
            return _accuracy_cell(scope, "mlp", algorithm, budget, topology, **changes)

        for topology in published.TOPOLOGIES:
            yield Point((topology,), tuple(cell(topology, seed=seed) for seed in scope.seeds), "seeds", 1)
            for period in _PERIODS:
                name = f"period {period}" if period else "never"
                near = abs(period - PERIOD["mlp"]) / 100
                yield Point((name, topology), (cell(topology, sync_every=period),), "periods", 2 + near)
            for clip in (100.0, 200.0):
                name = f"period 7, clip {clip:g}"
                yield Point((name, topology), (cell(topology, clip=clip),), "periods", 2)
        for period, budget in product(_WHOLE_PERIODS, _BUDGETS):
            name = f"period {period}"
            yield Point((name, budget), (cell("exp", "SGPDP", budget, sync_every=period),), "whole", 3)
        for unit, (epsilons, own) in _UNITS.items():
            for epsilon, topology in product(epsilons, published.TOPOLOGIES):
                options = {"unit": unit, "epsilon": epsilon, "budget": None, "sync_every": 0, **own}
                rank = 4 if epsilon == epsilons[1] else 4.5
                yield Point((unit, epsilon, topology), (cell(topology, **options),), "units", rank)

    def write(self, results: Results, points: list[Point], scope: Scope, page: Page) -> None:
        names = ("accuracy", "seeds", "periods", "whole", "units")
        parts = {name: [point for point in points if point.part == name] for name in names}
        table = Table("model | algorithm | b | topology | accuracy % | paper % | difference")
        ours: dict[tuple[Any, ...], float] = {}
        for point in sorted(parts["accuracy"], key=lambda p: (p.labels[0] != "mlp", p.labels[0])):
            (model, algorithm, budget, topology), shown = point.labels, _shown(results, point.cells[0])
            theirs, difference = _theirs(*point.labels), None
            if isinstance(shown, float):
                ours[point.labels], difference = shown, shown - theirs
            table.add(model, algorithm, budget or "none", topology, shown, theirs, difference)
        page.table("accuracy", "Final test accuracy, ours and the paper's, one seed", table)
        self._write_study(results, parts, page)
        caption = "The paper's claims, computed from its table and from ours (MLP block)"
        page.table("claims", caption, _claims(ours))
        page.figure("accuracy", self._draw(ours, results, parts["units"], scope))

    @staticmethod
    def _write_study(results: Results, parts: dict[str, list[Point]], page: Page) -> None:
        topologies = " | ".join(published.TOPOLOGIES)
        table = Table("topology | accuracy % | paper % | difference | seeds")
        theirs = dict(zip(published.TOPOLOGIES, published.ACCURACY["PartPSP-1", 3.0, "mlp"], strict=True))
        for point in parts["seeds"]:
            found = [r["accuracy"] for r in _done(results, point, "accuracy")]
            name, their = point.labels[0], theirs[point.labels[0]]
            shown = (spread(found), their, spread(found).mean - their) if found else ("not run", their, None)
            table.add(name, *shown, len(found))
        page.table("seeds", "PartPSP-1, b = 3, MLP: how much the seed matters", table)

        table = Table(f"synchronisation | {topologies} | mean absolute difference from the paper")
        table.add("paper (period not given)", *theirs.values(), None)
        for (name,), row in _rows(results, parts["periods"]).items():
            gaps = [abs(v - theirs[t]) for t, v in row.items() if isinstance(v, float)]
            table.add(name, *row.values(), sum(gaps) / len(gaps) if len(gaps) == len(theirs) else None)
        page.table("periods", "Which period fits the paper: PartPSP-1, b = 3, MLP, accuracy %", table)

        table = Table("synchronisation | b = 3 | b = 2 | b = 1")
        table.add("paper (period not given)", *(_theirs("mlp", "SGPDP", b, "exp") for b in _BUDGETS))
        for (name,), row in _rows(results, parts["whole"]).items():
            table.add(name, *row.values())
        page.table("whole", "SGPDP (all layers shared) under shorter periods: MLP, EXP, accuracy %", table)

        table = Table(f"unit | total epsilon | delta | {topologies}")
        for budget in _BUDGETS:
            labels = ("mlp", "PartPSP-1", budget)
            own = [results.get(p.cells[0], {}) for p in parts["accuracy"] if p.labels[:3] == labels]
            own += [{}] * (len(published.TOPOLOGIES) - len(own))
            spent = next((r["epsilon_sum"] for r in own if r.get("epsilon_sum")), None)
            table.add(f"node-swap, b = {budget:g} (paper)", spent, 0, *(r.get("accuracy") for r in own))
        for labels, row in _rows(results, parts["units"]).items():
            table.add(*labels, 1e-5, *row.values())
        page.table("units", "The other units on the same graphs: PartPSP-1, MLP, accuracy %", table)

    @staticmethod
    def _draw(ours: Grid, results: Results, units: list[Point], scope: Scope) -> Any:
        models = [m for m in scope.models if m in {labels[0] for labels in ours}] or ["mlp"]
        fig, axes = figure(len(models) * 4, columns=4)
        axis_of = dict(zip(product(models, published.TOPOLOGIES), axes, strict=True))
        ticks: dict[float | None, int] = {1.0: 1, 2.0: 2, 3.0: 3, None: 4}
        colours = dict(zip(published.ALGORITHMS, ("#0057a8", "#3fa34d", "#c05a00", "#7a4fa3"), strict=True))
        for (model, topology), axis in axis_of.items():
            for algorithm, colour in colours.items():
                places = {x: (model, algorithm, b, topology) for b, x in ticks.items()}
                theirs = [_theirs(*place) for place in places.values()]
                axis.plot(list(places), theirs, color=colour, linestyle=":", linewidth=1)
                if mine := [(x, ours[place]) for x, place in places.items() if place in ours]:
                    style: Options = {"color": colour, "marker": "o", "markersize": 3, "label": algorithm}
                    axis.plot(*zip(*mine, strict=True), **style)
            axis.set_xticks([1, 2, 3, 4], ["b=1", "2", "3", "none"])
            axis.set_title(f"{model}, {topology}")
        for point in units:  # at their middle epsilon, as level lines
            (unit, epsilon, topology), shown = point.labels, _shown(results, point.cells[0])
            level = axis_of.get(("mlp", topology))
            if level is not None and epsilon == _UNITS[unit][0][1] and isinstance(shown, float):
                dashes, label = "--" if unit == "record" else "-.", f"{unit}, ε={epsilon:g}"
                level.axhline(shown, color="black", linewidth=0.8, linestyle=dashes, label=label)
        axes[0].set_ylabel("accuracy % (dotted: paper)")
        if axes[0].get_legend_handles_labels()[0]:
            axes[0].legend(fontsize=5)
        return fig


def _accuracy_cell(
    scope: Scope, model: str, algorithm: str, budget: float | None, topology: str, **changes: Any
) -> Cell:
    """ResNet-18 and ViT: two epochs; with noise, gradients clipped as in the sensitivity figure."""
    options: Options = {"model": model, "data": published.PAIRS[model], "topology": topology}
    options |= {"sync_every": PERIOD[model], "seed": scope.seeds[0], **_ALGORITHMS[algorithm]}
    options |= {"unit": "none", "budget": None} if budget is None else {"budget": budget}
    if model != "mlp":
        options |= {"epochs": 2, "lr_step": 0, "clip": None if budget is None else 100.0}
    if model == "vit":
        options |= {"examples": VIT_EXAMPLES, "tests": 1000}
    return scope.fit(paper_cell(**options | changes))


def _theirs(model: str, algorithm: str, budget: float | None, topology: str) -> float:
    return published.ACCURACY[algorithm, budget, model][published.TOPOLOGIES.index(topology)]


def _rows(results: Results, points: list[Point]) -> dict[tuple[Any, ...], dict[Any, float | str]]:
    """Accuracies by all labels but the last, then by the last."""
    rows: dict[tuple[Any, ...], dict[Any, float | str]] = {}
    for point in points:
        rows.setdefault(point.labels[:-1], {})[point.labels[-1]] = _shown(results, point.cells[0])
    return rows


def _claims(ours: Grid) -> Table:
    table = Table("claim | paper says | from the paper's table | from ours (MLP)")
    mlp = {labels: v for labels, v in ours.items() if labels[0] == "mlp" and labels[2]}
    grids = (published_grid(), mlp)
    for (first, second), said in published.CLAIMED_IMPROVEMENT.items():
        claim = f"average accuracy of {first} over {second}, relative %"
        table.add(claim, said, *(improvement(grid, first, second) for grid in grids))
    table.add("private cells won by PartPSP-1", f"{published.CLAIMED_WINS} of 36", *map(wins, grids))
    return table


def published_grid() -> Grid:
    """The paper's private cells."""
    private = [(m, a, b) for a, b, m in published.ACCURACY if b is not None]
    return {(*place, t): _theirs(*place, t) for place in private for t in published.TOPOLOGIES}


def improvement(grid: Grid, first: str, second: str) -> float | None:
    """Relative difference of the two algorithms' averages, percent."""
    a, b = ([v for labels, v in grid.items() if labels[1] == name] for name in (first, second))
    return 100 * (sum(a) / sum(b) - 1) if a and len(a) == len(b) else None


def wins(grid: Grid) -> str:
    """In how many (model, b, topology) PartPSP-1 is ahead of all others."""
    best: dict[tuple[Any, ...], tuple[float, str]] = {}
    for (model, algorithm, *place), value in grid.items():
        here = (model, *place)
        best[here] = max(best.get(here, (-1.0, "")), (value, algorithm))
    return f"{[name for _, name in best.values()].count('PartPSP-1')} of {len(best)}"


_NOISE = {
    "real": ("oracle", "real", "#777777"),
    "paper": ("paper", "estimated (Remark 1)", "#c05a00"),
    "certified": ("certified", "certified", "#0057a8"),
}
_TUNED = {
    ("mlp", "1"): (0.85, 0.55),
    ("mlp", "2"): (0.82, 0.62),
    ("resnet18", "1"): (0.86, 0.53),
    ("resnet18", "2"): (0.78, 0.7),
}
"""C' and lambda, as in the authors' logs."""


class RealVsEstimated(Experiment):
    """Appendix, table "Performance Comparison: PartPSP-Real vs PartPSP-Esti", and the certified bound as a third kind of noise."""

    name, took = "real-vs-estimated", ("1 min", "11 min", "60 min")
    what = "accuracy with noise by the real and by the estimated sensitivity"
    title = "Noise by the real against the estimated sensitivity (appendix)"

    def points(self, scope: Scope) -> list[Point]:
        rows = [*product(("mlp", "resnet18"), ("real", "paper"), ("1", "2"))]
        rows += product(("mlp",), ("certified",), ("1", "2"))
        points = []
        for (model, noise, shared), topology in product(rows, ("2-out", "exp")):
            if model not in scope.models:
                continue
            c_prime, decay = _TUNED[model, shared]
            options: Options = {"model": model, "data": published.PAIRS[model], "shared": shared}
            options |= {"topology": topology, "sensitivity": _NOISE[noise][0], "sync_every": 5}
            options |= {} if model == "mlp" else {"epochs": 2, "lr_step": 0, "clip": 100.0}
            cell = paper_cell(c_prime=c_prime, decay=decay, **options)
            seeds = scope.seeds if model == "mlp" and noise != "certified" else scope.seeds[:1]
            rank = 0 if model == "mlp" else 1 if (shared, topology) == ("1", "exp") else 2
            points.append(Point((noise, shared, model, topology), scope.seeded(cell, seeds), rank=rank))
        return points

    def write(self, results: Results, points: list[Point], scope: Scope, page: Page) -> None:
        table = Table(
            "model | noise by | shared | topology | accuracy % | paper % | difference | RAS | "
            "RAS, authors | rounds | real above estimated | seeds"
        )
        fig, (axis,) = figure(1, columns=1)
        labels: list[str] = []
        for point in points:
            (noise, shared, model, topology), found = point.labels, _done(results, point, "accuracy")
            place, k = (noise, shared, model), ("2-out", "exp").index(topology)
            theirs = published.REAL_VS_ESTIMATED.get(place, (None, None))[k]
            log = published.REAL_VS_ESTIMATED_RAS.get(place, (None, None))[k]
            row = [model, _NOISE[noise][1], shared, topology]
            if not found:
                table.add(*row, "not run", theirs, *[None] * 6)
                continue
            accuracy = spread([r["accuracy"] for r in found])
            row += [accuracy, theirs, None if theirs is None else accuracy.mean - theirs]
            row += [spread([mean_real(r) for r in found]), log, sum(r["rounds"] for r in found)]
            table.add(*row, None if noise == "real" else _above(found), len(found))
            x = len(labels)
            labels.append(f"{model} {shared}\n{topology}\n{noise}")
            axis.bar(x, accuracy.mean, color=_NOISE[noise][2])
            if theirs is not None:
                axis.plot([x - 0.4, x + 0.4], [theirs] * 2, color="black")
        caption = "Accuracy and mean real sensitivity (mean over seeds ± standard deviation)"
        page.table("real-vs-estimated", caption, table)
        axis.set_xticks(range(len(labels)), labels, fontsize=6)
        axis.set_ylabel("accuracy % (line: paper)")
        page.figure("real-vs-estimated", fig)


_TIMED_ROUNDS = {"mlp": 60, "resnet18": 2, "vit": 2}
_PLANNED = {"mlp": 720, "resnet18": 720, "vit": 600}
"""Rounds of 12 epochs, as the paper trained."""
_PRIVATE = {"budget": 3.0, "sensitivity": "certified", "clip": 100.0}
_TIMED: dict[str, Options] = {
    "SGP": {"algorithm": "sgp", "shared": "all", "unit": "none", "budget": None},
    "SGPDP": {"algorithm": "sgpdp", "shared": "all", **_PRIVATE},
    "PartPSP-1": {"shared": "1", **_PRIVATE},
}


class Time(Experiment):
    """Appendix, table "The Time Cost Experiments of PartPSP": computation measured here, communication computed from the bytes.
    Computation is the processor time of a few rounds on EXP, per node: gradients, sensitivity estimate, noise and averaging.
    It hardly depends on the graph. Communication is what a node's messages of a round take at the bandwidth. The paper's
    computation ran on a GPU, ours on one core of a processor: ratios are what can be compared."""

    name, took = "time", ("1 min", "1 min", "4 min")
    what = "computation and communication of SGP, SGPDP and PartPSP-1"
    title = "Time cost (appendix): computation, and communication at a bandwidth"

    def points(self, scope: Scope) -> list[Point]:
        """Model by model, so that the three algorithms are measured soon after each other."""
        points = []
        for model, algorithm in product(scope.models, _TIMED):
            # 60 rounds of growing noise would overflow, two do not
            options = {"model": model, "sync_every": 5 if model == "mlp" else 0, "epochs": 1, "lr_step": 0}
            options |= {"data": published.PAIRS[model], "seed": scope.seeds[0], "track_real": False}
            options |= {"tests": 0, "examples": _TIMED_ROUNDS[model] * 1000, **_TIMED[algorithm]}
            points.append(Point((model, algorithm), (scope.fit(paper_cell(**options)),)))
        return points

    def write(self, results: Results, points: list[Point], scope: Scope, page: Page) -> None:
        table = Table(
            "model | algorithm | topology | computation s a round | communication s a round | "
            "12 epochs s | paper s | ratio to SGP | communication ratio | paper's ratio"
        )
        times = {
            (*point.labels, topology): _times(results, point.cells[0], topology, scope.bandwidth)
            for point in points
            for topology in published.TOPOLOGIES
        }
        ratios: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for model, (k, topology), algorithm in product(scope.models, enumerate(published.TOPOLOGIES), _TIMED):
            own, base = times[model, algorithm, topology], times[model, "SGP", topology]
            theirs = published.TIME[algorithm, model][k]
            their_ratio, ratio = theirs / published.TIME["SGP", model][k], float("nan")
            row = (model, algorithm, topology)
            if own is None or base is None:
                table.add(*row, "not run", None, None, theirs, None, None, their_ratio)
            else:
                ratio = sum(own) / sum(base)
                total = sum(own) * _PLANNED[model]
                table.add(*row, *own, total, theirs, ratio, own[1] / base[1], their_ratio)
            ratios.setdefault((model, algorithm), []).append((ratio, their_ratio))
        page.table("time", f"Time of a node, at {scope.bandwidth / 1e9:g} Gbps", table)
        fig, axes = figure(len(scope.models), columns=3)
        for axis, model in zip(axes, scope.models, strict=True):
            for colour, algorithm in zip(("#777777", "#c05a00", "#0057a8"), _TIMED, strict=True):
                ours, paper = zip(*ratios[model, algorithm], strict=True)
                axis.plot(published.TOPOLOGIES, ours, color=colour, marker="o", label=algorithm)
                axis.plot(published.TOPOLOGIES, paper, color=colour, linestyle=":")
            axis.set(title=model, ylabel="time / time of SGP (dotted: paper)")
        axes[0].legend(fontsize=6)
        page.figure("time", fig)


def _times(results: Results, cell: Cell, topology: str, bandwidth: float) -> tuple[float, float] | None:
    """Seconds of one node's round: computation, communication."""
    result = results.get(cell)
    if result is None or "seconds" not in result:
        return None
    computation = result["seconds"]["processor"] / (result["rounds"] * cell["nodes"])
    private = cell["unit"] != "none"
    sent = bytes_of_round(result["shared_parameters"], topology, cell["nodes"], scalar=private)
    return computation, 8 * sent / bandwidth


def bytes_of_round(parameters: int, topology: str, nodes: int, *, scalar: bool) -> int:
    """What one node sends: its row (4 bytes a number) and a (8) to every peer, and the scalar S_i to everybody."""
    peers = int(parse(topology, nodes).weights(0).out_degree.max())
    return peers * (4 * parameters + 8) + (8 * (nodes - 1) if scalar else 0)


EXPERIMENTS: dict[str, Experiment] = {
    kind.name: kind() for kind in (Sensitivity, Factors, Scale, Accuracy, RealVsEstimated, Time)
}
"""`took` was measured on 2 cores of an AMD EPYC (virtual machine), no GPU, 15 November 2026. Times of --models mlp were measured
while other jobs used the machine (accuracy and scale: scaled up from the four fifths and more that ran); the others follow from
the processor time of their rounds."""
