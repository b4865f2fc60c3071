"""Appendix, table "The Time Cost Experiments of PartPSP": computation measured here, communication computed from the bytes.

Computation is the processor time of a few rounds on EXP, per node: gradients, sensitivity estimate,
noise and averaging. It hardly depends on the graph. Communication is what a node's messages of a round take
at the bandwidth. The paper's computation ran on a
GPU, ours on one core of a processor: ratios are what can be compared.
"""

from collections.abc import Mapping
from typing import Any

from dpps.paper import published
from dpps.paper.cells import Cell, Result
from dpps.paper.pages import Page, Table, figure
from dpps.paper.scope import Scope
from dpps.topology import parse

TITLE = "Time cost (appendix): computation, and communication at a bandwidth"
ROUNDS = {"mlp": 60, "resnet18": 2, "vit": 2}
#: Rounds of 12 epochs, as the paper trained.
PLANNED = {"mlp": 720, "resnet18": 720, "vit": 600}
_OWN: dict[str, dict[str, Any]] = {
    "SGP": {"algorithm": "sgp", "shared": "all", "unit": "none", "budget": None},
    "SGPDP": {
        "algorithm": "sgpdp",
        "shared": "all",
        "budget": 3.0,
        "sensitivity": "certified",
        "clip": 100.0,
    },
    "PartPSP-1": {"shared": "1", "budget": 3.0, "sensitivity": "certified", "clip": 100.0},
}


def _cell(algorithm: str, model: str, scope: Scope) -> Cell:
    cell = Cell(
        model=model,
        data=published.PAIRS[model],
        epochs=1,
        lr_step=0,
        sync_every=5 if model == "mlp" else 0,  # 60 rounds of growing noise would overflow, two do not
        tests=0,
        track=False,
        examples=ROUNDS[model] * 1000,
        seed=scope.seeds[0],
        **_OWN[algorithm],
    )
    return scope.fit([cell])[0]


def cells(scope: Scope) -> list[Cell]:
    """Model by model, so that the three algorithms are measured soon after each other."""
    return [_cell(algorithm, model, scope) for model in scope.models for algorithm in _OWN]


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
            base = _times(results, "SGP", model, topology, scope)
            for algorithm in _OWN:
                times, theirs = (
                    _times(results, algorithm, model, topology, scope),
                    published.TIME[algorithm, model][k],
                )
                ratio = theirs / published.TIME["SGP", model][k]
                if times is None or base is None:
                    table.add(model, algorithm, topology, "not run", None, None, theirs, None, None, ratio)
                    continue
                total = sum(times) * PLANNED[model]
                ours = sum(times) / sum(base), times[1] / base[1]
                table.add(model, algorithm, topology, *times, total, theirs, *ours, ratio)
    page.table("time", f"Time of a node, at {scope.bandwidth / 1e9:g} Gbps", table)
    page.figure("time", _draw(results, scope))


def _times(
    results: Mapping[Cell, Result], algorithm: str, model: str, topology: str, scope: Scope
) -> tuple[float, float] | None:
    """Seconds of one node's round: computation, communication."""
    cell = _cell(algorithm, model, scope)
    result = results.get(cell)
    if result is None or "seconds" not in result:
        return None
    computation = result["seconds"]["processor"] / (result["rounds"] * cell.nodes)
    sent = bytes_of_round(result["shared_parameters"], topology, cell.nodes, scalar=cell.unit != "none")
    return computation, 8 * sent / scope.bandwidth


def bytes_of_round(parameters: int, topology: str, nodes: int, *, scalar: bool) -> int:
    """Sent by one node: its row (4 bytes a number) and a (8) to every peer, and the scalar S_i to everybody."""
    peers = int(parse(topology, nodes).weights(0).out_degree.max())
    return peers * (4 * parameters + 8) + (8 * (nodes - 1) if scalar else 0)


def _draw(results: Mapping[Cell, Result], scope: Scope) -> Any:
    fig, axes = figure(len(scope.models), columns=3)
    for axis, model in zip(axes, scope.models, strict=True):
        for color, algorithm in zip(("#777777", "#c05a00", "#0057a8"), _OWN, strict=True):
            ours, theirs = [], []
            for k, topology in enumerate(published.TOPOLOGIES):
                base = _times(results, "SGP", model, topology, scope)
                times = _times(results, algorithm, model, topology, scope)
                ours.append(sum(times) / sum(base) if times and base else float("nan"))
                theirs.append(published.TIME[algorithm, model][k] / published.TIME["SGP", model][k])
            axis.plot(published.TOPOLOGIES, ours, color=color, marker="o", label=algorithm)
            axis.plot(published.TOPOLOGIES, theirs, color=color, linestyle=":")
        axis.set(title=model, ylabel="time / time of SGP (dotted: paper)")
    axes[0].legend(fontsize=6)
    return fig
