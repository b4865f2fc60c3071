"""The network of a run, phase by phase, as the page draws it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dpps.report.reading import RunRecord
from dpps.topology import Topology

SHOWN_ROUNDS = 12
"""How many rounds are shown of a topology that never repeats."""
SHOWN_PHASES = 32
"""How many phases are shown at most."""
SHOWN_EDGES = 1_200
"""A phase with more edges is drawn with the edges of a few senders only."""
ALL_EDGES = 4_000
"""Phases are left out when all of them together would have more edges than this."""
SPELLED_EDGES = 400
"""A phase with more links is not spelled out."""

CIRCLE = 176.0
"""Radius of the circle on which nodes stand, counted clockwise from the top."""


@dataclass(frozen=True)
class Edge:
    """A link and its line in the drawing."""

    sender: int
    receiver: int
    weight: float
    path: str


@dataclass(frozen=True)
class Phase:
    """Who sends to whom in one round."""

    title: str
    edges: list[Edge]
    away: list[int]
    thinned: bool

    @property
    def spelled(self) -> str:
        """The links in words, as far as they can be read."""
        if len(self.edges) > SPELLED_EDGES:
            return f"{len(self.edges)} links"
        receivers: dict[int, list[int]] = {}
        for edge in self.edges:
            receivers.setdefault(edge.sender, []).append(edge.receiver)
        return "; ".join(f"{s} → {', '.join(map(str, sorted(receivers[s])))}" for s in sorted(receivers))


@dataclass(frozen=True)
class Network:
    """Nodes, phases with their edges, and what to say about them."""

    name: str
    label: str
    note: str
    nodes: list[tuple[float, float]]
    radius: float
    phases: list[Phase]


def networks(runs: Sequence[RunRecord]) -> list[Network]:
    """One drawing for each different network; what is said about it may differ between its runs."""
    different: dict[str, list[Network]] = {}
    for run in runs:
        if run.topology is None:
            continue
        label = repr(run.topology)
        same = different.setdefault(label, [])
        same.append(network(run) if not same else replace(same[0], name=run.name, note=_note(run, same[0])))
    return [_merged(same) for same in different.values()]


def network(run: RunRecord) -> Network:
    """The network of one run."""
    topology = run.topology
    assert topology is not None
    places = [_place(node, topology.nodes) for node in range(topology.nodes)]
    radius = 14.0 if topology.nodes <= 24 else 8.0 if topology.nodes <= 64 else 3.0
    phases: list[Phase] = []
    while len(phases) < min(topology.period or SHOWN_ROUNDS, SHOWN_PHASES):
        phase = _phase(topology, len(phases), places, radius)
        if phases and sum(len(p.edges) for p in (*phases, phase)) > ALL_EDGES:
            break
        phases.append(phase)
    drawn = Network(run.name, repr(topology), "", places, radius, phases)
    return replace(drawn, note=_note(run, drawn))


def _merged(same: Sequence[Network]) -> Network:
    notes = [drawn.note for drawn in same]
    differ = " ".join(f"{drawn.name}: {drawn.note}" for drawn in same if drawn.note)
    note = notes[0] if len(set(notes)) == 1 else differ
    return replace(same[0], name=", ".join(drawn.name for drawn in same), note=note)


def _phase(topology: Topology, t: int, places: Sequence[tuple[float, float]], radius: float) -> Phase:
    weights = topology.weights(t)
    links = weights.receivers != weights.senders
    senders, receivers, values = weights.senders[links], weights.receivers[links], weights.values[links]
    thinned = senders.size > SHOWN_EDGES
    if thinned:
        few = max(1, SHOWN_EDGES * topology.nodes // senders.size)
        chosen = np.linspace(0, topology.nodes, few, endpoint=False).astype(int)
        shown = np.isin(senders, chosen)
        senders, receivers, values = (part[shown][:SHOWN_EDGES] for part in (senders, receivers, values))
    present = topology.present(t)
    ends = zip(senders.tolist(), receivers.tolist(), values.tolist(), strict=True)
    edges = [Edge(s, r, value, _curve(places[s], places[r], radius + 3)) for s, r, value in ends]
    away = [] if present is None else np.flatnonzero(~present).tolist()
    return Phase(_title(topology, t), edges, away, thinned)


def _place(node: int, nodes: int) -> tuple[float, float]:
    angle = 2 * math.pi * node / nodes
    return round(CIRCLE * math.sin(angle), 1), round(-CIRCLE * math.cos(angle), 1)


def _curve(start: tuple[float, float], end: tuple[float, float], gap: float) -> str:
    """Bent a little to the right, so that a link and the one back do not lie on each other; it ends `gap` before the nodes."""
    (x1, y1), (x2, y2) = start, end
    length = math.hypot(x2 - x1, y2 - y1)
    bend = min(26.0, 0.14 * length) / length
    mx, my = (x1 + x2) / 2 + bend * (y2 - y1), (y1 + y2) / 2 - bend * (x2 - x1)
    cut = gap / math.hypot(mx - x1, my - y1)
    ax, ay, bx, by = x1 + cut * (mx - x1), y1 + cut * (my - y1), x2 + cut * (mx - x2), y2 + cut * (my - y2)
    return f"M{ax:.1f} {ay:.1f}Q{mx:.1f} {my:.1f} {bx:.1f} {by:.1f}"


def _title(topology: Topology, t: int) -> str:
    period = topology.period
    if period is None:
        return f"round {t}"
    if period == 1:
        return "every round"
    return f"phase {t + 1} of {period}: rounds {t}, {t + period}, {t + 2 * period}, ..."


def _note(run: RunRecord, drawn: Network) -> str:
    assert run.topology is not None
    parts, period, shown = [], run.topology.period, len(drawn.phases)
    if period is None:
        parts.append(f"The network never repeats; its first {shown} rounds are shown.")
    elif period > shown:
        parts.append(f"The first {shown} of {period} phases are shown.")
    if run.sync_every:
        parts.append(f"Every {run.sync_every} rounds all nodes average with everybody instead.")
    if any(phase.thinned for phase in drawn.phases):
        parts.append("There are too many links to draw: those of a few senders are shown.")
    return " ".join(parts)
