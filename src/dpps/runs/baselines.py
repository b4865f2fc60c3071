"""Baselines: what joining gained and what privacy cost. The same run without noise, and without messages.

Baselines are computed on private data without noise, so no guarantee covers them:
they are for the eyes of those who hold the data, and exist in a simulation only, where nothing leaves.
"""

from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpps.errors import UsageError
from dpps.learning.evaluation import are_classes
from dpps.learning.sampling import NodeData
from dpps.noise.mechanisms import Mechanism
from dpps.noise.source import NoiseSource, Outgoing
from dpps.privacy.promise import Contract
from dpps.privacy.units import Calibration
from dpps.runs.callbacks import Callback, RoundLog
from dpps.runs.deployment import Simulation
from dpps.runs.results import outputs
from dpps.runs.run import Run
from dpps.runs.summary import DATA, Scores, Summary
from dpps.sensitivity import Unclipped
from dpps.tasks import Estimate, Metric, measure
from dpps.tasks import compare as changes
from dpps.tasks.metrics import Set
from dpps.topology import Topology, Weights

NO_PRIVACY, ALONE, CONSTANT = "no privacy", "alone", "constant"
_NAMES = {"test": ("test_accuracy", "accuracy_by_node"), "own": ("own_accuracy", "own_accuracy_by_node")}
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
    """A copy of a run without noise: same rates, clipping, batches and start. Nothing is written.

    Args:
        run: the private run, started.
        alone: train each node by itself: nothing is exchanged, and the whole model is local.
        callbacks: called after every round.
    """

    def __init__(self, run: Run, *, alone: bool, callbacks: tuple[Callback, ...] = ()) -> None:
        if not isinstance(run.deployment, Simulation):
            raise UsageError(
                "baselines of a distributed run would be messages without noise: make them in a simulation, deployment=Simulation()"
            )
        self._calibration = _without_noise(run.nodes.calibration)
        self._alone = alone
        super().__init__(
            run.algorithm,
            run._data,
            topology=_Nobody(run.topology) if alone else run.topology,
            test=run.tests,
            held_out=run.held_out,
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

    def outputs(self) -> dict[str, list[Set]]:
        """As of any run; alone, every node has shared parameters of its own too."""
        return outputs(self, rows=self.nodes.shared_rows(self.state) if self._alone else None)

    def accuracies(self) -> dict[str, Any]:
        """As in summary.json, without what was not measured."""
        found: dict[str, Any] = {"accuracy_by_epoch": self.accuracy_by_epoch}
        for which, sets in self.outputs().items():
            if all(are_classes(targets) for _, targets in sets):
                mean, by_node = _NAMES[which]
                found[by_node] = [100 * int((o.argmax(-1) == t).sum()) / len(t) for o, t in sets]
                found[mean] = fmean(found[by_node])
        return {name: value for name, value in found.items() if value != []}

    def _check_data(self, data: NodeData, rows: Any) -> None:
        """The private run has looked at them, and alone nobody needs to be connected."""

    def _promise(self, first: Contract | None) -> tuple[Contract | None, Calibration | None]:
        """No promise, but the clipping and sampling of one."""
        return None, self._calibration

    def _evaluate_epoch(self, log: RoundLog) -> RoundLog:
        return log if self._alone else super()._evaluate_epoch(log)  # alone there is no common model

    def _advise_on_clip(self) -> None:
        """The private run has given it."""

    def _stops_here(self) -> bool:
        return self.stop_asked


def compare(run: Run, without_noise: Baseline, alone: Baseline) -> Scores:
    """The private run and its baselines, on the same examples; empty where nothing was measured."""
    task = run.algorithm.judged_as
    if task is None:
        return {}
    private, together, single = outputs(run), without_noise.outputs(), alone.outputs()
    found: Scores = {}
    for which in private:
        if task.about == "classes" and not all(are_classes(targets) for _, targets in private[which]):
            continue
        how = partial(measure, task, task.headline, common=which == "test")
        change = partial(changes, task, task.headline, common=which == "test")
        found[which] = {
            "alone": how(single[which]),
            "without noise": how(together[which]),
            "private": how(private[which]),
            "joining": change(single[which], together[which]),
            "privacy": change(together[which], private[which]),
            "both": change(single[which], private[which]),
        }
        same = None if run.nodes.data.targets is None else task.constant(run.nodes.data.targets)
        if same is not None and same.shape == private[which][0][0].shape[1:]:  # every class has an example
            targets = [targets for _, targets in private[which]]
            found[which][CONSTANT] = how([(same.expand(len(each), -1), each) for each in targets])
    return found


@dataclass(frozen=True)
class Gain:
    """What joining and privacy did to the headline metric of one node, or of all of them."""

    name: str
    metric: Metric
    alone: Estimate
    """Trained on the node's own data only."""
    without_noise: Estimate
    private: Estimate
    """This run."""
    joining: Estimate
    """From alone to together without noise."""
    privacy: Estimate
    """From no noise to this run's noise."""
    both: Estimate

    def text(self, found: Estimate) -> str:
        """A value as people read it."""
        return self.metric.text(found.value)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of what joining and privacy changed together, as it is shown."""
        scale, margin = 100.0 if self.metric.percent else 1.0, self.both.margin or 0.0
        return scale * (self.both.value - margin), scale * (self.both.value + margin)

    def step(self, before: Estimate, after: Estimate, change: Estimate) -> str:
        """From one to another, in words."""
        return f"{self.text(before)} -> {self.text(after)} ({self.verdict(change)})"

    def change(self, change: Estimate) -> str:
        """A change with its interval."""
        return self.metric.change(change.value, change.margin)

    def verdict(self, change: Estimate) -> str:
        """The same, and whether it shows anything."""
        return self.change(change) + ("" if change.shown else ": nothing is shown either way")

    def better(self, change: Estimate) -> bool:
        """Whether a change is for the better."""
        return (change.value > 0) == self.metric.higher


_PARTS = ("alone", "without noise", "private", "joining", "privacy", "both")


def gains(summary: Summary) -> tuple[list[Gain], list[Gain]]:
    """(of every node for which all is defined, of all together: all their examples pooled, and their mean); empty without baselines.

    On each node's own test data where there is such, because that is what a node joins for. On a common test set the models of
    all nodes are compared at once.
    """
    found = summary.comparisons
    if not found or summary.task is None:
        return [], []
    parts = [found["own" if "own" in found else "test"][name] for name in _PARTS]
    metric = summary.metric
    single = []
    for k in range(len(parts[0].by_node)):
        known = [each for part in parts if (each := part.by_node[k]) is not None]
        if len(known) == len(parts):
            single.append(Gain(summary.node_name(k), metric, *known))
    whole = [Gain("mean over the nodes", metric, *(part.mean for part in parts))]
    if parts[0].by_node:
        whole.insert(0, Gain("all test examples", metric, *(part.pooled for part in parts)))
    return single, whole


def measured_on(summary: Summary) -> str:
    """Which test examples `gains` is about."""
    return DATA["own" if "own" in (summary.comparisons or ()) else "test"]


def gained(summary: Summary) -> list[tuple[str, str]]:
    """Lines of a summary with baselines: what joining gained, what privacy cost, and both together for every node."""
    single, whole = gains(summary)
    if not whole:
        return []
    first = whole[0]
    cost = (
        f"{first.step(first.without_noise, first.private, first.privacy)}, from no noise to this run's noise"
    )
    cost = NO_COST if summary.privacy.unit == "none" else cost
    lines = [
        (
            "gain",
            f"of joining: {first.step(first.alone, first.without_noise, first.joining)}, from each node alone to all together "
            f"without noise, {measured_on(summary)}",
        ),
        ("cost", f"of privacy: {cost}"),
        (
            "together",
            f"{first.step(first.alone, first.private, first.both)}, from each node alone to this run",
        ),
    ]
    compared = summary.comparisons or {}
    constant = compared["own" if "own" in compared else "test"].get(CONSTANT)
    if constant is not None:
        lines.append(("", f"the same answer for everybody: {first.text(constant.pooled)}"))
    rows = [*whole[1:], *single] if single else []
    lines += [
        ("", f"{gain.name}, {gain.both.examples} examples: {gain.step(gain.alone, gain.private, gain.both)}")
        for gain in rows[: MOST_NODES + 1]
    ]
    if len(rows) > MOST_NODES + 1:
        lines.append(("", f"... ({len(single)} nodes; summary.json has them all)"))
    less = "" if first.metric.higher else ", less is better"
    return [*lines, ("", f"({first.metric.name}{less}; ±: {INTERVAL})")]


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
