"""Turns what a user passes as data, privacy and topology into what a run works with.

Mistakes in the data are found here, before anything is sent. The error is one line with the node and the remedy, not a
traceback from inside torch.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from dpps.data import FeatureSet, Images
from dpps.errors import UsageError, quoted, unknown
from dpps.learning.gradients.calling import (
    Loss,
    ModelLoss,
    call_model,
    ignored_label,
    in_short,
    move,
    pick,
    takes_classes,
    tensors_in,
)
from dpps.privacy.units import UNITS, Unit
from dpps.topology import Topology, parse

log = logging.getLogger(__name__)

_Whose = TypeVar("_Whose")

UNSCALED = 100.0
"""Larger inputs give a warning: models start from weights that expect values of about 1."""

_NOT_EACH = (
    "give one data set per node in a list; to deal one over N nodes: [Subset(data, part) for part in "
    "dpps.data.split(labels, N, 'iid', seed=0)]"
)


def as_topology(topology: Topology | str, nodes: int) -> Topology:
    """The topology itself, or by its name on the command line ("exp", "4-out")."""
    if isinstance(topology, str):
        return parse(topology, nodes)
    if not isinstance(topology, Topology):
        raise UsageError(
            f"topology is {topology!s:.80}: give one such as dpps.Exponential({nodes}), its name (exp, ring, 4-out), or "
            "dpps.from_networkx(graph)"
        )
    return topology


def as_unit(privacy: Unit | str | None) -> Unit | None:
    """The unit itself, or by its name with the defaults of the command line (epsilon 3 in total; node-swap: b = 5)."""
    if privacy is None or privacy == "none":
        return None
    if not isinstance(privacy, str):
        if isinstance(privacy, type) or not isinstance(privacy, Unit):
            raise UsageError(
                f"privacy is {privacy!r}: give a unit such as dpps.Record(epsilon=3), its name "
                f"({', '.join(UNITS.names())}), or None"
            )
        return privacy
    if privacy not in UNITS:
        raise unknown("unit", privacy, UNITS.names())
    return UNITS[privacy].usual()


def as_datasets(data: Any, model: nn.Module, loss: Loss) -> list[Dataset[Any]]:
    """One map-style data set per node, from data sets, DataLoaders or (inputs, targets) pairs.

    Tensors take the model's precision, and whole numbers kept as floats become labels where the loss needs labels.
    """
    if isinstance(data, (Dataset, DataLoader, Tensor, np.ndarray)) or _is_pair(data) or _is_batch(data):
        raise UsageError(f"the data is one {_kind(data)} for all nodes: {_NOT_EACH}")
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise UsageError(f"the data is {data!r:.80}: {_NOT_EACH}")
    if not data:
        raise UsageError(f"there is no data: {_NOT_EACH}")
    return [_as_dataset(each, f"node {k}", model, loss) for k, each in enumerate(data)]


def as_examples(data: Any, whose: str, model: nn.Module, loss: Loss) -> tuple[Any, Tensor]:
    """All examples of a data set as (inputs, targets): for evaluation. Inputs may be tensors in a tuple or a dictionary."""
    if isinstance(data, DataLoader):  # all of its examples are evaluated, in whatever batches
        accepted = {"batch_size": data.batch_size or 1, "shuffle": True, "generator": data.generator}
        _refuse_settings(data, whose, accepted)
        _tell_without_effect([data], whose)
    dataset = _as_dataset(data, whose, model, loss)
    if not len(dataset):  # type: ignore[arg-type]
        raise UsageError(f"{whose} has no examples: give at least one, or leave it out")
    if isinstance(dataset, (Images, FeatureSet)):
        return dataset.inputs(), dataset.labels
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[0], dataset.tensors[1]
    if isinstance(dataset, Batch):
        return dataset.x, dataset.target
    x, target = default_collate([dataset[i] for i in range(len(dataset))])  # type: ignore[arg-type]
    return x, target


def _as_dataset(data: Any, whose: str, model: nn.Module, loss: Loss) -> Dataset[Any]:
    if isinstance(data, DataLoader):  # which examples a round draws is the run's business
        data = data.dataset
    if isinstance(data, tuple) and any(hasattr(part, "to_numpy") for part in data):
        data = tuple(part.to_numpy() if hasattr(part, "to_numpy") else part for part in data)
    if _is_pair(data):
        data = TensorDataset(*_pair(data, whose))
    if _is_batch(data):
        data = Batch(*data)
    if hasattr(data, "iloc"):
        raise UsageError(
            f"the data of {whose} is a {_kind(data)}: say what its columns mean, dpps.data.table_dataset(frame, 'schema.toml'); "
            "dpps data describe drafts the schema"
        )
    by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not by_number or isinstance(data, (IterableDataset, Mapping, str, Tensor, np.ndarray)):
        raise UsageError(
            f"the data of {whose} is a {_kind(data)}: give a map-style data set (with len() and [index]), because a round "
            "draws examples by number; or (inputs, targets)"
        )
    if isinstance(data, TensorDataset) and len(data.tensors) != 2:
        raise UsageError(
            f"the data of {whose} is a TensorDataset of {len(data.tensors)} tensors: give two, inputs and targets; several "
            "inputs go into a tuple or a dictionary, ((a, b), targets)"
        )
    if isinstance(data, TensorDataset):
        x, target = data.tensors
        precision = next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)
        # features stay in half precision until a batch is read, which gives float32
        kept = isinstance(data, FeatureSet) and precision == torch.float32
        fitted = x.to(precision) if x.is_floating_point() and not kept else x, _as_labels(target, whose, loss)
        return data if fitted[0] is x and fitted[1] is target else TensorDataset(*fitted)
    if len(data) and isinstance(first := data[0], Mapping):
        data = _Named(data, _label_of(first, whose))
    dataset: Dataset[Any] = data
    return dataset


_IN_THE_DATA_SET = (
    "a run puts its own batches together, so do it in the data set's __getitem__, and give the data set"
)
_CHOSEN_BY_THE_RUN = (
    "a run chooses itself which examples a round uses, so give a data set of those that it may use"
)
_REMEDIES = {
    "batch_size": "give the algorithm the same batch_size",
    "shuffle": "the unit record draws at random, and otherwise a run takes the examples in the order of the data set: give it in the "
    "order that you want, such as Subset(data, torch.randperm(len(data)))",
    "sampler": _CHOSEN_BY_THE_RUN,
    "batch_sampler": _CHOSEN_BY_THE_RUN,
    "drop_last": _CHOSEN_BY_THE_RUN,
    "collate_fn": _IN_THE_DATA_SET,
    "worker_init_fn": "a run has no worker processes and would not call it, so prepare the data set before you give it",
    "generator": "a run draws its examples from its own seed, so leave it out, and give the run a seed: Run(..., seed=0)",
}
"""For settings of a DataLoader that a run would not follow."""

_SPEED = {
    "num_workers": 0,
    "pin_memory": False,
    "timeout": 0,
    "multiprocessing_context": None,
    "prefetch_factor": None,
    "persistent_workers": False,
    "pin_memory_device": "",
    "in_order": True,
}
"""Settings of a DataLoader about speed and worker processes, with their defaults."""


def check_loaders(data: Any, batch_size: object, *, random: bool) -> None:
    """Refuse DataLoaders to train on with settings that the run would not follow. Warn about those that concern speed only.

    Args:
        data: as given for the nodes.
        batch_size: of the algorithm.
        random: whether the run draws its examples at random.
    """
    loaders = dict[int, DataLoader[Any]]()
    for k, loader in enumerate(data if isinstance(data, (list, tuple)) else ()):
        if isinstance(loader, DataLoader):
            followed = {"batch_size": batch_size, **({"shuffle": True} if random else {})}
            _refuse_settings(loader, f"node {k}", followed, f", the algorithm {batch_size}")
            loaders[k] = loader
    _tell_without_effect(
        loaders.values(), "the nodes" if len(loaders) > 1 else f"node {min(loaders, default=0)}"
    )


def _tell_without_effect(loaders: Iterable[DataLoader[Any]], whose: str) -> None:
    """Name the settings about speed in one warning, however many DataLoaders have them."""
    found = dict.fromkeys(setting for loader in loaders for setting in _speed_settings(loader))
    if found:
        log.warning(
            "%s in the DataLoader of %s has no effect, because a run reads the examples in its own process: leave it out",
            ", ".join(found),
            whose,
        )


def _speed_settings(loader: DataLoader[Any]) -> Iterator[str]:
    for name, default in _SPEED.items():
        value = getattr(loader, name, default)
        implied = name == "prefetch_factor" and loader.num_workers and value == 2  # torch fills it in
        if value != default and not implied:
            yield f"{name}={value}"


def _refuse_settings(
    loader: DataLoader[Any], whose: str, followed: Mapping[str, object], more: str = ""
) -> None:
    for name, value in _settings(loader).items():
        if name not in followed or followed[name] != value:
            setting = f"{name}={getattr(value, '__qualname__', value)}{more if name == 'batch_size' else ''}"
            raise UsageError(f"the DataLoader of {whose} has {setting}: {_REMEDIES[name]}")


def _settings(loader: DataLoader[Any]) -> dict[str, object]:
    """The settings of a DataLoader that are not its defaults, except those about speed."""
    if isinstance(loader.dataset, IterableDataset):
        return {}  # refused as such
    sampler, found = loader.sampler, dict[str, object]()
    if loader.batch_size is None and loader.batch_sampler is not None:
        found["batch_sampler"] = type(loader.batch_sampler)
    elif loader.batch_size != 1:
        found["batch_size"] = loader.batch_size
    whole = isinstance(sampler, RandomSampler) and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(sampler, RandomSampler) and whole and not sampler.replacement:
        found["shuffle"] = True
    elif type(sampler) is not SequentialSampler:
        found["sampler"] = type(sampler)
    if loader.drop_last:
        found["drop_last"] = True
    if loader.batch_size is not None and loader.collate_fn is not default_collate:
        found["collate_fn"] = loader.collate_fn
    for name in ("worker_init_fn", "generator"):
        if (value := getattr(loader, name)) is not None:
            found[name] = value
    return found


class _Named(Dataset[Any]):
    """Examples that are dictionaries with their label inside, as the data sets of `datasets` have them: ({...}, label)."""

    def __init__(self, data: Any, label: str) -> None:
        self.data, self.label = data, label

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, k: int) -> tuple[Any, Any]:
        example = dict(self.data[k])
        target = example.pop(self.label)
        return {name: torch.as_tensor(value) for name, value in example.items()}, target


def _label_of(example: Mapping[str, Any], whose: str) -> str:
    texts = [name for name, value in example.items() if isinstance(value, str)]
    if texts:
        raise UsageError(
            f"the examples of {whose} hold a text, {texts[0]!r}: turn it into numbers (a tokenizer) and leave the text out"
        )
    for name in ("labels", "label"):
        if name in example:
            return name
    raise UsageError(
        f"the examples of {whose} are dictionaries of {quoted(list(map(str, example)))} without 'labels' or 'label': call the "
        "target so, or give pairs ({...}, target)"
    )


def _is_pair(data: Any) -> bool:
    both = isinstance(data, (tuple, list)) and len(data) == 2
    return both and all(isinstance(part, (Tensor, np.ndarray)) for part in data)


def _is_batch(data: Any) -> bool:
    """Whether this is (inputs, targets) with nested inputs, such as ({"input_ids": ..., "attention_mask": ...}, labels)."""
    if not isinstance(data, tuple) or len(data) != 2 or not isinstance(data[1], Tensor):
        return False
    parts = tensors_in(data[0])
    nested = isinstance(data[0], (Mapping, tuple, list))
    return nested and bool(parts) and all(len(part) == len(data[1]) for part in parts)


class Batch(Dataset[Any]):
    """Examples that lie in a batch already."""

    def __init__(self, x: Any, target: Tensor) -> None:
        self.x, self.target = x, target

    def __len__(self) -> int:
        return len(self.target)

    def __getitem__(self, k: int) -> tuple[Any, Tensor]:
        return pick(self.x, k), self.target[k]


def _pair(data: Any, whose: str) -> tuple[Tensor, Tensor]:
    odd = [part.dtype for part in data if isinstance(part, np.ndarray) and part.dtype.kind not in "biuf"]
    if odd:
        raise UsageError(
            f"the data of {whose} has values of the kind {odd[0]}: give numbers; tables with texts and gaps are read by "
            "dpps.data.table_dataset(frame, 'schema.toml')"
        )
    x, target = (
        part if isinstance(part, Tensor) else torch.from_numpy(np.require(part, requirements="W"))
        for part in data
    )
    if not x.ndim or not target.ndim or len(x) != len(target):
        raise UsageError(
            f"the data of {whose} has inputs of shape {tuple(x.shape)} and targets of shape {tuple(target.shape)}: "
            "give one target per example, in (inputs, targets)"
        )
    return x, target


def _as_labels(target: Tensor, whose: str, loss: Loss) -> Tensor:
    if not takes_classes(loss) or target.ndim != 1:
        return target
    if target.is_floating_point():
        odd = target[target != target.round()]
        if len(odd):
            raise UsageError(
                f"the labels of {whose} are fractions such as {float(odd[0]):.6g}: classes are numbered 0, 1, ...; "
                "for regression give loss=torch.nn.functional.mse_loss"
            )
    return target if target.dtype == torch.int64 else target.long()


def check_examples(
    datasets: Sequence[Dataset[Any]], whose: Sequence[str], model: nn.Module, loss: Loss
) -> None:
    """Check that the model and the loss accept the examples.

    Args:
        datasets: as `as_datasets` gives them.
        whose: "node 3" or "the test set", for the message.
    """
    for dataset, name in _first_of_each(datasets, whose):
        outputs, target = _try_model(dataset, name, model, loss)
        labels = target
        if isinstance(dataset, Images):
            labels = dataset.labels
        elif isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
            labels = dataset.tensors[1]
        if takes_classes(loss) and isinstance(outputs, Tensor) and outputs.ndim == 2:
            check_labels(labels, outputs.shape[1], name, ignored_label(loss))
        _try_loss(outputs, target, name, loss)


def _first_of_each(
    datasets: Sequence[Dataset[Any]], whose: Sequence[_Whose]
) -> Iterator[tuple[Dataset[Any], _Whose]]:
    """Every data set once, with the first who holds it: an audit gives the same one to thousands of nodes."""
    seen: set[int] = set()
    for dataset, name in zip(datasets, whose, strict=True):
        if id(dataset) not in seen:
            seen.add(id(dataset))
            yield dataset, name


def check_labels(labels: Any, outputs: int, whose: str, ignored: int | None = None) -> None:
    """Labels must be numbers of the model's outputs, but for one that the loss ignores."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1:
        return
    labels = labels if ignored is None else labels[labels != ignored]
    if not len(labels):
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= outputs:
        remedy = f"use a model with {high + 1} classes"
        if low < 0:
            remedy = "number the classes 0, 1, ..."
        elif low == 1 and high == outputs:
            remedy = "labels start at 0, so give labels - 1"
        raise UsageError(
            f"{whose}: labels run from {low} to {high} and the model has {outputs} outputs: {remedy}"
        )


