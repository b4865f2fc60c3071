"""Appendix, table "Performance Comparison: PartPSP-Real vs PartPSP-Esti", and the certified bound as a third kind of noise."""

from collections.abc import Mapping
from typing import Any

from dpps.paper import published
from dpps.paper.cells import Cell, Result, mean_real, rounds_above
from dpps.paper.pages import Page, Table, figure, mean, spread
from dpps.paper.scope import Scope

TITLE = "Noise by the real against the estimated sensitivity (appendix)"
TOPOLOGIES = ("2-out", "exp")
NOISE = {"real": "oracle", "paper": "paper", "certified": "certified"}


def _cell(noise: str, shared: str, model: str, topology: str, seed: int, scope: Scope) -> Cell:
    """C' and lambda as in the authors' logs; ResNet-18 for two epochs from random weights."""
    tuned = {"mlp": {"1": (0.85, 0.55), "2": (0.82, 0.62)}, "resnet18": {"1": (0.86, 0.53), "2": (0.78, 0.7)}}
    c_prime, decay = tuned[model][shared]
    large: dict[str, Any] = {} if model == "mlp" else {"epochs": 2, "lr_step": 0, "clip": 100.0}
    cell = Cell(
        model=model,
        data=published.PAIRS[model],
        shared=shared,
        topology=topology,
        sensitivity=NOISE[noise],
        c_prime=c_prime,
        decay=decay,
        sync_every=5,
        seed=seed,
        **large,
    )
    return scope.fit([cell])[0]


def _seeds(model: str, noise: str, scope: Scope) -> tuple[int, ...]:
    return tuple(scope.seeds) if model == "mlp" and noise != "certified" else tuple(scope.seeds[:1])


def _rows(scope: Scope) -> list[tuple[str, str, str]]:
    """(noise, shared, model) in the table's order; the certified bound beyond the paper, for the MLP."""
    models = [m for m in ("mlp", "resnet18") if m in scope.models]
    rows = [(noise, shared, m) for m in models for noise in ("real", "paper") for shared in ("1", "2")]
    return rows + [("certified", shared, "mlp") for shared in ("1", "2") if "mlp" in models]


def cells(scope: Scope) -> list[Cell]:
    """MLP first, seed by seed; of ResNet-18 one layer on EXP first."""
    places = [
        (k, row, t, s)
        for row in _rows(scope)
        for t in TOPOLOGIES
        for k, s in enumerate(_seeds(row[2], row[0], scope))
    ]
    places.sort(
        key=lambda p: (
            p[1][2] != "mlp",
            p[0],
            p[1][0] == "certified",
            p[1][2] != "mlp" and (p[1][1], p[2]) != ("1", "exp"),
        )
    )
    if scope.size == "smallest":
        places = [p for p in places if p[2] == "exp"]
    return [_cell(*row, t, s, scope) for _, row, t, s in places]


def write(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    """Accuracy and RAS of every row beside the paper's."""
    table = Table(
        (
            "model",
            "noise by",
            "shared",
            "topology",
            "accuracy %",
            "paper %",
            "difference",
            "RAS",
            "RAS, authors",
            "rounds",
            "real above estimated",
            "seeds",
        )
    )
    for noise, shared, model in _rows(scope):
        for k, topology in enumerate(TOPOLOGIES):
            found = _found(results, noise, shared, model, topology, scope)
            theirs = published.REAL_VS_ESTIMATED.get((noise, shared, model))
            log = published.REAL_VS_ESTIMATED_RAS.get((noise, shared, model))
            label = {"real": "real", "paper": "estimated (Remark 1)", "certified": "certified"}[noise]
            row = [model, label, shared, topology]
            if not found:
                table.add(*row, "not run", theirs[k] if theirs else None, *[None] * 6)
                continue
            accuracy = [r["accuracy"] for r in found]
            difference = mean(accuracy) - theirs[k] if theirs else None
            above = sum(len(rounds_above(r)) for r in found) if noise != "real" else None
            table.add(
                *row,
                spread(accuracy),
                theirs[k] if theirs else None,
                difference,
                spread([mean_real(r) for r in found]),
                log[k] if log else None,
                sum(r["rounds"] for r in found),
                above,
                len(found),
            )
    page.table("real-vs-estimated", "Accuracy and mean real sensitivity (mean over seeds ± deviation)", table)
    page.figure("real-vs-estimated", _draw(results, scope))


def _found(
    results: Mapping[Cell, Result], noise: str, shared: str, model: str, topology: str, scope: Scope
) -> list[Result]:
    wanted = (
        results.get(_cell(noise, shared, model, topology, s, scope)) for s in _seeds(model, noise, scope)
    )
    return [r for r in wanted if r and r["accuracy"] is not None]


def _draw(results: Mapping[Cell, Result], scope: Scope) -> Any:
    fig, (axis,) = figure(1, columns=1)
    shown = [
        (row, t, k)
        for row in _rows(scope)
        for k, t in enumerate(TOPOLOGIES)
        if _found(results, *row, t, scope)
    ]
    for x, (row, topology, k) in enumerate(shown):
        values = [r["accuracy"] for r in _found(results, *row, topology, scope)]
        axis.bar(
            x, mean(values), color={"real": "#777777", "paper": "#c05a00", "certified": "#0057a8"}[row[0]]
        )
        theirs = published.REAL_VS_ESTIMATED.get(row)
        if theirs:
            axis.plot([x - 0.4, x + 0.4], [theirs[k]] * 2, color="black")
    labels = [f"{row[2]} {row[1]}\n{t}\n{row[0]}" for row, t, _ in shown]
    axis.set_xticks(range(len(shown)), labels, fontsize=6)
    axis.set_ylabel("accuracy % (line: paper)")
    return fig
