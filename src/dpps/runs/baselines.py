"""What did joining gain, and what did privacy cost? The same run without its noise, and without its messages.

Baselines are computed on private data without noise, so no guarantee covers them:
they are for the eyes of those who hold the data, and exist in a simulation only, where nothing leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpps.errors import UsageError
from dpps.learning.evaluation import (
    Change,
    are_classes,
    compare_by_node,
    compare_on_one_set,
    right_of,
)
from dpps.learning.sampling import NodeData
from dpps.noise.mechanisms import Mechanism
from dpps.noise.source import NoiseSource, Outgoing
from dpps.privacy.promise import Contract
from dpps.privacy.units import Calibration
from dpps.runs.callbacks import Callback
from dpps.runs.deployment import Simulation
from dpps.runs.run import Run
from dpps.runs.summary import DATA, Comparisons, Summary
from dpps.sensitivity import Unclipped
from dpps.topology import Topology, Weights

NO_PRIVACY, ALONE = "no privacy", "alone"
_NAMES = {
    "test": ("test_accuracy", "accuracy_by_node"),
    "own": ("own_accuracy", "own_accuracy_by_node"),
}
"""By data: what summary.json calls the mean over nodes, and the accuracies of the nodes."""
MOST_NODES = 12
"""That are listed one by one on the terminal."""
INTERVAL = (
    "95 % interval of the change on the same test examples, for these nodes and these trained models; "
    "another draw of the noise adds its own spread"
)
OWN_EYES = (
    "computed from the nodes' data without noise: the guarantee does not cover them, and whoever passes them on reveals "
    "something about those data"
)
NO_COST = "nothing, there is none"


class Baseline(Run):
    """A run as another one was, with the same rates, clipping, batches and start, but without noise; nothing is written.

    Args:
        run: the private run, started.
        alone: every node for itself: nothing is exchanged, and all of its model is its own.
        callbacks: called after every round.
    """

    def __init__(self, run: Run, *, alone: bool, callbacks: tuple[Callback, ...] = ()) -> None:
        if not isinstance(run.deployment, Simulation):
            raise UsageError(
                "baselines of a distributed run would be messages without noise: make them in a simulation, deployment=Simulation()"
            )
        self._calibration = _without_noise(run.nodes.calibration)
        self._alone, self._common_tests = alone, run.results.tests
        super().__init__(
            run.algorithm,
            run._data,
            topology=_Nobody(run.topology) if alone else run.topology,
            test=None if alone else run.results.tests,
            held_out=run.results.held_out,
            sync_every=0 if alone else run.sync_every,
            mixes=run.mixes,
            seed=run.seed,
            noise=_Silence(),
            declared_sizes=run.plan.declared_sizes,
            callbacks=callbacks,
            device=str(run.nodes.device),
        )
        # rates and batches that were left open depend on it, and must be the same
        self._planned_for = run._planned_for

    def right_answers(self) -> dict[str, list[Tensor]]:
        """As of any run; alone, every node has shared parameters of its own too."""
        if not self._alone:
            return self.results.right_answers()
        engine, rows, local = self.nodes.engine, self.nodes.shared_rows(self.state), self.local
        tests = [self._common_tests] * len(rows) if self._common_tests else []
        return {
            which: [right_of(engine, k, rows[k], local[k], *each) for k, each in enumerate(data)]
            for which, data in (("test", tests), ("own", self.results.held_out))
            if data and all(are_classes(targets) for _, targets in data)
        }

    def accuracies(self) -> dict[str, Any]:
        """As in summary.json, without what was not measured."""
        found: dict[str, Any] = {} if self._alone else {"accuracy_by_epoch": self.accuracy_by_epoch}
        for which, right in self.right_answers().items():
            mean, by_node = _NAMES[which]
            found[by_node] = [100 * int(each.sum()) / len(each) for each in right]
            found[mean] = fmean(found[by_node])
        return {name: value for name, value in found.items() if value != []}

    def _check_data(self, data: NodeData, rows: Any, evaluated: Any) -> None:
        """The private run has looked at them, and alone nobody needs to be connected."""

    def _promise(self, first: Contract | None) -> tuple[Contract | None, Calibration | None]:
        """No promise, but the clipping and sampling of one."""
        return None, self._calibration

    def _advise_on_clip(self) -> None:
        """The private run has given it."""

    def _stops_here(self) -> bool:
        return self._stop_asked


def compare(run: Run, without_noise: Baseline, alone: Baseline) -> Comparisons:
    """The private run and its baselines, on the same examples; empty where nothing was measured."""
    private = run.results.right_answers()
    together, single = without_noise.right_answers(), alone.right_answers()
    by = {"own": compare_by_node, "test": compare_on_one_set}
    return {
        which: {
            "joining": by[which](single[which], together[which]),
            "privacy": by[which](together[which], private[which]),
            "both": by[which](single[which], private[which]),
        }
        for which in private
    }


@dataclass(frozen=True)
class Gain:
    """What joining and privacy did to the accuracy of one node, or of all of them."""

    name: str
    alone: float
    """Percent: trained on the node's own data only."""
    without_noise: float
    private: float
    """Percent: this run."""
    joining: Change
    """From alone to together without noise."""
    privacy: Change
    """From no noise to this run's noise."""
    both: Change