def _try_model(dataset: Dataset[Any], whose: str, model: nn.Module, loss: Loss) -> tuple[Any, Any]:
    """The model's output for one example, and its target; None for a loss that calls the model itself. Nothing changes."""
    try:
        x, target = default_collate([dataset[0]])
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{whose}: an example of its {_kind(dataset)} is no pair (input, target): {in_short(error)}"
        ) from error
    where = next(model.parameters()).device
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            x, target = move(x, where), move(target, where)
            if isinstance(loss, ModelLoss):
                loss.of(model, {}, (x, target))
                return None, target
            outputs = call_model(model, {}, x)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        remedy = "give examples of the shape that the model was made for, or a model for this shape"
        whole = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
        if whole and not any(isinstance(module, nn.Embedding) for module in model.modules()):
            remedy = "give the inputs as floats, inputs.float()"
        raise UsageError(
            f"{whose}: the model cannot read an example of {_looks(x)}: {in_short(error)}; {remedy}"
        ) from error
    finally:
        for module, mode in training.items():
            module.training = mode
    return outputs, target


def _try_loss(outputs: Any, target: Any, whose: str, loss: Loss) -> None:
    if isinstance(loss, ModelLoss):
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")
            real = isinstance(outputs, Tensor) and outputs.is_floating_point()
            value = loss(outputs.detach().requires_grad_() if real else outputs, target)
    except UserWarning as error:
        raise UsageError(
            f"{whose}: outputs of {_looks(outputs)} and targets of {_looks(target)} would be compared each with all others: give "
            f"targets of the outputs' shape, such as targets.view(-1{''.join(f', {n}' for n in outputs.shape[1:])})"
        ) from error
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        remedy = "give targets of the shape and type that the loss expects, or another loss"
        if takes_classes(loss) and isinstance(target, Tensor) and target.shape[1:] == (1,):
            remedy = "give one class number per example, targets.squeeze(1)"
        raise UsageError(
            f"{whose}: the loss cannot compare an output of {_looks(outputs)} with a target of "
            f"{_looks(target)}: {in_short(error)}; {remedy}"
        ) from error
    if not isinstance(value, Tensor) or (isinstance(outputs, Tensor) and not value.requires_grad):
        raise UsageError(
            f"{whose}: the loss returns a {type(value).__name__} without a gradient: compute it from the outputs by torch alone, "
            "without item(), detach() or argmax()"
        )


