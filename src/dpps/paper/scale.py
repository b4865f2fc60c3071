"""Section V-C, figure "RAS about network scale", and beyond it: do C' and lambda tuned at N = 10 carry over?

The paper does not give the settings: the MLP takes those of the figure before it,
ResNet-18 those of the sensitivity figure. Every MLP run has 120 rounds, whatever N,
so that all are at the same stage of training; N = 1000 has 40 rounds and batch 50. Runs of ResNet-18 have 10 rounds.
"""

from collections.abc import Mapping
from typing import Any

from dpps.paper.cells import Cell, Result, mean_real, rounds_above
from dpps.paper.factors import SETTINGS
from dpps.paper.pages import Page, Table, figure
from dpps.paper.scope import Scope

TITLE = "Mean real sensitivity against network scale (Section V-C), and up to 1000 nodes"
DEGREES = (2, 4, 6, 8)
NODES = (10, 20, 30, 40, 50)
BEYOND = (100, 300, 1000)
RESNET_ROUNDS = 10


def _mlp(n: int, d: int, scope: Scope) -> Cell:
    full = scope.size == "full"
    batch, rounds = (10, 60) if not full else (50, 40) if n == 1000 else (100, 120)
    per_epoch = (60_000 if full else 10_000) // (n * batch)
    cell = Cell(
        data="mnist" if full else "mnist-mini",
        nodes=n,
        topology=f"{d}-out",
        epochs=max(1, rounds // per_epoch),
        batch_size=batch,
        seed=scope.seeds[0],
        **SETTINGS,
    )
    return scope.fit([cell])[0] if scope.size == "smallest" else cell


def _resnet(n: int, d: int, scope: Scope) -> Cell:
    cell = Cell(
        model="resnet18",
        data="fashion-mnist",
        shared="conv1,bn1",
        nodes=n,
        topology=f"{d}-out",
        sensitivity="paper",
        c_prime=0.86,
        decay=0.53,
        clip=100.0,
        sync_every=5,
        epochs=1,
        examples=RESNET_ROUNDS * n * 100,
        lr_step=0,
        tests=0,
        seed=scope.seeds[0],
    )
    return scope.fit([cell])[0]


def points(scope: Scope) -> list[tuple[str, int, int, Cell]]:
    """(model, N, d, cell), the paper's first."""
    few = {"full": NODES, "quick": (10, 20, 50), "smallest": (10,)}[scope.size]
    degrees = DEGREES[:1] if scope.size == "smallest" else DEGREES
    beyond = BEYOND if scope.size == "full" else ()
    out = [("mlp", n, d, _mlp(n, d, scope)) for n in few for d in degrees if "mlp" in scope.models]
    out += [("mlp", n, d, _mlp(n, d, scope)) for n in beyond for d in (2, 8) if "mlp" in scope.models]
    if "resnet18" in scope.models:
        out += [("resnet18", n, d, _resnet(n, d, scope)) for n in (10, 20) for d in (2, 8)]
    return out


def cells(scope: Scope) -> list[Cell]:
    """In the order of `points`."""
    return [cell for *_, cell in points(scope)]


def write(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    """RAS and whether the estimate with the constants of N = 10 still holds."""
    table = Table(
        (
            "model",
            "N",
            "d",
            "rounds",
            "RAS",
            "RAS / RAS at N=10",
            "real above estimated",
            "largest real / estimated",
        )
    )
    base: dict[tuple[str, int], float] = {}
    for model, n, d, cell in points(scope):
        result = results.get(cell)
        ras = mean_real(result) if result else None
        if result is None or ras is None:
            table.add(model, n, d, "not run", *[None] * 4)
            continue
        base.setdefault((model, d), ras)
        largest = max(r / e for r, e in zip(result["real"], result["estimated"], strict=True))
        table.add(
            model, n, d, result["rounds"], ras, ras / base[model, d], len(rounds_above(result)), largest
        )
    page.table("scale", "Mean real sensitivity (RAS) by network scale, one seed", table)
    page.figure("scale", _draw(results, scope))


def _draw(results: Mapping[Cell, Result], scope: Scope) -> Any:
    fig, axes = figure(2, columns=2)
    for axis, model in zip(axes, ("mlp", "resnet18"), strict=True):
        for d in DEGREES:
            line = [
                (n, mean_real(results[c]))
                for m, n, k, c in points(scope)
                if (m, k) == (model, d) and c in results
            ]
            if line:
                axis.plot([n for n, _ in line], [y for _, y in line], marker=".", label=f"{d}-Out")
        axis.set(xlabel="N", ylabel="mean real sensitivity", xscale="log", title=model)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6)
    return fig