def gains(summary: Summary) -> tuple[list[Gain], list[Gain]]:
    """(of every node, of all together: their mean, and all their examples pooled); empty without baselines.

    On each node's own test data where there is such, because that is what a node joins for. On a common test set the models of
    all nodes are compared at once.
    """
    found = summary.comparisons
    if not found or summary.baselines is None:
        return [], []
    which = "own" if "own" in found else "test"
    mean, by_node = _NAMES[which]
    changes = [found[which][name] for name in ("joining", "privacy", "both")]
    models: list[Mapping[str, Any]] = [summary.baselines[ALONE], summary.baselines[NO_PRIVACY], vars(summary)]
    single = [
        Gain(summary.node_name(k), *(each[by_node][k] for each in models), *(c.by_node[k] for c in changes))
        for k in range(len(changes[0].by_node))
    ]
    whole = [Gain("mean over the nodes", *(each[mean] for each in models), *(c.mean for c in changes))]
    if single:
        sizes = [gain.both.examples for gain in single]
        pooled = [np.average(each[by_node], weights=sizes).item() for each in models]
        whole.append(Gain("all test examples", *pooled, *(c.pooled for c in changes)))
    return single, whole


def measured_on(summary: Summary) -> str:
    """Which test examples `gains` is about."""
    return DATA["own" if "own" in (summary.comparisons or ()) else "test"]


def gained(summary: Summary) -> list[tuple[str, str]]:
    """Lines of a summary with baselines: what joining gained, what privacy cost, and both together for every node."""
    single, whole = gains(summary)
    if not whole:
        return []
    mean = whole[0]
    cost = f"{_change(mean.without_noise, mean.private, mean.privacy)}, from no noise to this run's noise"
    lines = [
        (
            "gain",
            f"of joining: {_change(mean.alone, mean.without_noise, mean.joining)}, from each node alone to all together "
            f"without noise, {measured_on(summary)}",
        ),
        ("cost", f"of privacy: {NO_COST if summary.privacy.unit == 'none' else cost}"),
        ("together", f"{_change(mean.alone, mean.private, mean.both)}, from each node alone to this run"),
    ]
    if single:
        pooled = whole[1].both
        shown = [
            f"{gain.name}, {gain.both.examples} examples: {_change(gain.alone, gain.private, gain.both)}"
            for gain in single[:MOST_NODES]
        ]
        more = [f"... ({len(single)} nodes; summary.json has them all)"] if len(single) > MOST_NODES else []
        lines += [
            ("", line) for line in (f"over all {pooled.examples} examples: {verdict(pooled)}", *shown, *more)
        ]
    return [*lines, ("", f"(±: {INTERVAL})")]


def _change(before: float, after: float, change: Change) -> str:
    return f"{before:.2f} % -> {after:.2f} % ({verdict(change)})"


def verdict(change: Change) -> str:
    """A change with its interval, and whether it shows anything."""
    return str(change) if change.shown else f"{change}: nothing is shown either way"


def _without_noise(calibration: Calibration | None) -> Calibration | None:
    """The same clipping. In the unit node-swap the sensitivity bounds nothing, and a network of lone nodes has none."""
    if calibration is None or calibration.sensitivity.base_is_public:
        return calibration
    return replace(calibration, sensitivity=Unclipped(1.0))


class _Silence(NoiseSource):
    """No noise, whatever is asked for. Messages stay as they are, so it must never leave this file."""

    def for_local_part(self) -> NoiseSource:
        return self

    def with_partners(self, partners: Any) -> NoiseSource:
        return self

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        return torch.zeros(len(out.nodes), dtype=torch.float64)


class _Nobody(Topology):
    """Nobody sends to anybody; who is away stays away."""

    def __init__(self, of: Topology) -> None:
        super().__init__(of.nodes, of.period)
        self._of = of

    def build(self, t: int) -> Weights:
        everyone = np.arange(self.nodes)
        return Weights.from_entries(self.nodes, everyone, everyone, np.ones(self.nodes))

    def present(self, t: int) -> NDArray[np.bool_] | None:
        return self._of.present(t)
