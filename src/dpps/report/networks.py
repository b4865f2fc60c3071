"""The network of a run, phase by phase, as the page draws it."""

from typing import Any

import numpy as np

from dpps.report.story import Story
from dpps.topology import Topology

SHOWN_ROUNDS = 12
"""How many rounds are shown of a topology that never repeats."""
SHOWN_PHASES = 32
"""How many phases are shown at most."""
SHOWN_EDGES = 1_200
"""A phase with more edges is drawn with the edges of a few senders only."""


def network(story: Story) -> dict[str, Any]:
    """Nodes, phases with their edges (sender, receiver, weight), and what to say about them."""
    topology = story.topology
    count = min(topology.period or SHOWN_ROUNDS, SHOWN_PHASES)
    phases = [_phase(topology, t) for t in range(count)]
    return {
        "name": story.name,
        "label": repr(topology),
        "nodes": topology.nodes,
        "phases": phases,
        "note": _note(topology, count, story.sync_every, any(p["thinned"] for p in phases)),
    }


def _phase(topology: Topology, t: int) -> dict[str, Any]:
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
    return {
        "title": _title(topology, t),
        "edges": [
            [int(s), int(r), float(f"{v:.4g}")] for s, r, v in zip(senders, receivers, values, strict=True)
        ],
        "away": [] if present is None else np.flatnonzero(~present).tolist(),
        "thinned": thinned,
    }


def _title(topology: Topology, t: int) -> str:
    period = topology.period
    if period is None:
        return f"round {t}"
    if period == 1:
        return "every round"
    return f"phase {t + 1} of {period}: rounds {t}, {t + period}, {t + 2 * period}, ..."


def _note(topology: Topology, shown: int, sync_every: int, thinned: bool) -> str:
    parts = []
    if topology.period is None:
        parts.append(f"The network never repeats; its first {shown} rounds are shown.")
    elif topology.period > shown:
        parts.append(f"The first {shown} of {topology.period} phases are shown.")
    if sync_every:
        parts.append(f"Every {sync_every} rounds all nodes average with everybody instead.")
    if thinned:
        parts.append("There are too many links to draw: those of a few senders are shown.")
    return " ".join(parts)
