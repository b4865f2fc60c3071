"""What did joining gain, and what did privacy cost? The same run without its noise, and without its messages.

Baselines are computed on private data without noise, so no guarantee covers them:
they are for the eyes of those who hold the data, and exist in a simulation only, where nothing leaves.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpps.errors import UsageError
from dpps.learning.batches import NodeData
from dpps.learning.evaluation import accuracy_of
from dpps.noise.mechanisms import Mechanism
from dpps.noise.source import NoiseSource, Outgoing
from dpps.privacy.contract import Contract
from dpps.privacy.units import Calibration
from dpps.runs.deployment import Here
from dpps.runs.run import Callback, Run
from dpps.sensitivity import Unclipped
from dpps.topology import Topology, Weights

NO_PRIVACY, ALONE = "no privacy", "alone"
OWN_EYES = "computed on the nodes' data without noise: for your own eyes, no guarantee covers them"


class Baseline(Run):
    """A run as another one was, with the same rates, clipping, batches and start, but without noise; nothing is written.

    Args:
        run: the private run, started.
        alone: every node for itself: nothing is exchanged, and all of its model is its own.
        callbacks: called after every round.
    """

    def __init__(self, run: Run, *, alone: bool, callbacks: tuple[Callback, ...] = ()) -> None:
        if not isinstance(run.where, Here):
            raise UsageError(
                "baselines of a distributed run would be messages without noise: make them in a simulation, where=Here()"
            )
        self._calibration = _without_noise(run.nodes.calibration)
        self._alone, self._common_tests = alone, run._tests
        super().__init__(
            run.algorithm,
            run._data,
            topology=_Nobody(run.topology) if alone else run.topology,
            test=None if alone else run._tests,
            held_out=run._held_out,
            where=Here(),
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

    def accuracies(self) -> dict[str, Any]:
        """As in summary.json, without what was not measured."""
        if not self._alone:
            found: dict[str, Any] = {
                "test_accuracy": self.accuracy,
                "accuracy_by_epoch": self.accuracy_by_epoch,
                "accuracy_by_node": self.accuracy_by_node,
            }
            own = self.own_accuracy_by_node
        else:
            rows = self.nodes.shared_rows(self.state)
            tests = self._common_tests
            by_node = [self._accuracy(k, rows, tests) for k in range(len(rows))] if tests else []
            found = {"test_accuracy": fmean(by_node) if by_node else None, "accuracy_by_node": by_node}
            own = [self._accuracy(k, rows, examples) for k, examples in enumerate(self._held_out)]
        found |= {"own_accuracy": fmean(own) if own else None, "own_accuracy_by_node": own}
        return {name: value for name, value in found.items() if value not in (None, [])}

    def _accuracy(self, k: int, rows: Tensor, examples: tuple[Tensor, Tensor]) -> float:
        return accuracy_of(self.nodes.engine, k, rows[k], self.local[k], *examples)

    def _check_data(self, data: NodeData, rows: Any) -> None:
        """The private run has looked at them, and alone nobody needs to be connected."""

    def _promise(self, first: Contract | None) -> tuple[Contract | None, Calibration | None]:
        """No promise, but the clipping and sampling of one."""
        return None, self._calibration

    def _advise_on_clip(self) -> None:
        """The private run has told."""

    def _somebody_stops(self) -> bool:
        return self._stop_asked


def gained(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Two lines of a summary with baselines: what joining gained, and what privacy cost; none where nothing was measured.

    On each node's own test data where there is such, because that is what a node joins for; otherwise on the test set.
    """
    kinds = (("own_accuracy", "on each node's own test data"), ("test_accuracy", "on the test set"))
    together, alone = told["baselines"][NO_PRIVACY], told["baselines"][ALONE]
    for name, where in kinds:
        if told[name] is not None and name in together and name in alone:
            joint, single, private = together[name], alone[name], told[name]
            gain = f"of joining: {_change(single, joint)}, from each node alone to all together without noise, {where}"
            cost = f"of privacy: {_change(joint, private)}, from no noise to this run's noise"
            if told["privacy"]["unit"] == "none":
                cost = "of privacy: nothing, there is none"
            examples = told.get("held_out_examples") if name == "own_accuracy" else None
            doubt = [("", f"({chance(private, examples)})")] if examples else []
            return [("gain", gain), ("cost", cost), *doubt]
    return []


def _change(before: float, after: float) -> str:
    return f"{before:.2f} % -> {after:.2f} % ({after - before:+.2f} points)"


def chance(accuracy: float, examples: int) -> str:
    """How far to trust accuracies in percent measured on so few examples: two standard errors."""
    share = min(max(accuracy / 100, 0.05), 0.95)
    points = 200 * math.sqrt(share * (1 - share) / examples)
    return (
        f"measured on {examples} held-out examples: differences below about {points:.2g} points may be chance"
    )


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
