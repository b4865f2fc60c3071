"""Section V-D, table "The Final Test Accuracy (%)": four algorithms, b = 1, 2, 3 and none, four graphs, three model/data pairs.

The noise is calibrated to the real sensitivity, as in the paper. The synchronisation period is not in the
paper; `periods` compares several for the MLP. ResNet-18 and ViT start from random weights here (the authors'
from pretrained ones) and run for two epochs, the ViT on a part of the data. PEDFL is our reading of it: no code was published.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dpps.paper import published
from dpps.paper.cells import Cell, Result
from dpps.paper.pages import Page, Table, figure, mean, spread
from dpps.paper.scope import Scope

TITLE = "Final test accuracy (Section V-D), and the other units of privacy"
PERIOD = {"mlp": 7, "resnet18": 5, "vit": 5}
PERIODS = (0, 3, 4, 5, 6, 7, 8, 10)
WHOLE_PERIODS = (1, 2, 3, 4, 7)
CLIPS = (100.0, 200.0)
BUDGETS: tuple[float | None, ...] = (3.0, 2.0, 1.0, None)
_AXIS: tuple[float | None, ...] = (1.0, 2.0, 3.0, None)
VIT_EXAMPLES = 4_000

_ALGORITHMS: dict[str, dict[str, Any]] = {
    "PartPSP-1": {"shared": "1"},
    "PartPSP-2": {"shared": "2"},
    "SGPDP": {"algorithm": "sgpdp", "shared": "all"},
    "PEDFL": {"algorithm": "pedfl", "shared": "all"},
}

#: The other units beside it: what is protected, and the total epsilon (delta 1e-5).
UNITS = {"record": (1.0, 3.0, 8.0), "contribution": (8.0, 100.0, 1000.0)}


@dataclass(frozen=True)
class Entry:
    """One number of the table."""

    model: str
    algorithm: str
    budget: float | None
    topology: str

    def cell(self, scope: Scope) -> Cell:
        """The run behind it."""
        noise: dict[str, Any] = (
            {"unit": "none", "budget": None} if self.budget is None else {"budget": self.budget}
        )
        cell = Cell(
            model=self.model,
            data=published.PAIRS[self.model],
            topology=self.topology,
            sync_every=PERIOD[self.model],
            seed=scope.seeds[0],
            **_ALGORITHMS[self.algorithm],
            **noise,
            **_large(self.model, private=self.budget is not None),
        )
        return scope.fit([cell])[0]

    @property
    def theirs(self) -> float:
        """The paper's number."""
        four = published.ACCURACY[self.algorithm, self.budget, self.model]
        return four[published.TOPOLOGIES.index(self.topology)]


def _large(model: str, *, private: bool) -> dict[str, Any]:
    """ResNet-18 and ViT: two epochs; with noise, gradients clipped as in the sensitivity figure."""
    if model == "mlp":
        return {}
    short = {"epochs": 2, "lr_step": 0, "clip": 100.0 if private else None}
    return short | ({"examples": VIT_EXAMPLES, "tests": 1000} if model == "vit" else {})


def entries(scope: Scope) -> list[Entry]:
    """Most telling first: the MLP block; of the large models EXP with b = 1 and none for PartPSP-1 and SGPDP; the rest."""
    every = [
        Entry(model, algorithm, budget, topology)
        for model in scope.models
        for budget in BUDGETS
        for algorithm in published.ALGORITHMS
        for topology in published.TOPOLOGIES
    ]
    return sorted(every, key=_rank)


def _rank(entry: Entry) -> int:
    if entry.model == "mlp":
        return 0
    telling = (
        entry.topology == "exp" and entry.algorithm in ("PartPSP-1", "SGPDP") and entry.budget in (1.0, None)
    )
    return (1 if entry.model == "resnet18" else 2) if telling else 3


def _study(scope: Scope) -> Iterator[tuple[str, Entry, Cell]]:
    """PartPSP-1 at b = 3 under other periods and clips."""
    if "mlp" not in scope.models:
        return
    for topology in published.TOPOLOGIES:
        entry = Entry("mlp", "PartPSP-1", 3.0, topology)
        for period in PERIODS:
            name = f"period {period}" if period else "never"
            yield name, entry, replace(entry.cell(scope), sync_every=period)
        for clip in CLIPS:
            yield f"period 7, clip {clip:g}", entry, replace(entry.cell(scope), clip=clip)


def _whole(scope: Scope) -> Iterator[tuple[int, Entry, Cell]]:
    """SGPDP on EXP under shorter periods: is there one that gives the published accuracies?"""
    if "mlp" not in scope.models:
        return
    for period in WHOLE_PERIODS:
        for budget in BUDGETS[:3]:
            entry = Entry("mlp", "SGPDP", budget, "exp")
            yield period, entry, replace(entry.cell(scope), sync_every=period)


