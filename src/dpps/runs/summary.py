"""A run in JSON: what it computes (`Description`) and its results (`Summary`, summary.json)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dpps.learning.algorithms import Algorithm
from dpps.privacy.accountant import finite_or_none
from dpps.privacy.promise import Privacy
from dpps.privacy.units import UNITS, Unit
from dpps.tasks import METRICS, TASKS, Estimates, Metric
from dpps.topology import Topology
from dpps.version import versions

if TYPE_CHECKING:
    from dpps.runs.run import Run

Metrics = dict[str, dict[str, list[float | None]]]
"""By data ("test", "own"), name and node."""
Scores = dict[str, dict[str, Estimates]]
"""By data ("test", "own") and metric."""

DATA = {"test": "on the test set", "own": "on each node's own test data"}
"""In words: what accuracies and metrics are measured on."""
_ROUNDS = 8  # of a topology that are compared
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True, repr=False)
class Summary:
    """The results of a run, for the nodes in this process. Its fields are the keys of summary.json.

    Accuracies, losses and metrics are computed from private data without noise. What was not measured is
    None or empty.
    """

    test_accuracy: float | None = None
    accuracy_by_epoch: Sequence[float] = ()
    accuracy_by_node: Sequence[float] = ()
    own_accuracy: float | None = None
    """Mean over the nodes, each on its own test data."""
    own_accuracy_by_node: Sequence[float] = ()
    held_out_examples: int | None = None
    metrics_by_node: Metrics = field(default_factory=dict)
    metrics_by_epoch: Sequence[Metrics] = ()
    by_class: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By data ("test", "own"): a row for every class, of the nodes together."""
    rounds: int
    clipped_share: float | None = None
    update_to_noise: float | None = None
    final_loss: float | None = None
    shared_parameters: int | None = None
    local_parameters: int | None = None
    own_statistics: bool = False
    """Whether the nodes' models keep statistics of their data, as BatchNorm does."""
    real_sensitivity_mean: float | None = None
    real_sensitivity_max: float | None = None
    estimated_sensitivity_mean: float | None = None
    estimated_sensitivity_max: float | None = None
    rounds_real_above_estimated: int | None = None
    privacy: Privacy
    bytes_sent_per_node: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    gradients: str | None = None
    split: Sequence[Sequence[int]] | None = None
    """How many training examples of each label every node has."""
    weights_left_fresh: Sequence[str] = ()
    schema: str | None = None
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the run chose because they were not given: epochs, batch size and rates, by option
    name."""
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    node_names: Sequence[str] | None = None
    """Names of the nodes in this process, if they have any: members of a federation, or folders of
    --node-data."""
    members: Sequence[str] | None = None
    """The names of all members of a federation."""
    bytes_sent_by_rank: Sequence[int] | None = None
    baselines: Mapping[str, Mapping[str, Any]] | None = None
    comparisons: Scores | None = None
    """Instead of a metric, changes of the headline: what joining gained ("joining"), what privacy cost ("privacy"), and "both"
    together."""
    task: str | None = None
    """What is predicted (`dpps.tasks`). None for a custom loss."""
    scores: Scores | None = None
    """The task's metrics and the requested ones, of all nodes, with standard errors."""

    def __repr__(self) -> str:
        """Results and privacy in one line; lists by epoch or node, options and versions are left out."""
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("gradients", "schema")}
        shown |= {name: getattr(self.privacy, name) for name in ("unit", "epsilon", "delta")}
        values = {k: v for k, v in shown.items() if isinstance(v, (int, float, str)) and v is not False}
        return f"Summary({', '.join(f'{name}={value!r}' for name, value in values.items())}, ...)"

    @classmethod
    def of(cls, run: Run) -> Summary:
        """The summary of a started run as it stands."""
        from dpps.runs.results import scores

        logs, nodes = run.log, run.nodes
        real = [log.real for log in logs if log.real is not None]
        estimated = [log.estimated for log in logs if log.estimated is not None]
        both = [
            (log.real, log.estimated) for log in logs if log.real is not None and log.estimated is not None
        ]
        return cls(
            test_accuracy=run.accuracy,
            accuracy_by_epoch=run.accuracy_by_epoch,
            accuracy_by_node=run.accuracy_by_node,
            own_accuracy=run.own_accuracy,
            own_accuracy_by_node=run.own_accuracy_by_node,
            held_out_examples=sum(len(targets) for _, targets in run.held_out),
            metrics_by_node=run.metrics_by_node,
            metrics_by_epoch=run.metrics_by_epoch,
            by_class=run.by_class,
            rounds=len(logs),
            clipped_share=run.clipped,
            update_to_noise=run.update_to_noise,
            final_loss=finite_or_none(logs[-1].loss) if logs else None,
            shared_parameters=nodes.partition.shared_size,
            local_parameters=nodes.partition.local_size,
            own_statistics=bool(nodes.engine.state()),
            real_sensitivity_mean=fmean(real) if real else None,
            real_sensitivity_max=max(real, default=None),
            estimated_sensitivity_mean=fmean(estimated) if estimated else None,
            estimated_sensitivity_max=max(estimated, default=None),
            rounds_real_above_estimated=sum(r > e for r, e in both) if both else None,
            privacy=run.privacy,
            bytes_sent_per_node=sum(log.bytes for log in logs),
            seconds=run.seconds,
            gradients=type(nodes.engine).__name__.lower(),
            split=run.description.split,
            weights_left_fresh=run.description.weights_left_fresh,
            schema=run.description.schema,
            chosen=_chosen(run),
            config=run.description.config,
            versions=versions(),
            node_names=_names(run),
            members=run.deployment.members or None,
            task=None if run.algorithm.judged_as is None else run.algorithm.judged_as.name,
            scores=scores(run) or None,
        )

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Summary:
        """From summary.json, also of an earlier version: keys that it did not have yet keep their defaults."""
        known = {name: found[name] for name in (f.name for f in fields(cls)) if name in found}
        known["privacy"] = Privacy(**{"epsilon_spent": found["privacy"]["epsilon"], **found["privacy"]})
        for key in ("comparisons", "scores"):
            if known.get(key):
                known[key] = {
                    which: {name: Estimates.from_json(each) for name, each in named.items()}
                    for which, named in known[key].items()
                    # version 0.2 wrote percentages
                    if all("value" in each["pooled"] for each in named.values())
                } or None
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        """For summary.json. What only some runs have is left out of the others'."""
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        found["privacy"] = self.privacy.to_json()
        for key in ("comparisons", "scores"):
            if found[key] is not None:
                found[key] = {
                    which: {name: each.to_json() for name, each in named.items()}
                    for which, named in found[key].items()
                }
        optional = {"held_out_examples", "schema", "node_names", "members", "bytes_sent_by_rank"}
        optional |= {"baselines", "comparisons", "task", "scores"}
        return {name: value for name, value in found.items() if value is not None or name not in optional}

    @property
    def headline(self) -> tuple[str, float | None]:
        """The main result of a run: on which data ("test", "own"), and the accuracy in percent so far. For
        a task without accuracy, its own metric, pooled over all examples."""
        if self.test_accuracy is None and self.accuracy_by_epoch:
            return "test", self.accuracy_by_epoch[-1]
        if self.test_accuracy is None and self.own_accuracy is not None:
            return "own", self.own_accuracy
        for which, found in (self.scores or {}).items():
            if self.metric.name != "accuracy" and self.metric.name in found:
                return which, found[self.metric.name].pooled.value
        return "test", self.test_accuracy

    @property
    def metric(self) -> Metric:
        """What `headline` is."""
        return METRICS["accuracy" if self.task is None else TASKS[self.task].metrics[0]]

    @property
    def headline_text(self) -> str | None:
        """The headline as people read it; None: not measured."""
        value = self.headline[1]
        if value is None:
            return None
        return self.metric.text(value / 100 if self.metric.percent else value)

    @property
    def accuracy_is_covered(self) -> bool:
        """Whether accuracy on public data may be published. If a unit does not clip each example, local
        parameters and statistics carry no noise, so nothing computed with them may be published."""
        if self.privacy.unit == "none" or not (self.local_parameters or self.own_statistics):
            return True
        if self.privacy.unit not in UNITS:  # what it clips and noises is not known
            return False
        unit = UNITS[self.privacy.unit]
        return unit.per_example or not unit.has_total

    def node_name(self, k: int) -> str:
        """What the k-th node held here is called."""
        return self.node_names[k] if self.node_names else f"node {k}"


