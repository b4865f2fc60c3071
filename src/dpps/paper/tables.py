"""Every table and figure of the paper whose numbers come from training runs: what is run, and how it is laid beside the published numbers.

An `Experiment` declares its points, each with a cell for every seed. `cells` puts them in the order in which they are run: what
tells most comes first, and the first seed of everything before the second.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

from dpps.errors import UsageError, unknown
from dpps.learning import ALGORITHMS
from dpps.paper import published
from dpps.paper.pages import Page, Spread, Table, figure, mean, spread
from dpps.paper.runner import Cell, Result, Store, mean_real, rounds_above
from dpps.topology import parse

SEEDS = (2024, 2025, 2026)
MODELS = ("mlp", "resnet18", "vit")
AUTHORS: dict[str, Any] = {
    "data": "mnist",
    "unit": "node-swap",
    "sensitivity": "oracle",
    "budget": 5.0,
    "epochs": 12,
    "batch_size": 100,
    "lr_shared": 0.1,
    "lr_local": 0.1,
    "lr_step": 5,
    "seed": SEEDS[0],
}
"""The authors' settings, where a table says nothing else: also N = 10, EXP, gamma_n = 0.001."""


def paper_cell(**options: Any) -> Cell:
    """A run with the authors' settings but for these. The real sensitivity is recorded where it is not used anyway."""
    cell = Cell.of(**AUTHORS | options)
    used_anyway = cell["sensitivity"] == "oracle" or ALGORITHMS[cell["algorithm"]].own_sensitivity
    tracked = cell["unit"] == "node-swap" and not used_anyway
    return cell.but(track_real=options.get("track_real", tracked))


@dataclass(frozen=True)
class Scope:
    """How much is asked for. full: as in the paper. quick: minutes, on the embedded data set. smallest: seconds, to see that it works."""

    size: Literal["full", "quick", "smallest"] = "full"
    seeds: Sequence[int] = SEEDS
    models: Sequence[str] = MODELS
    bandwidth: float = 1e9
    """Bits a second."""

    def __post_init__(self) -> None:
        for model in self.models:
            if model not in MODELS:
                raise unknown("model", model, MODELS)
        if not self.seeds:
            raise UsageError("--seeds is 0: it must be 1 or more")
        if not 0 < self.bandwidth < float("inf"):
            raise UsageError(f"--bandwidth is {self.bandwidth}: it must be positive, in bits a second")

    @property
    def mark(self) -> str:
        """What must be said wherever numbers of this size stand compared with the authors'; nothing of the full one."""
        return (
            "" if self.size == "full" else f"{self.size} run on mnist-mini, not the paper's data and rounds"
        )

    def fit(self, cell: Cell) -> Cell:
        """The cell at this size. A quick one has as many rounds as a full one of two epochs, on the embedded data."""
        if self.size == "full":
            return cell
        small = cell.but(data="mnist-mini")
        if self.size == "smallest":
            return small.but(batch_size=5, tests=20, epochs=1, examples=10 * cell["nodes"])
        if cell["model"].startswith("mlp"):
            return small.but(epochs=12)
        few = 3 * cell["nodes"] * cell["batch_size"]
        return small.but(epochs=1, examples=few, tests=0 if cell.tests == 0 else 200)


@dataclass(frozen=True)
class Point:
    """A row of a table or a point of a figure, and the runs behind it.

    Attributes:
        labels: what it is called.
        cells: one for each seed.
        part: which table of the experiment it belongs to.
        rank: points of a smaller rank are run first.
    """

    labels: tuple[Any, ...]
    cells: tuple[Cell, ...]
    part: str = ""
    rank: float = 0


Results = Mapping[Cell, Result]