def _repeats(scope: Scope) -> list[Cell]:
    """PartPSP-1 at b = 3 with the other seeds: how far apart two runs of a cell are."""
    if "mlp" not in scope.models:
        return []
    entries = [Entry("mlp", "PartPSP-1", 3.0, topology) for topology in published.TOPOLOGIES]
    return [replace(entry.cell(scope), seed=seed) for seed in scope.seeds[1:] for entry in entries]


def _units(scope: Scope) -> Iterator[tuple[str, float, str, Cell]]:
    """PartPSP-1 under the other units, on the same graphs."""
    if "mlp" not in scope.models:
        return
    for unit, epsilons in UNITS.items():
        for epsilon in epsilons:
            for topology in published.TOPOLOGIES:
                plain = Entry("mlp", "PartPSP-1", 3.0, topology).cell(scope)
                rates = (
                    {"lr_shared": 1.0, "lr_local": 1.0, "clip": 1.0} if unit == "record" else {"clip": 30.0}
                )
                own = replace(plain, unit=unit, epsilon=epsilon, budget=None, sync_every=0, **rates)  # type: ignore[arg-type]
                yield unit, epsilon, topology, own


def cells(scope: Scope) -> list[Cell]:
    """The MLP block, the study of periods, the other units, then the large models, most telling first."""
    order = entries(scope)
    if scope.size == "smallest":
        order = [e for e in order if e.topology == "exp"]
    first = [e.cell(scope) for e in order if e.model == "mlp"]
    rest = [e.cell(scope) for e in order if e.model != "mlp"]
    if scope.size == "smallest":
        return first + rest
    study = sorted((c for *_, c in _study(scope)), key=lambda c: abs(c.sync_every - PERIOD["mlp"]))
    middle = {unit: epsilons[1] for unit, epsilons in UNITS.items()}
    units = [c for *_, c in sorted(_units(scope), key=lambda item: item[1] != middle[item[0]])]
    whole = [c for *_, c in _whole(scope)]
    return [*first, *_repeats(scope), *study, *whole, *units, *rest]