def _names(run: Run) -> list[str] | None:
    """Of the nodes held here."""
    if run.deployment.members:
        return [run.deployment.members[row] for row in run.nodes.rows]
    return list(run.description.node_names) or None


def _chosen(run: Run) -> dict[str, Any]:
    plan = run.plan
    part = f"{plan.sampling[0]:.3g} of every node's examples"
    found = {
        "epochs": run.epochs,
        "batch-size": part if plan.batches and len(set(plan.sampling)) == 1 else plan.batch_size,
        "lr-shared": plan.lr_shared,
    }
    if run.nodes.partition.local_size:
        found["lr-local"] = plan.lr_local
    return {name: value for name, value in found.items() if run.description.config.get(name) is None}


@dataclass(frozen=True)
class Description:
    """What a run computes, and what else is known about it before it starts.

    Attributes:
        config: all settings, for summary.json and run.json.
        common: what all processes of a distributed run must have alike.
        fingerprint: equal for two runs that compute the same.
        model: checksums of the model's shape and of its start weights.
        build: the arguments of `dpps.models.build` that make the model again; None: it was made in Python.
        input: how a file becomes inputs of the model (shape, classes, features, scaling, columns); None: not known.
        sources: where the files of each node held here are; empty: not known, or public.
        contents: of data in memory, a checksum of each node's, where that of its tensors would not do.
        split: how many training examples of each label every node has; None: not known.
        weights_left_fresh: parameters that a file of weights did not have.
        schema: the schema of the nodes' own tables or images.
        node_names: of the nodes held here: the folders of --node-data; empty: they have none.
    """

    config: Mapping[str, Any]
    common: Mapping[str, Any]
    fingerprint: str
    model: Mapping[str, str]
    build: Mapping[str, Any] | None = None
    input: Mapping[str, Any] | None = None
    sources: tuple[str, ...] = ()
    split: Sequence[Sequence[int]] | None = None
    weights_left_fresh: Sequence[str] = ()
    schema: str | None = None
    node_names: Sequence[str] = ()
    contents: tuple[str, ...] = ()