@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    Attributes:
        name: what `dpps paper` calls it.
        what: what it is, in a line.
        title: of its page.
        about: what a reader must know of its settings.
        took: how long it takes: --quick, --models mlp, everything.
        points: what is run.
        write: lays results beside the published numbers.
    """

    name: str
    what: str
    title: str
    about: str
    took: tuple[str, str, str]
    points: Callable[[Scope], list[Point]]
    write: Callable[[Results, list[Point], Scope, Page], None]

    def cells(self, scope: Scope) -> list[Cell]:
        """All runs, in the order in which they are begun."""
        ranked = [(p.rank, k, cell) for p in self.points(scope) for k, cell in enumerate(p.cells)]
        return list(dict.fromkeys(cell for *_, cell in sorted(ranked, key=lambda entry: entry[:2])))

    def page(self, store: Store, scope: Scope, out: Path, notes: Sequence[str] = ()) -> Path:
        """The page of the results that are there."""
        cells = self.cells(scope)
        results = store.all(cells)
        ran = f"{len(results)} of {len(cells)} cells run; seeds {', '.join(map(str, scope.seeds))}"
        page = Page(out / self.name, self.title, ["; ".join((ran, *notes)), self.about], scope.mark)
        self.write(results, self.points(scope), scope, page)
        return page.save()


def _done(results: Results, point: Point, needs: str) -> list[Result]:
    """The runs of a point that have this to show: "real" or "accuracy"."""
    found = (results.get(cell) for cell in point.cells)
    return [r for r in found if r and r.get(needs) not in (None, [])]


def _accuracies(results: Results, point: Point) -> list[float]:
    return [r["accuracy"] for r in _done(results, point, "accuracy")]


def _shown(results: Results, cell: Cell) -> float | str:
    """The accuracy of one run, or why there is none."""
    if cell not in results:
        return "not run"
    accuracy: float | None = results[cell]["accuracy"]
    return "broke off" if accuracy is None else accuracy


# Section V-B, figure "Comparison of Real Sensitivity and Estimated Sensitivity"

_PANELS: dict[tuple[str, str], dict[str, Any]] = {
    ("mlp", "1"): {"shared": "1", "c_prime": 0.78, "decay": 0.55},
    ("mlp", "2"): {"shared": "2", "c_prime": 0.78, "decay": 0.62},
    ("resnet18", "1"): {"shared": "conv1,bn1", "c_prime": 0.86, "decay": 0.53},
    ("resnet18", "2"): {"shared": "conv1,bn1,layer1", "c_prime": 0.78, "decay": 0.7, "lr_shared": 1e-5},
}
_KIND: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp-residual"},
    "resnet18": {"model": "resnet18", "data": "fashion-mnist", "clip": 100.0},
}


def _sensitivity_points(scope: Scope) -> list[Point]:
    points = []
    models = [m for m in _KIND if m in scope.models]
    for model, topology, layers in product(models, ("2-out", "exp"), ("1", "2")):
        common = {"sensitivity": "paper", "sync_every": 5, "epochs": 2, "lr_step": 0, "tests": 0}
        cell = paper_cell(topology=topology, certified=True, **common | _KIND[model] | _PANELS[model, layers])
        seeds = scope.seeds if model == "mlp" else scope.seeds[:1]
        cells = tuple(scope.fit(cell.but(seed=seed)) for seed in seeds)
        points.append(Point((model, layers, topology), cells, rank=float(model != "mlp")))
    return points


def _write_sensitivity(results: Results, points: list[Point], scope: Scope, page: Page) -> None:
    columns = ("mean real", "peak real", "mean estimated", "peak estimated")
    table = Table(
        " | ".join(("panel", *(f"{c}{who}" for c in columns for who in ("", ", authors")), "seeds"))
    )
    checks = Table(
        "panel | rounds | real above estimated | of these right after a synchronisation | "
        "real above certified | mean certified / mean real | growth a round, predicted | "
        "growth, measured"
    )
    fig, axes = figure(len(points), columns=4)
    for axis, point in zip(axes, points, strict=True):
        name, found = "-".join(point.labels), _done(results, point, "real")
        theirs = published.curve(name)
        _draw_panel(axis, name, theirs, results.get(point.cells[0]))
        if not found:
            table.add(name, *("not run", "") * 4, 0)
            continue
        ours = [_mean_and_peak(r["real"], r["estimated"]) for r in found]
        numbers = zip(zip(*ours, strict=True), _mean_and_peak(theirs.real, theirs.estimated), strict=True)
        table.add(name, *(value for four, their in numbers for value in (spread(four), their)), len(found))
        checks.add(name, *_growth_checks(point.cells[0], found))
    axes[0].set_ylabel("sensitivity (L1)")
    axes[0].legend(fontsize=6)
    page.table("sensitivity", "Sensitivity: ours (mean over seeds ± deviation) beside the authors'", table)
    page.table("checks", "Does the estimate hold, and how does it grow", checks)
    page.figure("sensitivity", fig)


def _mean_and_peak(real: list[float], estimated: list[float]) -> list[float]:
    return [sum(real) / len(real), max(real), sum(estimated) / len(estimated), max(estimated)]


def _growth_checks(cell: Cell, found: list[Result]) -> list[object]:
    above = [rounds_above(r) for r in found]
    predicted = cell["decay"] * (
        1 + 2 * cell["c_prime"] * cell["noise_rate"] * found[0]["shared_parameters"] / cell["budget"]
    )
    return [
        sum(r["rounds"] for r in found),
        sum(map(len, above)),
        sum(t % 5 == 0 for ts in above for t in ts),
        sum(len(rounds_above(r, "certified")) for r in found),
        sum(sum(r["certified"]) / sum(r["real"]) for r in found) / len(found),
        predicted,
        spread([growth(r["estimated"], 5) for r in found]),
    ]


def growth(estimated: list[float], period: int) -> float:
    """Geometric mean of S(t+1)/S(t) over the later rounds between synchronisations, when the noise leads."""
    ratios = [b / a for t, (a, b) in enumerate(pairwise(estimated)) if t % period == period - 2]
    product_ = 1.0
    for ratio in ratios:
        product_ *= ratio ** (1 / len(ratios))
    return product_


def _draw_panel(axis: Any, name: str, theirs: published.Curve, ours: Result | None) -> None:
    axis.plot(theirs.real, color="#bbbbbb", linewidth=2.5, label="real, authors")
    axis.plot(theirs.estimated, color="#f3c9a5", linewidth=2.5, label="estimated, authors")
    if ours and ours.get("real"):
        axis.plot(ours["real"], color="black", linewidth=0.8, label="real")
        axis.plot(ours["estimated"], color="#c05a00", linewidth=0.8, label="estimated (Remark 1)")
        axis.plot(ours["certified"], color="#0057a8", linewidth=0.8, label="certified")
    axis.set(yscale="log", title=name + ("" if ours else " (not run)"), xlabel="round")


# Section V-C, figures "RAS about partial communication and network connectivity" and "RAS about network scale"

_LAYERS = {"1": 1, "2": 2, "all": 3}
_CONNECTIVITY: dict[str, Any] = {
    "model": "mlp-residual",
    "sensitivity": "paper",
    "c_prime": 0.95,
    "decay": 0.55,
    "clip": 200.0,
    "sync_every": 4,
    "lr_step": 0,
    "tests": 0,
}


def _factors_points(scope: Scope) -> list[Point]:
    degrees = (2, 10) if scope.size == "smallest" else range(2, 11)
    points = []
    for shared, d in product(_LAYERS, degrees):
        cell = paper_cell(shared=shared, topology=f"{d}-out", epochs=2, **_CONNECTIVITY)
        points.append(Point((shared, d), tuple(scope.fit(cell.but(seed=seed)) for seed in scope.seeds)))
    return points


def _write_factors(results: Results, points: list[Point], scope: Scope, page: Page) -> None:
    table = Table("shared layers | d | RAS | authors | difference % | rounds | real above estimated | seeds")
    ras: dict[tuple[str, int], float] = {}
    for point in points:
        (shared, d), found = point.labels, _done(results, point, "real")
        own = [mean_real(r) for r in found]
        ras[shared, d] = mean(own)
        theirs = published.FACTORS[d] if shared == "1" else None
        difference = 100 * (mean(own) / theirs - 1) if theirs and own else None
        rounds, above = sum(r["rounds"] for r in found), sum(len(rounds_above(r)) for r in found)
        shown = spread(own) if own else "not run"
        table.add(_LAYERS[shared], d, shown, theirs, difference, rounds, above, len(found))
    page.table(
        "factors",
        "Mean real sensitivity (RAS), ours (mean over seeds ± deviation) beside the authors'",
        table,
    )
    fig, (left, right) = figure(2, columns=2)
    degrees = sorted({d for _, d in ras})
    for d in degrees:
        left.plot(list(_LAYERS.values()), [ras[s, d] for s in _LAYERS], marker=".", label=f"d = {d}")
    for s, layers in _LAYERS.items():
        right.plot(degrees, [ras[s, d] for d in degrees], marker=".", label=f"{layers} shared")
    theirs_line = (list(published.FACTORS), list(published.FACTORS.values()))
    right.plot(*theirs_line, "k--", linewidth=0.8, label="1 shared, authors")
    for axis, label in ((left, "shared layers"), (right, "d of d-Out")):
        axis.set(xlabel=label, ylabel="mean real sensitivity", yscale="log")
        axis.legend(fontsize=6)
    left.set_xticks(list(_LAYERS.values()))
    page.figure("factors", fig)


RESNET_ROUNDS = 10


def _scale_points(scope: Scope) -> list[Point]:
    few = {"full": (10, 20, 30, 40, 50), "quick": (10, 20, 50), "smallest": (10,)}[scope.size]
    degrees = (2,) if scope.size == "smallest" else (2, 4, 6, 8)
    places = [("mlp", n, d) for n, d in product(few, degrees)]
    places += [("mlp", n, d) for n, d in product((100, 300, 1000) if scope.size == "full" else (), (2, 8))]
    places += [("resnet18", n, d) for n, d in product((10, 20), (2, 8))]
    return [
        Point((model, n, d), ((_mlp if model == "mlp" else _resnet)(n, d, scope),))
        for model, n, d in places
        if model in scope.models
    ]


def _mlp(n: int, d: int, scope: Scope) -> Cell:
    full = scope.size == "full"
    batch, rounds = (10, 60) if not full else (50, 40) if n == 1000 else (100, 120)
    per_epoch = (60_000 if full else 10_000) // (n * batch)
    cell = paper_cell(
        data="mnist" if full else "mnist-mini",
        nodes=n,
        topology=f"{d}-out",
        epochs=max(1, rounds // per_epoch),
        batch_size=batch,
        seed=scope.seeds[0],
        **_CONNECTIVITY,
    )
    return scope.fit(cell) if scope.size == "smallest" else cell


def _resnet(n: int, d: int, scope: Scope) -> Cell:
    cell = paper_cell(nodes=n, topology=f"{d}-out", sensitivity="paper", sync_every=5, epochs=1, lr_step=0)
    cell = cell.but(**_KIND["resnet18"] | _PANELS["resnet18", "1"])
    return scope.fit(cell.but(tests=0, seed=scope.seeds[0], examples=RESNET_ROUNDS * n * 100))


def _write_scale(results: Results, points: list[Point], scope: Scope, page: Page) -> None:
    table = Table(
        "model | N | d | rounds | RAS | RAS / RAS at N=10 | real above estimated | largest real / estimated"
    )
    base: dict[tuple[str, int], float] = {}
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for point in points:
        (model, n, d), result = point.labels, results.get(point.cells[0])
        ras = mean_real(result) if result else None
        if result is None or ras is None:
            table.add(model, n, d, "not run", *[None] * 4)
            continue
        lines.setdefault((model, d), []).append((n, ras))
        ratio = ras / base.setdefault((model, d), ras)
        largest = max(r / e for r, e in zip(result["real"], result["estimated"], strict=True))
        table.add(model, n, d, result["rounds"], ras, ratio, len(rounds_above(result)), largest)
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


# Section V-D, table "The Final Test Accuracy (%)"

_TOPOLOGIES = " | ".join(published.TOPOLOGIES)
PERIOD = {"mlp": 7, "resnet18": 5, "vit": 5}
_PERIODS = (0, 3, 4, 5, 6, 7, 8, 10)
_WHOLE_PERIODS = (1, 2, 3, 4, 7)
_BUDGETS: tuple[float | None, ...] = (3.0, 2.0, 1.0, None)
_ALGORITHMS: dict[str, dict[str, Any]] = {
    "PartPSP-1": {"shared": "1"},
    "PartPSP-2": {"shared": "2"},
    "SGPDP": {"algorithm": "sgpdp", "shared": "all"},
    "PEDFL": {"algorithm": "pedfl", "shared": "all"},
}
_UNITS = {"record": (1.0, 3.0, 8.0), "contribution": (8.0, 100.0, 1000.0)}
"""The other units: what is protected, and the total epsilon (delta 1e-5)."""
_OF_UNIT: dict[str, dict[str, Any]] = {
    "record": {"lr_shared": 1.0, "lr_local": 1.0, "clip": 1.0},
    "contribution": {"clip": 30.0},
}
VIT_EXAMPLES = 4_000


def _accuracy_cell(
    scope: Scope, model: str, algorithm: str, budget: float | None, topology: str, **changes: Any
) -> Cell:
    """ResNet-18 and ViT: two epochs; with noise, gradients clipped as in the sensitivity figure."""
    options: dict[str, Any] = {"model": model, "data": published.PAIRS[model], "topology": topology}
    options |= {"sync_every": PERIOD[model], "seed": scope.seeds[0], **_ALGORITHMS[algorithm]}
    options |= {"unit": "none", "budget": None} if budget is None else {"budget": budget}
    if model != "mlp":
        options |= {"epochs": 2, "lr_step": 0, "clip": None if budget is None else 100.0}
    if model == "vit":
        options |= {"examples": VIT_EXAMPLES, "tests": 1000}
    return scope.fit(paper_cell(**options | changes))


def _theirs(model: str, algorithm: str, budget: float | None, topology: str) -> float:
    return published.ACCURACY[algorithm, budget, model][published.TOPOLOGIES.index(topology)]


def _accuracy_points(scope: Scope) -> list[Point]:
    """The MLP block, the study of periods, the other units, then the large models, most telling first."""
    points = []
    every = product(scope.models, _BUDGETS, published.ALGORITHMS, published.TOPOLOGIES)
    for model, budget, algorithm, topology in every:
        telling = topology == "exp" and algorithm in ("PartPSP-1", "SGPDP") and budget in (1.0, None)
        rank = 0 if model == "mlp" else 7 if not telling else 5 if model == "resnet18" else 6
        labels = (model, algorithm, budget, topology)
        points.append(Point(labels, (_accuracy_cell(scope, *labels),), "accuracy", rank))
    if scope.size == "smallest":
        return [point for point in points if point.labels[3] == "exp"]
    return points + (list(_study(scope)) if "mlp" in scope.models else [])


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
            yield Point((f"period 7, clip {clip:g}", topology), (cell(topology, clip=clip),), "periods", 2)
    for period, budget in product(_WHOLE_PERIODS, _BUDGETS[:3]):
        assert budget is not None
        yield Point((period, budget), (cell("exp", "SGPDP", budget, sync_every=period),), "whole", 3)
    for unit, epsilons in _UNITS.items():
        for epsilon, topology in product(epsilons, published.TOPOLOGIES):
            own = {"unit": unit, "epsilon": epsilon, "budget": None, "sync_every": 0, **_OF_UNIT[unit]}
            rank = 4 if epsilon == epsilons[1] else 4.5
            yield Point((unit, epsilon, topology), (cell(topology, **own),), "units", rank)


def _write_accuracy(results: Results, points: list[Point], scope: Scope, page: Page) -> None:
    parts: dict[str, list[Point]] = {name: [] for name in ("accuracy", "seeds", "periods", "whole", "units")}
    for point in points:
        parts[point.part].append(point)
    table = Table("model | algorithm | b | topology | accuracy % | paper % | difference")
    ours: dict[tuple[Any, ...], float] = {}
    for point in sorted(parts["accuracy"], key=lambda p: (p.labels[0] != "mlp", p.labels[0])):
        (model, algorithm, budget, topology), shown = point.labels, _shown(results, point.cells[0])
        theirs, difference = _theirs(*point.labels), None
        if isinstance(shown, float):
            ours[point.labels], difference = shown, shown - theirs
        table.add(model, algorithm, budget or "none", topology, shown, theirs, difference)
    page.table("accuracy", "Final test accuracy, ours beside the paper's, one seed", table)
    _write_seeds(results, parts["seeds"], page)
    _write_periods(results, parts["periods"], page)
    _write_whole(results, parts["whole"], page)
    _write_units(results, parts["accuracy"], parts["units"], page)
    page.table(
        "claims", "The paper's claims, computed from its table and from ours (MLP block)", _claims(ours)
    )
    page.figure("accuracy", _draw_accuracy(ours, results, parts["units"], scope))


def _write_seeds(results: Results, points: list[Point], page: Page) -> None:
    table = Table("topology | accuracy % | paper % | difference | seeds")
    for point in points:
        found, theirs = _accuracies(results, point), _theirs("mlp", "PartPSP-1", 3.0, point.labels[0])
        shown: Spread | str = spread(found) if found else "not run"
        table.add(point.labels[0], shown, theirs, mean(found) - theirs if found else None, len(found))
    page.table("seeds", "PartPSP-1, b = 3, MLP: how much the seed matters", table)


def _write_periods(results: Results, points: list[Point], page: Page) -> None:
    table = Table(f"synchronisation | {_TOPOLOGIES} | mean absolute difference from the paper")
    theirs = dict(zip(published.TOPOLOGIES, published.ACCURACY["PartPSP-1", 3.0, "mlp"], strict=True))
    table.add("paper (period not given)", *theirs.values(), None)
    for name, row in _rows(results, points).items():
        gaps = [abs(v - theirs[t]) for t, v in row.items() if isinstance(v, float)]
        fit = sum(gaps) / len(gaps) if len(gaps) == len(theirs) else None
        table.add(name, *row.values(), fit)
    page.table("periods", "Which period fits the paper: PartPSP-1, b = 3, MLP, accuracy %", table)


def _write_whole(results: Results, points: list[Point], page: Page) -> None:
    budgets = _BUDGETS[:3]
    table = Table("synchronisation | b = 3 | b = 2 | b = 1")
    table.add("paper (period not given)", *(_theirs("mlp", "SGPDP", b, "exp") for b in budgets))
    for period, row in _rows(results, points).items():
        table.add(f"period {period}", *row.values())
    page.table("whole", "SGPDP (all layers shared) under shorter periods: MLP, EXP, accuracy %", table)


def _rows(results: Results, points: list[Point]) -> dict[Any, dict[Any, float | str]]:
    """By the first label, then by the last: the rows of which something was run."""
    rows: dict[Any, dict[Any, float | str]] = {}
    for point in points:
        rows.setdefault(point.labels[:-1], {})[point.labels[-1]] = _shown(results, point.cells[0])
    return {k[0]: row for k, row in rows.items() if set(row.values()) != {"not run"}}


def _write_units(results: Results, main: list[Point], points: list[Point], page: Page) -> None:
    table = Table(f"unit | total epsilon | delta | {_TOPOLOGIES}")
    for budget in _BUDGETS[:3]:
        own = [p.cells[0] for p in main if p.labels[:3] == ("mlp", "PartPSP-1", budget)]
        found = [results[cell] for cell in own if cell in results]
        spent = next((r["epsilon_sum"] for r in found if r.get("epsilon_sum")), None)
        accuracies = [results[c]["accuracy"] if c in results else None for c in own]
        accuracies += [None] * (len(published.TOPOLOGIES) - len(own))
        table.add(f"node-swap, b = {budget:g} (paper)", spent, 0, *accuracies)
    for (unit, epsilon), cells in _grouped(points).items():
        table.add(unit, epsilon, 1e-5, *(_shown(results, cell) for cell in cells))
    page.table("units", "The other units on the same graphs: PartPSP-1, MLP, accuracy %", table)


def _grouped(points: list[Point]) -> dict[tuple[Any, ...], list[Cell]]:
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for point in points:
        groups.setdefault(point.labels[:-1], []).append(point.cells[0])
    return groups


Grid = Mapping[tuple[Any, ...], float]
"""Accuracies by (model, algorithm, b, topology)."""


def _claims(ours: Grid) -> Table:
    table = Table("claim | paper says | from the paper's table | from ours (MLP)")
    paper = published_grid()
    mlp = {labels: v for labels, v in ours.items() if labels[0] == "mlp" and labels[2]}
    for (first, second), said in published.CLAIMED_IMPROVEMENT.items():
        both = (improvement(grid, first, second) for grid in (paper, mlp))
        table.add(f"average accuracy of {first} over {second}, relative %", said, *both)
    said_wins = f"{published.CLAIMED_WINS} of 36"
    table.add("private cells won by PartPSP-1", said_wins, *(wins(x) for x in (paper, mlp)))
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


def _draw_accuracy(ours: Grid, results: Results, units: list[Point], scope: Scope) -> Any:
    models = [m for m in scope.models if any(labels[0] == m for labels in ours)] or ["mlp"]
    fig, axes = figure(len(models) * 4, columns=4)
    axis_of = dict(zip(product(models, published.TOPOLOGIES), axes, strict=True))
    ticks: dict[float | None, int] = {1.0: 1, 2.0: 2, 3.0: 3, None: 4}
    colours = dict(zip(published.ALGORITHMS, ("#0057a8", "#3fa34d", "#c05a00", "#7a4fa3"), strict=True))
    for (model, topology), axis in axis_of.items():
        for algorithm, colour in colours.items():
            theirs = [_theirs(model, algorithm, b, topology) for b in ticks]
            axis.plot(list(ticks.values()), theirs, color=colour, linestyle=":", linewidth=1)
            mine = [(x, ours[p]) for b, x in ticks.items() if (p := (model, algorithm, b, topology)) in ours]
            if mine:
                axis.plot(*zip(*mine, strict=True), color=colour, marker="o", markersize=3, label=algorithm)
        axis.set_xticks([1, 2, 3, 4], ["b=1", "2", "3", "none"])
        axis.set_title(f"{model}, {topology}")
    for point in units:  # at their middle epsilon, as level lines
        (unit, epsilon, topology), shown = point.labels, _shown(results, point.cells[0])
        level = axis_of.get(("mlp", topology))
        if level is not None and epsilon == _UNITS[unit][1] and isinstance(shown, float):
            style, label = "--" if unit == "record" else "-.", f"{unit}, ε={epsilon:g}"
            level.axhline(shown, color="black", linewidth=0.8, linestyle=style, label=label)
    axes[0].set_ylabel("accuracy % (dotted: paper)")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=5)
    return fig


# Appendix, table "Performance Comparison: PartPSP-Real vs PartPSP-Esti", and the certified bound as a third kind of noise

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


def _real_points(scope: Scope) -> list[Point]:
    rows = list(product(("mlp", "resnet18"), ("real", "paper"), ("1", "2")))
    rows += [("mlp", "certified", shared) for shared in ("1", "2")]
    points = []
    for (model, noise, shared), topology in product(rows, ("2-out", "exp")):
        c_prime, decay = _TUNED[model, shared]
        cell = paper_cell(
            model=model,
            data=published.PAIRS[model],
            shared=shared,
            topology=topology,
            sensitivity=_NOISE[noise][0],
            c_prime=c_prime,
            decay=decay,
            sync_every=5,
            **({} if model == "mlp" else {"epochs": 2, "lr_step": 0, "clip": 100.0}),
        )
        seeds = scope.seeds if model == "mlp" and noise != "certified" else scope.seeds[:1]
        rank = 0 if model == "mlp" else 1 if (shared, topology) == ("1", "exp") else 2
        cells = tuple(scope.fit(cell.but(seed=seed)) for seed in seeds)
        points.append(Point((noise, shared, model, topology), cells, rank=rank))
    wanted = [point for point in points if point.labels[2] in scope.models]
    return [p for p in wanted if p.labels[3] == "exp"] if scope.size == "smallest" else wanted


def _write_real(results: Results, points: list[Point], scope: Scope, page: Page) -> None:
    table = Table(
        "model | noise by | shared | topology | accuracy % | paper % | difference | RAS | "
        "RAS, authors | rounds | real above estimated | seeds"
    )
    fig, (axis,) = figure(1, columns=1)
    labels: list[str] = []
    for point in points:
        (noise, shared, model, topology), found = point.labels, _done(results, point, "accuracy")
        k = ("2-out", "exp").index(topology)
        theirs = published.REAL_VS_ESTIMATED.get((noise, shared, model), (None, None))[k]
        log = published.REAL_VS_ESTIMATED_RAS.get((noise, shared, model), (None, None))[k]
        row = [model, _NOISE[noise][1], shared, topology]
        if not found:
            table.add(*row, "not run", theirs, *[None] * 6)
            continue
        accuracy = spread([r["accuracy"] for r in found])
        table.add(
            *row,
            accuracy,
            theirs,
            None if theirs is None else accuracy.mean - theirs,
            spread([mean_real(r) for r in found]),
            log,
            sum(r["rounds"] for r in found),
            None if noise == "real" else sum(len(rounds_above(r)) for r in found),
            len(found),
        )
        x = len(labels)
        labels.append(f"{model} {shared}\n{topology}\n{noise}")
        axis.bar(x, accuracy.mean, color=_NOISE[noise][2])
        if theirs is not None:
            axis.plot([x - 0.4, x + 0.4], [theirs] * 2, color="black")
    page.table("real-vs-estimated", "Accuracy and mean real sensitivity (mean over seeds ± deviation)", table)
    axis.set_xticks(range(len(labels)), labels, fontsize=6)
    axis.set_ylabel("accuracy % (line: paper)")
    page.figure("real-vs-estimated", fig)


# Appendix, table "The Time Cost Experiments of PartPSP"

_TIMED_ROUNDS = {"mlp": 60, "resnet18": 2, "vit": 2}
_PLANNED = {"mlp": 720, "resnet18": 720, "vit": 600}
"""Rounds of 12 epochs, as the paper trained."""
_PRIVATE = {"budget": 3.0, "sensitivity": "certified", "clip": 100.0}
_TIMED: dict[str, dict[str, Any]] = {
    "SGP": {"algorithm": "sgp", "shared": "all", "unit": "none", "budget": None},
    "SGPDP": {"algorithm": "sgpdp", "shared": "all", **_PRIVATE},
    "PartPSP-1": {"shared": "1", **_PRIVATE},
}


def _time_points(scope: Scope) -> list[Point]:
    """Model by model, so that the three algorithms are measured soon after each other."""
    points = []
    for model, algorithm in product(scope.models, _TIMED):
        # 60 rounds of growing noise would overflow, two do not
        options = {"model": model, "sync_every": 5 if model == "mlp" else 0, "epochs": 1, "lr_step": 0}
        options |= {"data": published.PAIRS[model], "seed": scope.seeds[0], "track_real": False, "tests": 0}
        cell = paper_cell(**options | _TIMED[algorithm], examples=_TIMED_ROUNDS[model] * 1000)
        points.append(Point((model, algorithm), (scope.fit(cell),)))
    return points


def _write_time(results: Results, points: list[Point], scope: Scope, page: Page) -> None:
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
        their_ratio = theirs / published.TIME["SGP", model][k]
        row = (model, algorithm, topology)
        ratio = float("nan")
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
    """Sent by one node: its row (4 bytes a number) and a (8) to every peer, and the scalar S_i to everybody."""
    peers = int(parse(topology, nodes).weights(0).out_degree.max())
    return peers * (4 * parameters + 8) + (8 * (nodes - 1) if scalar else 0)


# What there is. Times: 2 cores of an AMD EPYC (virtual machine), no GPU, 15 November 2026. The second was measured while other jobs
# used the machine too (accuracy and scale: scaled up from the four fifths and more that ran); the others follow from the processor
# time of their rounds.

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "sensitivity",
            "real against estimated sensitivity, round by round: eight panels",
            "Real and estimated sensitivity, round by round (Section V-B)",
            'Section V-B, figure "Comparison of Real Sensitivity and Estimated Sensitivity": eight panels, and the certified bound. '
            "The paper says C' = .78 for all; the names of the authors' logs and the growth of their curves say C' = .86 for "
            "ResNet-18 with one shared layer, which there is conv1 and bn1, and a shared rate of 1e-5 with two.",
            ("1 min", "2 min", "27 min"),
            _sensitivity_points,
            _write_sensitivity,
        ),
        Experiment(
            "factors",
            "mean real sensitivity against shared layers and connectivity: 27 points",
            "Mean real sensitivity against shared layers and connectivity (Section V-C)",
            'Section V-C, figure "RAS about partial communication and network connectivity": 1, 2, 3 shared layers, d = 2..10.',
            ("2 min", "13 min", "13 min"),
            _factors_points,
            _write_factors,
        ),
        Experiment(
            "scale",
            "mean real sensitivity against network scale, up to 1000 nodes",
            "Mean real sensitivity against network scale (Section V-C), and up to 1000 nodes",
            'Section V-C, figure "RAS about network scale", and beyond it: do C\' and lambda tuned at N = 10 carry over? The paper does '
            "not give the settings: the MLP takes those of the figure before it, ResNet-18 those of the sensitivity figure. Every MLP "
            "run has 120 rounds, whatever N, so that all are at the same stage of training; N = 1000 has 40 rounds and batch 50. Runs "
            "of ResNet-18 have 10 rounds.",
            ("1 min", "10 min", "14 min"),
            _scale_points,
            _write_scale,
        ),
        Experiment(
            "accuracy",
            "the big accuracy table, the study of synchronisation periods, the other units",
            "Final test accuracy (Section V-D), and the other units of privacy",
            'Section V-D, table "The Final Test Accuracy (%)": four algorithms, b = 1, 2, 3 and none, four graphs, three model/data '
            "pairs. The noise is calibrated to the real sensitivity, as in the paper. The synchronisation period is not in the paper; "
            "the study of periods compares several for the MLP. ResNet-18 and ViT start from random weights here (the authors' from "
            "pretrained ones) and run for two epochs, the ViT on a part of the data. PEDFL is our reading of it: no code was published.",
            ("5 min", "50 min", "8 h"),
            _accuracy_points,
            _write_accuracy,
        ),
        Experiment(
            "real-vs-estimated",
            "accuracy with noise by the real and by the estimated sensitivity",
            "Noise by the real against the estimated sensitivity (appendix)",
            'Appendix, table "Performance Comparison: PartPSP-Real vs PartPSP-Esti", and the certified bound as a third kind of noise.',
            ("1 min", "11 min", "60 min"),
            _real_points,
            _write_real,
        ),
        Experiment(
            "time",
            "computation and communication of SGP, SGPDP and PartPSP-1",
            "Time cost (appendix): computation, and communication at a bandwidth",
            'Appendix, table "The Time Cost Experiments of PartPSP": computation measured here, communication computed from the bytes. '
            "Computation is the processor time of a few rounds on EXP, per node: gradients, sensitivity estimate, noise and averaging. "
            "It hardly depends on the graph. Communication is what a node's messages of a round take at the bandwidth. The paper's "
            "computation ran on a GPU, ours on one core of a processor: ratios are what can be compared.",
            ("1 min", "1 min", "4 min"),
            _time_points,
            _write_time,
        ),
    )
}
