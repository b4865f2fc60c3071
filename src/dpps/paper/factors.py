"""Section V-C, figure "RAS about partial communication and network connectivity": 1, 2, 3 shared layers, d = 2..10."""

from collections.abc import Mapping
from typing import Any

from dpps.paper import published
from dpps.paper.cells import Cell, Result, mean_real, rounds_above
from dpps.paper.pages import Page, Table, figure, mean, spread
from dpps.paper.scope import Scope

TITLE = "Mean real sensitivity against shared layers and connectivity (Section V-C)"
LAYERS = {"1": 1, "2": 2, "all": 3}
SETTINGS: dict[str, Any] = {
    "model": "mlp-residual",
    "sensitivity": "paper",
    "c_prime": 0.95,
    "decay": 0.55,
    "clip": 200.0,
    "sync_every": 4,
    "lr_step": 0,
    "tests": 0,
}
"""Of every run of this figure and of the next one."""


def _degrees(scope: Scope) -> tuple[int, ...]:
    return (2, 10) if scope.size == "smallest" else tuple(range(2, 11))


def _cell(shared: str, d: int, seed: int, scope: Scope) -> Cell:
    cell = Cell(shared=shared, topology=f"{d}-out", epochs=2, seed=seed, **SETTINGS)
    return scope.fit([cell])[0]


def cells(scope: Scope) -> list[Cell]:
    """27 points, one seed after the other."""
    return [_cell(s, d, seed, scope) for seed in scope.seeds for s in LAYERS for d in _degrees(scope)]


def write(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    """RAS per point with its spread over the seeds; the authors' where their logs have it."""
    table = Table(
        ("shared layers", "d", "RAS", "authors", "difference %", "rounds", "real above estimated", "seeds")
    )
    for shared, layers in LAYERS.items():
        for d in _degrees(scope):
            found = _found(results, shared, d, scope)
            ras = [mean_real(r) for r in found]
            theirs = published.FACTORS[d] if shared == "1" else None
            difference = 100 * (mean(ras) / theirs - 1) if theirs and ras else None
            rounds = sum(r["rounds"] for r in found)
            above = sum(len(rounds_above(r)) for r in found)
            table.add(
                layers, d, spread(ras) if ras else "not run", theirs, difference, rounds, above, len(found)
            )
    page.table(
        "factors",
        "Mean real sensitivity (RAS), ours (mean over seeds ± deviation) beside the authors'",
        table,
    )
    page.figure("factors", _draw(results, scope))


def _found(results: Mapping[Cell, Result], shared: str, d: int, scope: Scope) -> list[Result]:
    wanted = (results.get(_cell(shared, d, seed, scope)) for seed in scope.seeds)
    return [r for r in wanted if r and r.get("real")]


def _draw(results: Mapping[Cell, Result], scope: Scope) -> Any:
    fig, (left, right) = figure(2, columns=2)
    degrees = _degrees(scope)
    grid = {s: [mean([mean_real(r) for r in _found(results, s, d, scope)]) for d in degrees] for s in LAYERS}
    for k, d in enumerate(degrees):
        left.plot(list(LAYERS.values()), [grid[s][k] for s in LAYERS], marker=".", label=f"d = {d}")
    for s, layers in LAYERS.items():
        right.plot(degrees, grid[s], marker=".", label=f"{layers} shared")
    right.plot(
        list(published.FACTORS),
        list(published.FACTORS.values()),
        "k--",
        linewidth=0.8,
        label="1 shared, authors",
    )
    for axis, label in ((left, "shared layers"), (right, "d of d-Out")):
        axis.set(xlabel=label, ylabel="mean real sensitivity", yscale="log")
        axis.legend(fontsize=6)
    left.set_xticks(list(LAYERS.values()))
    return fig