def describe(
    algorithm: Algorithm, topology: Topology, unit: Unit | None, options: Mapping[str, Any]
) -> Description:
    """The description of a run made in Python; one made by options is described by its options."""
    named = {
        f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.name not in ("model", "shared")
    }
    promised: dict[str, Any] = (
        {f.name: getattr(unit, f.name) for f in fields(unit)} if is_dataclass(unit) else {}
    )
    config = {
        "algorithm": type(algorithm).__name__.lower(),
        "model": type(algorithm.model).__name__,
        "shared": [slot.name for slot in algorithm.partition.shared],
        **{name: _plain(value) for name, value in named.items()},
        "nodes": topology.nodes,
        "topology": _plain(topology),
        "unit": "none" if unit is None else unit.name,
        **{name: _plain(value) for name, value in (promised | dict(options)).items()},
    }
    new = ("task", "input_length", "pretrained")  # 0.2 did not have them, and its runs can be opened
    config = {name.replace("_", "-"): value for name, value in config.items() if value or name not in new}
    facts = model_facts(algorithm.model)
    unnamed = {"parameters": facts["model"], "weights": weights_of(topology)}
    before: dict[str, Any] = {"schedule": None}  # what 0.2 had here, so that its runs can be opened
    for name in ("trust", "sensitivity"):
        if is_dataclass(value := promised.get(name)) and not isinstance(value, type):
            parts = asdict(value)
            before[name] = _plain({k: v for k, v in parts.items() if v or k != "absentees"})
    return Description(config, config, fingerprint({**config, **unnamed, **before}), facts)


def model_facts(model: nn.Module) -> dict[str, str]:
    """Checksums of what the model looks like and of where it starts."""
    parameters = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    start = hashlib.sha256()
    for parameter in model.parameters():
        start.update(parameter.detach().cpu().numpy().tobytes())
    return {
        "model": hashlib.sha256(repr(parameters).encode()).hexdigest()[:16],
        "start weights": start.hexdigest()[:16],
    }


def weights_of(topology: Topology) -> str:
    """A checksum of who sends how much to whom in the first rounds: two graphs of your own may be called the same."""
    found = hashlib.sha256()
    for t in range(min(topology.period or _ROUNDS, _ROUNDS)):
        weights = topology.weights(t)
        for part in (weights.indptr, weights.senders, np.round(weights.values, 9)):
            found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()[:16]


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A short checksum of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """As JSON has it; what JSON has not, by its name, which is the same in every process: without its address in memory."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return getattr(value, "__qualname__", None) or _ADDRESS.sub("", str(value))
