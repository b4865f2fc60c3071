"""Section V-B, figure "Comparison of Real Sensitivity and Estimated Sensitivity": eight panels, and the certified bound.

The paper says C' = .78 for all; the names of the authors' logs and the growth of their curves say C' = .86 for ResNet-18 with
one shared layer, which there is conv1 and bn1, and a shared rate of 1e-5 with two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dpps.paper import published
from dpps.paper.cells import Cell, Result, rounds_above
from dpps.paper.pages import Page, Table, figure, spread
from dpps.paper.scope import Scope

TITLE = "Real and estimated sensitivity, round by round (Section V-B)"


@dataclass(frozen=True)
class Panel:
    """One panel of the figure."""

    model: str
    layers: str
    topology: str

    @property
    def name(self) -> str:
        """Also the name of the authors' curve."""
        return f"{self.model}-{self.layers}-{self.topology}"

    def cell(self, seed: int) -> Cell:
        """The run behind it."""
        common = {
            "topology": self.topology,
            "sensitivity": "paper",
            "sync_every": 5,
            "epochs": 2,
            "lr_step": 0,
        }
        common |= {"certified": True, "seed": seed, "tests": 0}
        if self.model == "mlp":
            decay = {"1": 0.55, "2": 0.62}[self.layers]
            return Cell(model="mlp-residual", shared=self.layers, c_prime=0.78, decay=decay, **common)  # type: ignore[arg-type]
        own = {
            "1": {"shared": "conv1,bn1", "c_prime": 0.86, "decay": 0.53},
            "2": {"shared": "conv1,bn1,layer1", "c_prime": 0.78, "decay": 0.7, "lr_shared": 1e-5},
        }[self.layers]
        return Cell(model="resnet18", data="fashion-mnist", clip=100.0, **own, **common)  # type: ignore[arg-type]


def panels(scope: Scope) -> list[Panel]:
    """In the paper's order."""
    models = [m for m in ("mlp", "resnet18") if m in scope.models]
    return [
        Panel(m, layers, topology) for m in models for topology in ("2-out", "exp") for layers in ("1", "2")
    ]


def _seeds(panel: Panel, scope: Scope) -> list[int]:
    return list(scope.seeds) if panel.model == "mlp" else list(scope.seeds[:1])


def _cell(panel: Panel, seed: int, scope: Scope) -> Cell:
    return scope.fit([panel.cell(seed)])[0]


def cells(scope: Scope) -> list[Cell]:
    """All runs, the first seed of every panel first."""
    pairs = [(k, panel, seed) for panel in panels(scope) for k, seed in enumerate(_seeds(panel, scope))]
    pairs.sort(key=lambda item: (item[1].model, item[0]))
    return [_cell(panel, seed, scope) for _, panel, seed in pairs]


COLUMNS = ("mean real", "peak real", "mean estimated", "peak estimated")


def write(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    """The table of means and peaks, the growth of the estimate, and the figure."""
    table = Table(("panel", *(f"{c}{who}" for c in COLUMNS for who in ("", ", authors")), "seeds"))
    checks = Table(
        (
            "panel",
            "rounds",
            "real above estimated",
            "of these right after a synchronisation",
            "real above certified",
            "mean certified / mean real",
            "growth a round, predicted",
            "growth, measured",
        )
    )
    for panel in panels(scope):
        found = [results[c] for s in _seeds(panel, scope) if (c := _cell(panel, s, scope)) in results]
        found = [r for r in found if r.get("real")]
        theirs = published.curve(panel.name)
        if not found:
            table.add(panel.name, *("not run", "") * 4, 0)
            continue
        ours = [_four(r["real"], r["estimated"]) for r in found]
        row: list[object] = []
        for k, number in enumerate(_four(theirs.real, theirs.estimated)):
            row += [spread([four[k] for four in ours]), number]
        table.add(panel.name, *row, len(found))
        checks.add(panel.name, *_checks(panel, found))
    page.table("sensitivity", "Sensitivity: ours (mean over seeds ± deviation) beside the authors'", table)
    page.table("checks", "Does the estimate hold, and how does it grow", checks)
    page.figure("sensitivity", _draw(results, scope))


def _four(real: list[float], estimated: list[float]) -> list[float]:
    return [sum(real) / len(real), max(real), sum(estimated) / len(estimated), max(estimated)]


def _checks(panel: Panel, found: list[Result]) -> list[object]:
    above = [rounds_above(r) for r in found]
    after = sum(t % 5 == 0 for ts in above for t in ts)
    certified = sum(len(rounds_above(r, "certified")) for r in found)
    cell, size = panel.cell(0), found[0]["shared_parameters"]
    assert cell.budget is not None
    predicted = cell.decay * (1 + 2 * cell.c_prime * 1e-3 * size / cell.budget)
    ratio = sum(sum(r["certified"]) / sum(r["real"]) for r in found) / len(found)
    total = sum(r["rounds"] for r in found)
    return [
        total,
        sum(map(len, above)),
        after,
        certified,
        ratio,
        predicted,
        spread([growth(r["estimated"], 5) for r in found]),
    ]


def growth(estimated: list[float], period: int) -> float:
    """Geometric mean of S(t+1)/S(t) over the later rounds between synchronisations, when the noise leads."""
    ratios = [b / a for t, (a, b) in enumerate(pairwise(estimated)) if t % period == period - 2]
    product = 1.0
    for ratio in ratios:
        product *= ratio ** (1 / len(ratios))
    return product


def _draw(results: Mapping[Cell, Result], scope: Scope) -> Any:
    wanted = panels(scope)
    fig, axes = figure(len(wanted), columns=4)
    for axis, panel in zip(axes, wanted, strict=True):
        theirs = published.curve(panel.name)
        axis.plot(theirs.real, color="#bbbbbb", linewidth=2.5, label="real, authors")
        axis.plot(theirs.estimated, color="#f3c9a5", linewidth=2.5, label="estimated, authors")
        result = results.get(_cell(panel, scope.seeds[0], scope))
        if result and result.get("real"):
            axis.plot(result["real"], color="black", linewidth=0.8, label="real")
            axis.plot(result["estimated"], color="#c05a00", linewidth=0.8, label="estimated (Remark 1)")
            axis.plot(result["certified"], color="#0057a8", linewidth=0.8, label="certified")
        axis.set_yscale("log")
        axis.set_title(panel.name + ("" if result else " (not run)"))
        axis.set_xlabel("round")
    axes[0].set_ylabel("sensitivity (L1)")
    axes[0].legend(fontsize=6)
    return fig
