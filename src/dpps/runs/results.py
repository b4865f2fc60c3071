"""The results of a run so far: the models of the nodes in this process, and their accuracy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpps.disk import private_folder, write_private
from dpps.learning.algorithms import Algorithm, TrainState
from dpps.learning.evaluation import (
    are_classes,
    are_classes_only,
    by_class,
    measured,
    outputs_of,
    own_accuracies,
    scores_of,
    unless_it_fails,
)
from dpps.learning.gradients.calling import move
from dpps.learning.inputs import Batch, as_examples, check_examples
from dpps.learning.nodes import Nodes
from dpps.privacy.promise import Privacy
from dpps.runs.folder import model_name
from dpps.runs.summary import Description, Metrics, Scores
from dpps.tasks import Metric
from dpps.tasks.metrics import Set
from dpps.version import versions

Examples = Dataset[Any] | tuple[Any, Tensor]
Measured = TypeVar("Measured")
METADATA = "dpps"
"""Where a model file's metadata keeps what we say: one entry of JSON, so that equal runs give equal files."""


def as_evaluable(algorithm: Algorithm, device: str, data: Any, whose: str) -> tuple[Any, Tensor]:
    """Examples to evaluate on as (inputs, targets), checked as training examples are."""
    x, target = as_examples(data, whose, algorithm.model, algorithm.loss)
    examples = TensorDataset(x, target) if isinstance(x, Tensor) else Batch(x, target)
    check_examples([examples], [whose], algorithm.model, algorithm.loss)
    return move(x, torch.device(device)), move(target, torch.device(device))


