"""How good the models of a started run are, and the models themselves. Nothing here is noised: it is for the nodes' own eyes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpps.disk import private_folder, write_private
from dpps.learning.algorithms import Algorithm
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
from dpps.learning.inputs import Batch, as_examples
from dpps.learning.preflight import check_examples
from dpps.runs.folder import model_name
from dpps.runs.summary import Metrics, Scores
from dpps.tasks.metrics import Set
from dpps.version import versions

if TYPE_CHECKING:
    from dpps.runs.run import Run

Examples = Dataset[Any] | tuple[Any, Tensor]
Found = TypeVar("Found")
METADATA = "dpps"
"""The entry of a model file's metadata that holds our JSON. One entry, so that equal runs give equal files."""


def as_evaluable(algorithm: Algorithm, device: str, data: Any, whose: str) -> tuple[Any, Tensor]:
    """Examples to evaluate on as (inputs, targets), checked as training examples are."""
    x, target = as_examples(data, whose, algorithm.model, algorithm.loss)
    examples = TensorDataset(x, target) if isinstance(x, Tensor) else Batch(x, target)
    check_examples([examples], [whose], algorithm.model, algorithm.loss)
    return move(x, torch.device(device)), move(target, torch.device(device))


def _sets(run: Run, *, classes: bool = False) -> dict[str, Sequence[tuple[Any, Tensor]]]:
    """What each node is tested on: the test set ("test") and examples held out of its own data ("own"). With `classes`, only
    those whose targets are classes."""
    test = [run.tests] * len(run.state.local) if run.tests else []
    found = {which: data for which, data in (("test", test), ("own", run.held_out)) if data}
    return {k: data for k, data in found.items() if not classes or all(are_classes(t) for _, t in data)}


def _measure(run: Run, measure: Callable[..., Found], otherwise: Found, *arguments: Any) -> Found:
    """The value of a function of the nodes' models, or `otherwise` if it fails and the run must go on."""
    call = partial(measure, run.nodes.engine, run.shared, run.state.local, *arguments)
    return unless_it_fails(call, otherwise, hidden=run.protocol.hides_failures)


def accuracies_on_own_data(run: Run) -> list[float]:
    """Accuracy of each node on its own held-out examples, in percent."""
    return _measure(run, own_accuracies, [], _sets(run, classes=True).get("own", ()))


def metrics_by_node(run: Run) -> Metrics:
    """The requested metrics, by data ("test", "own"), name and node."""
    if not run.metrics:
        return {}
    asked, nothing = (run.metrics, run.undefined, run.algorithm.judged_as), dict[str, list[float | None]]()
    found = {which: _measure(run, measured, nothing, *asked, data) for which, data in _sets(run).items()}
    return {which: metrics for which, metrics in found.items() if metrics}


def rows_by_class(run: Run) -> dict[str, list[dict[str, Any]]]:
    """By data ("test", "own"): one row per class, over all nodes in this process, if metrics were requested."""
    names = (run.description.input or {}).get("classes")
    return {
        which: [
            {"class": str(names[row.label] if names else row.label), **row.to_json()}
            for row in _measure(run, by_class, None, data) or ()
        ]
        for which, data in _sets(run, classes=True).items()
        if run.metrics
    }


def outputs(
    run: Run, wanted: Collection[str] = ("test", "own"), rows: Tensor | None = None
) -> dict[str, list[Set]]:
    """By data ("test", "own") and node: the outputs of the node's model for every example, and the targets. `rows`: the shared
    parameters of every node, if not their average."""
    engine, local, found = run.nodes.engine, run.local, dict[str, list[Set]]()
    alike = rows is None and not local.shape[1] and not engine.state()  # all nodes have the same model
    rows = run.shared.expand(len(local), -1) if rows is None else rows
    for which, data in _sets(run).items():
        if which in wanted:
            same = alike and which == "test"
            sets = [
                (outputs_of(engine, k, rows[k], local[k], x, len(targets)), targets)
                for k, (x, targets) in enumerate(data[:1] if same else data)
            ]
            found[which] = sets * len(data) if same else sets
    return found


def scores(run: Run) -> Scores:
    """By data ("test", "own") and metric, over the nodes in this process: pooled, mean and by node, with standard errors.

    The test set is scored if the task has no accuracy, or metrics were requested. Empty for a custom loss without a task.
    """
    task, sets = run.algorithm.judged_as, _sets(run)
    wanted = {"own"} if are_classes_only(sets) and not run.metrics else {"own", "test"}
    if task is None or not wanted & sets.keys():
        return {}
    named = {**{name: task.metric(name) for name in task.metrics}, **run.metrics}
    nothing: dict[str, list[Set]] = {}
    found = unless_it_fails(partial(outputs, run, wanted), nothing, hidden=run.protocol.hides_failures)
    return {
        which: scores_of(task, named, each, common=which == "test")
        for which, each in found.items()
        if task.about != "classes" or which in _sets(run, classes=True)
    }


def state_dicts(run: Run) -> Iterator[dict[str, Tensor]]:
    """Parameters and buffers of every node in this process, without buffers that the model does not save itself."""
    shared, saved = run.shared, run.algorithm.model.state_dict().keys()
    kept = {n: b for n, b in run.nodes.engine.state().items() if n.partition(".")[2] in saved}
    for k, local in enumerate(run.state.local):
        named = run.algorithm.partition.views(shared, local)
        prefix = f"{k}."
        buffers = {n.removeprefix(prefix): b for n, b in kept.items() if n.startswith(prefix)}
        yield {name: tensor.detach().clone().contiguous() for name, tensor in (named | buffers).items()}


def save_models(run: Run, folder: Path) -> list[Path]:
    """Write every node's model as `node-K.safetensors`, with what is needed to use it."""
    private_folder(folder)
    paths, model, partition = [], run.algorithm.model, run.algorithm.partition
    facts = {
        "model": run.description.build or {"class": f"{type(model).__module__}:{type(model).__qualname__}"},
        "input": run.description.input,
        "shared": [slot.name for slot in partition.shared],
        "local": [slot.name for slot in partition.local],
        "privacy": run.privacy.to_json(),
        "versions": versions(),
    }
    for node, state in zip(run.nodes.rows, state_dicts(run), strict=True):
        paths.append(folder / model_name(node))
        write_private(paths[-1], save(state, {METADATA: json.dumps({"node": node, **facts})}))
    return paths