def tell_unscaled(datasets: Sequence[Dataset[Any]], rows: Sequence[int]) -> None:
    """Warn about an example with NaN or infinity, and about the column of inputs that is farthest from 1."""
    for dataset, row in _first_of_each(datasets, rows):
        if (bad := _not_finite(dataset)) is not None:
            log.warning(
                "example %d of node %d (counted from 0) holds NaN or infinity and teaches nothing: repair or leave it out",
                bad,
                row,
            )
            break
    worst: tuple[float, int, int] = (UNSCALED, 0, 0)
    for dataset, row in _first_of_each(datasets, rows):
        x = dataset.tensors[0] if isinstance(dataset, TensorDataset) else torch.empty(0)
        if x.is_floating_point() and x.numel():
            columns = x.detach().reshape(len(x), -1).abs().nan_to_num(0.0, posinf=0.0).amax(0)
            column = int(columns.argmax())
            worst = max(worst, (float(columns[column]), row, column))
    if worst[0] > UNSCALED:
        log.warning(
            "inputs run up to %.4g (node %d, column %d counted from 0): scale them to about -1 to 1 by ranges that are no "
            "secret, and leave out numbers that only name a record, or the model learns little",
            *worst,
        )


def why_not_finite(dataset: Dataset[Any], failing: str) -> str:
    """The remedy for a loss that is not a number: the data where it holds such values, otherwise the rates."""
    if (bad := _not_finite(dataset)) is not None:
        return f"example {bad} of {failing} (counted from 0) holds NaN or infinity: repair or leave it out"
    return "lower the learning rates or clip more"


def _not_finite(dataset: Dataset[Any]) -> int | None:
    """The first example whose inputs hold NaN or infinity, where the data set is tensors."""
    x = dataset.tensors[0] if isinstance(dataset, TensorDataset) else None
    if x is None or not x.is_floating_point() or not x.numel() or bool(torch.isfinite(x.sum())):
        return None
    bad = (~torch.isfinite(x.reshape(len(x), -1)).all(1)).nonzero().flatten()
    return int(bad[0]) if len(bad) else None


def _kind(data: Any) -> str:
    return "pair (inputs, targets)" if _is_pair(data) else type(data).__name__


def _looks(batch: Any) -> str:
    """Shape and type of one example of a batch, which may be a tuple or a dictionary."""
    if not isinstance(batch, Tensor):
        return " and ".join(_looks(part) for part in tensors_in(batch)) or type(batch).__name__
    return f"shape {tuple(batch.shape[1:])} and type {str(batch.dtype).removeprefix('torch.')}"