class Results:
    """The models of the nodes held here as they stand after every round, and how good they are on the test set of all and on examples held
    out of each node's own data. Nothing here is noised: it is for the nodes' own eyes."""

    def __init__(
        self,
        nodes: Nodes,
        state: TrainState,
        tests: tuple[Any, Tensor] | None,
        held_out: Sequence[tuple[Any, Tensor]],
        metrics: Mapping[str, Metric],
    ) -> None:
        self.tests, self.held_out = tests, held_out
        self._nodes, self._state, self._metrics = nodes, state, metrics
        self._algorithm = nodes.algorithm
        self._undefined: set[tuple[str, int]] = set()

    @property
    def shared(self) -> Tensor:
        """The average of the nodes' shared parameters."""
        return self._nodes.mean_shared(self._state)

    @property
    def local(self) -> Tensor:
        """The local parameters, one row per node, as a copy."""
        return self._state.local.clone()

    @property
    def own_statistics(self) -> bool:
        """Whether nodes keep statistics of their own data (buffers, as BatchNorm has them), without noise, in their models."""
        return bool(self._nodes.engine.state())

    @property
    def held_out_examples(self) -> int:
        """How many examples are held out of the nodes' own data."""
        return sum(len(targets) for _, targets in self.held_out)

    # How good they are

    def _sets(self) -> dict[str, Sequence[tuple[Any, Tensor]]]:
        """What every node held here is tested on: the test set ("test"), and what was held out of its own data ("own")."""
        test = [self.tests] * len(self._state.local) if self.tests else []
        return {which: data for which, data in (("test", test), ("own", self.held_out)) if data}

    def _class_sets(self) -> dict[str, Sequence[tuple[Any, Tensor]]]:
        """Those whose targets are classes."""
        return {k: data for k, data in self._sets().items() if all(are_classes(t) for _, t in data)}

    @property
    def own_accuracy_by_node(self) -> list[float]:
        """Percent."""
        return self._measured(own_accuracies, [], self._class_sets().get("own", ()))

    @property
    def metrics_by_node(self) -> Metrics:
        """The metrics asked for: by data ("test", "own"), name and node."""
        if not self._metrics:
            return {}
        asked = self._metrics, self._undefined, self._algorithm.judged_as
        nothing: dict[str, list[float | None]] = {}
        found = {
            which: self._measured(measured, nothing, *asked, data) for which, data in self._sets().items()
        }
        return {which: metrics for which, metrics in found.items() if metrics}

    def _measured(self, measure: Callable[..., Measured], otherwise: Measured, *arguments: Any) -> Measured:
        """What a function of the nodes' models gives; something else where it fails and the run must go on."""
        models = self._nodes.engine, self.shared, self._state.local
        hidden = self._nodes.protocol.hides_failures
        return unless_it_fails(partial(measure, *models, *arguments), otherwise, hidden=hidden)

    def by_class(self, names: Sequence[object] | None) -> dict[str, list[dict[str, Any]]]:
        """By data ("test", "own"): a row for every class, of the nodes held here together, where metrics are asked for."""
        if not self._metrics:
            return {}
        found = {}
        for which, data in self._class_sets().items():
            found[which] = [
                {"class": str(names[row.label] if names else row.label), **row.to_json()}
                for row in self._measured(by_class, None, data) or ()
            ]
        return found

    def outputs(self, wanted: Collection[str] = ("test", "own")) -> dict[str, list[Set]]:
        """By data ("test", "own") and node: what the node's model answers to every example, and the targets."""
        engine, shared, local = self._nodes.engine, self.shared, self.local
        found = {}
        alike = not local.shape[1] and not engine.state()  # all nodes have the same model
        for which, data in self._sets().items():
            if which not in wanted:
                continue
            same = alike and which == "test"
            sets = [
                (outputs_of(engine, k, shared, local[k], x, len(targets)), targets)
                for k, (x, targets) in enumerate(data[:1] if same else data)
            ]
            found[which] = sets * len(data) if same else sets
        return found

    def scores(self) -> Scores:
        """By data ("test", "own") and metric, of the nodes held here: pooled, mean and by node, with standard errors. On the test set
        where the task has no accuracy, or metrics are asked for. Empty where only the metrics of a loss of one's own know what is good."""
        task = self._algorithm.judged_as
        wanted = {"own"} if are_classes_only(self._sets()) and not self._metrics else {"own", "test"}
        if task is None or not wanted & self._sets().keys():
            return {}
        named = {**{name: task.metric(name) for name in task.metrics}, **self._metrics}
        nothing: dict[str, list[Set]] = {}
        hidden = self._nodes.protocol.hides_failures
        sets = unless_it_fails(partial(self.outputs, wanted), nothing, hidden=hidden)
        return {
            which: scores_of(task, named, found, common=which == "test")
            for which, found in sets.items()
            if (task.about != "classes" or which in self._class_sets())
        }

    # The models

    def models(self) -> list[nn.Module]:
        """One trained model per node: the averaged shared parameters, and the node's own local parameters
        and buffers."""
        made = []
        for state in self._state_dicts():
            model = copy.deepcopy(self._algorithm.model)
            model.load_state_dict(state, strict=False)
            made.append(model.eval())
        return made

    def state_dict(self, k: int) -> dict[str, Tensor]:
        """Parameters and buffers of the k-th node in this process."""
        return next(islice(self._state_dicts(), k, None))

    def _state_dicts(self) -> Iterator[dict[str, Tensor]]:
        """Of every node held here; what they have in common is averaged once. Buffers that a model does not save itself are
        left out."""
        shared, saved = self.shared, self._algorithm.model.state_dict().keys()
        kept = {n: b for n, b in self._nodes.engine.state().items() if n.partition(".")[2] in saved}
        for k in range(len(self._state.local)):
            named = self._algorithm.partition.views(shared, self._state.local[k])
            prefix = f"{k}."
            buffers = {n.removeprefix(prefix): b for n, b in kept.items() if n.startswith(prefix)}
            yield {name: tensor.detach().clone().contiguous() for name, tensor in (named | buffers).items()}

    def save(self, folder: Path, description: Description, privacy: Privacy) -> list[Path]:
        """Write every node's model as `node-K.safetensors`, with what is needed to use it."""
        private_folder(folder)
        paths, model, partition = [], self._algorithm.model, self._algorithm.partition
        facts = {
            "model": description.build or {"class": f"{type(model).__module__}:{type(model).__qualname__}"},
            "input": description.input,
            "shared": [slot.name for slot in partition.shared],
            "local": [slot.name for slot in partition.local],
            "privacy": privacy.to_json(),
            "versions": versions(),
        }
        for node, state in zip(self._nodes.rows, self._state_dicts(), strict=True):
            paths.append(folder / model_name(node))
            write_private(paths[-1], save(state, {METADATA: json.dumps({"node": node, **facts})}))
        return paths
