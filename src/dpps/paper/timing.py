"""Appendix, table "The Time Cost Experiments of PartPSP": computation measured here, communication computed from the bytes.

A few rounds of every run are measured; a node's time of a round is its gradients and its part of the protocol, plus what its
messages take at the bandwidth. The paper's computation ran on a GPU, ours on one core: ratios are what can be compared.
"""

from collections.abc import Mapping
from typing import Any

from dpps.paper import published
from dpps.paper.cells import Cell, Result
from dpps.paper.pages import Page, Table, figure
from dpps.paper.scope import Scope

TITLE = "Time cost (appendix): computation, and communication at a bandwidth"
ALGORITHMS = ("SGP", "SGPDP", "PartPSP-1")
ROUNDS = {"mlp": 60, "resnet18": 2, "vit": 2}
_OWN: dict[str, dict[str, Any]] = {
    "SGP": {"algorithm": "sgp", "shared": "all", "unit": "none", "budget": None},
    "SGPDP": {"algorithm": "sgpdp", "shared": "all"},
    "PartPSP-1": {"shared": "1"},
}
#: Rounds of 12 epochs, as the paper trained.
PLANNED = {"mlp": 720, "resnet18": 720, "vit": 600}


def _cell(algorithm: str, model: str, topology: str, scope: Scope) -> Cell:
    own = dict(_OWN[algorithm])
    if algorithm != "SGP":
        own |= {"budget": 3.0, "sensitivity": "paper", "clip": 100.0}
    cell = Cell(
        model=model,
        data=published.PAIRS[model],
        topology=topology,
        epochs=1,
        lr_step=0,
        tests=0,
        examples=ROUNDS[model] * 1000,
        seed=scope.seeds[0],
        **own,
    )
    return scope.fit([cell])[0]


def cells(scope: Scope) -> list[Cell]:
    """Model by model, so that the three algorithms of a table cell are measured soon after each other."""
    topologies = published.TOPOLOGIES[:1] if scope.size == "smallest" else published.TOPOLOGIES
    return [_cell(a, m, t, scope) for m in scope.models for t in topologies for a in ALGORITHMS]


def write(results: Mapping[Cell, Result], scope: Scope, page: Page) -> None:
    """Seconds of a node's round, seconds of 12 epochs, ratios to SGP beside the paper's."""
    table = Table(
        (
            "model",
            "algorithm",
            "topology",
            "computation s a round",
            "communication s a round",
            "12 epochs s",
            "paper s",
            "ratio to SGP",
            "communication ratio",
            "paper's ratio",
        )
    )
    for model in scope.models:
        for k, topology in enumerate(published.TOPOLOGIES):
            base = _times(results.get(_cell("SGP", model, topology, scope)), scope)
            for algorithm in ALGORITHMS:
                times, theirs = (
                    _times(results.get(_cell(algorithm, model, topology, scope)), scope),
                    published.TIME[algorithm, model],
                )
                ratio = theirs[k] / published.TIME["SGP", model][k]
                if times is None or base is None:
                    table.add(model, algorithm, topology, "not run", None, None, theirs[k], None, None, ratio)
                    continue
                total = sum(times) * PLANNED[model]
                table.add(
                    model,
                    algorithm,
                    topology,
                    *times,
                    total,
                    theirs[k],
                    sum(times) / sum(base),
                    times[1] / base[1],
                    ratio,
                )
    page.table("time", f"Time of a node, at {scope.bandwidth / 1e9:g} Gbps", table)
    page.figure("time", _draw(results, scope))


def _times(result: Result | None, scope: Scope) -> tuple[float, float] | None:
    """Seconds of one node's round: computation, communication."""
    if result is None or "seconds" not in result:
        return None
    seconds, work = result["seconds"], result["rounds"] * result["cell"]["nodes"]
    computation = (seconds["gradients"] + seconds["protocol"]) / work
    return computation, 8 * result["bytes_per_round"] / scope.bandwidth


def _draw(results: Mapping[Cell, Result], scope: Scope) -> Any:
    fig, axes = figure(len(scope.models), columns=3)
    for axis, model in zip(axes, scope.models, strict=True):
        for color, algorithm in zip(("#777777", "#c05a00", "#0057a8"), ALGORITHMS, strict=True):
            ours, theirs = [], []
            for k, topology in enumerate(published.TOPOLOGIES):
                base = _times(results.get(_cell("SGP", model, topology, scope)), scope)
                times = _times(results.get(_cell(algorithm, model, topology, scope)), scope)
                ours.append(sum(times) / sum(base) if times and base else float("nan"))
                theirs.append(published.TIME[algorithm, model][k] / published.TIME["SGP", model][k])
            axis.plot(published.TOPOLOGIES, ours, color=color, marker="o", label=algorithm)
            axis.plot(published.TOPOLOGIES, theirs, color=color, linestyle=":")
        axis.set(title=model, ylabel="time / time of SGP (dotted: paper)")
    axes[0].legend(fontsize=6)
    return fig