def write(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    """The table, the study of periods, the other units, the paper's claims on ours."""
    table = Table(("model", "algorithm", "b", "topology", "accuracy %", "paper %", "difference"))
    ours: dict[Entry, float] = {}
    for entry in sorted(entries(scope), key=lambda e: (e.model != "mlp", e.model)):
        result = results.get(entry.cell(scope))
        value = result["accuracy"] if result else None
        if value is not None:
            ours[entry] = value
        shown = _shown(value) if result else "not run"
        difference = None if value is None else value - entry.theirs
        table.add(
            entry.model,
            entry.algorithm,
            entry.budget or "none",
            entry.topology,
            shown,
            entry.theirs,
            difference,
        )
    page.table("accuracy", "Final test accuracy, ours beside the paper's, one seed", table)
    _write_seeds(results, scope, page)
    _write_periods(results, scope, page)
    _write_whole(results, scope, page)
    _write_units(results, scope, page)
    page.table(
        "claims", "The paper's claims, computed from its table and from ours (MLP block)", _claims(ours)
    )
    page.figure("accuracy", _draw(ours, results, scope))


def _shown(accuracy: float | None) -> float | str:
    return "broke off" if accuracy is None else accuracy


def _write_seeds(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    table = Table(("topology", "accuracy %", "paper %", "difference", "seeds"))
    for topology in published.TOPOLOGIES:
        entry = Entry("mlp", "PartPSP-1", 3.0, topology)
        runs = (results.get(replace(entry.cell(scope), seed=seed)) for seed in scope.seeds)
        found = [r["accuracy"] for r in runs if r and r["accuracy"] is not None]
        shown = spread(found) if found else "not run"
        table.add(topology, shown, entry.theirs, mean(found) - entry.theirs if found else None, len(found))
    page.table("seeds", "PartPSP-1, b = 3, MLP: how much the seed matters", table)


def _write_periods(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    rows: dict[str, dict[str, float | None]] = {}
    for name, entry, cell in _study(scope):
        if cell in results:
            rows.setdefault(name, {})[entry.topology] = results[cell]["accuracy"]
    table = Table(("synchronisation", *published.TOPOLOGIES, "mean absolute difference from the paper"))
    theirs = dict(zip(published.TOPOLOGIES, published.ACCURACY["PartPSP-1", 3.0, "mlp"], strict=True))
    table.add("paper (period not given)", *theirs.values(), None)
    for name, row in rows.items():
        gaps = [abs(v - theirs[t]) for t, v in row.items() if v is not None]
        fit = sum(gaps) / len(gaps) if len(gaps) == len(theirs) else None
        shown = (_shown(row[t]) if t in row else "not run" for t in published.TOPOLOGIES)
        table.add(name, *shown, fit)
    page.table("periods", "Which period fits the paper: PartPSP-1, b = 3, MLP, accuracy %", table)


def _write_whole(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    rows: dict[int, dict[Entry, object]] = {}
    for period, entry, cell in _whole(scope):
        if cell in results:
            rows.setdefault(period, {})[entry] = _shown(results[cell]["accuracy"])
    entries = [Entry("mlp", "SGPDP", budget, "exp") for budget in BUDGETS[:3]]
    table = Table(("synchronisation", *(f"b = {entry.budget:g}" for entry in entries)))
    table.add("paper (period not given)", *(entry.theirs for entry in entries))
    for period, row in rows.items():
        table.add(f"period {period}", *(row.get(entry, "not run") for entry in entries))
    page.table("whole", "SGPDP (all layers shared) under shorter periods: MLP, EXP, accuracy %", table)


def _write_units(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    table = Table(("unit", "total epsilon", "delta", *published.TOPOLOGIES))
    for budget in BUDGETS[:3]:
        found = [results.get(Entry("mlp", "PartPSP-1", budget, t).cell(scope)) for t in published.TOPOLOGIES]
        spent = next((r["epsilon_sum"] for r in found if r and r.get("epsilon_sum")), None)
        table.add(
            f"node-swap, b = {budget:g} (paper)", spent, 0, *(r["accuracy"] if r else None for r in found)
        )
    by_row: dict[tuple[str, float], list[object]] = {}
    for unit, epsilon, _, cell in _units(scope):
        by_row.setdefault((unit, epsilon), []).append(
            results[cell]["accuracy"] if cell in results else "not run"
        )
    for (unit, epsilon), values in by_row.items():
        table.add(unit, epsilon, 1e-5, *values)
    page.table("units", "The other units on the same graphs: PartPSP-1, MLP, accuracy %", table)


def _claims(ours: Mapping[Entry, float]) -> Table:
    table = Table(("claim", "paper says", "from the paper's table", "from ours (MLP)"))
    private = [
        (a, b, m, t) for (a, b, m) in published.ACCURACY if b is not None for t in published.TOPOLOGIES
    ]
    paper = {key: Entry(key[2], key[0], key[1], key[3]).theirs for key in private}
    mlp = {
        (e.algorithm, e.budget, e.model, e.topology): v
        for e, v in ours.items()
        if e.model == "mlp" and e.budget
    }
    for (first, second), said in published.CLAIMED_IMPROVEMENT.items():
        table.add(
            f"average accuracy of {first} over {second}, relative %",
            said,
            improvement(paper, first, second),
            improvement(mlp, first, second),
        )
    table.add(
        "private cells won by PartPSP-1", f"{published.CLAIMED_WINS} of 36", *(wins(x) for x in (paper, mlp))
    )
    return table


Grid = Mapping[tuple[str, float, str, str], float]


def improvement(grid: Grid, first: str, second: str) -> float | None:
    """Relative difference of the two algorithms' averages, percent."""
    a, b = ([v for key, v in grid.items() if key[0] == name] for name in (first, second))
    return 100 * (sum(a) / sum(b) - 1) if a and len(a) == len(b) else None


def wins(grid: Grid) -> str:
    """In how many (b, model, topology) PartPSP-1 is ahead of all others."""
    places = {key[1:] for key in grid}
    best = [max((v, key[0]) for key, v in grid.items() if key[1:] == place)[1] for place in places]
    return f"{best.count('PartPSP-1')} of {len(places)}"


def _draw(ours: Mapping[Entry, float], results: Mapping[Cell, Result], scope: Scope) -> Any:
    models = [m for m in scope.models if any(e.model == m for e in ours)] or ["mlp"]
    fig, axes = figure(len(models) * 4, columns=4)
    for k, axis in enumerate(axes):
        model, topology = models[k // 4], published.TOPOLOGIES[k % 4]
        for color, algorithm in zip(
            ("#0057a8", "#3fa34d", "#c05a00", "#7a4fa3"), published.ALGORITHMS, strict=True
        ):
            mine = [(b or 4, ours[e]) for b in _AXIS if (e := Entry(model, algorithm, b, topology)) in ours]
            theirs = [(b or 4, Entry(model, algorithm, b, topology).theirs) for b in _AXIS]
            axis.plot(*zip(*theirs, strict=True), color=color, linestyle=":", linewidth=1)
            if mine:
                axis.plot(*zip(*mine, strict=True), color=color, marker="o", markersize=3, label=algorithm)
        axis.set_xticks([1, 2, 3, 4], ["b=1", "2", "3", "none"])
        axis.set_title(f"{model}, {topology}")
        if model == "mlp":
            _draw_units(axis, topology, results, scope)
    axes[0].set_ylabel("accuracy % (dotted: paper)")
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(fontsize=5)
    return fig


def _draw_units(axis: Any, topology: str, results: Mapping[Cell, Result], scope: Scope) -> None:
    """The record and contribution units at their middle epsilon, as level lines."""
    for unit, epsilon, where, cell in _units(scope):
        if where == topology and cell in results and epsilon == UNITS[unit][1] and results[cell]["accuracy"]:
            style = {"record": "--", "contribution": "-."}[unit]
            axis.axhline(
                results[cell]["accuracy"],
                color="black",
                linewidth=0.8,
                linestyle=style,
                label=f"{unit}, ε={epsilon:g}",
            )
