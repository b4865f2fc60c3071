"""Turns what a user passes as data, privacy and topology into what a run works with."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
from dpps.learning.gradients.calling import Loss, pick, takes_classes, tensors_in
from dpps.privacy.units import UNITS, Unit
from dpps.topology import Topology, parse

log = logging.getLogger(__name__)

_ONE_EACH = (
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
    if isinstance(privacy, str):
        if privacy not in UNITS:
            raise unknown("unit", privacy, UNITS.names())
        return UNITS[privacy].usual()
    if not isinstance(privacy, Unit):
        raise UsageError(
            f"privacy is {privacy!r}: give a unit such as dpps.Record(epsilon=3), its name "
            f"({', '.join(UNITS.names())}), or None"
        )
    return privacy


# Data sets


class Batch(Dataset[Any]):
    """Examples that are one batch already; the inputs may be tensors in a tuple or a dictionary."""

    def __init__(self, x: Any, target: Tensor) -> None:
        self.tensors = x, target

    def __len__(self) -> int:
        return len(self.tensors[1])

    def __getitem__(self, k: int) -> Any:
        return pick(self.tensors, k)


class _Named(Dataset[Any]):
    """Examples that are dictionaries with the label inside, as in the library `datasets`, as ({...}, label)."""

    def __init__(self, data: Any, whose: str) -> None:
        first = data[0]
        texts = [name for name, value in first.items() if isinstance(value, str)]
        if texts:
            raise UsageError(
                f"the examples of {whose} hold a text, {texts[0]!r}: turn it into numbers (a tokenizer) and leave the text out"
            )
        self.data, self.label = data, next((name for name in ("labels", "label") if name in first), "")
        if not self.label:
            raise UsageError(
                f"the examples of {whose} are dictionaries of {quoted(list(map(str, first)))} without 'labels' or 'label': call the "
                "target so, or give pairs ({...}, target)"
            )

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, k: int) -> tuple[Any, Any]:
        example = dict(self.data[k])
        target = example.pop(self.label)
        return {name: torch.as_tensor(value) for name, value in example.items()}, target


def as_datasets(data: Any, model: nn.Module, loss: Loss) -> list[Dataset[Any]]:
    """One map-style data set per node, from data sets, DataLoaders or (inputs, targets) pairs.

    Tensors take the model's precision, and whole numbers kept as floats become labels where the loss needs labels.
    """
    if isinstance(data, (Dataset, DataLoader, Tensor, np.ndarray)) or _is_pair(data) or _is_batch(data):
        kind = "pair (inputs, targets)" if _is_pair(data) else type(data).__name__
        raise UsageError(f"the data is one {kind} for all nodes: {_ONE_EACH}")
    if not isinstance(data, Sequence) or isinstance(data, str) or not data:
        raise UsageError(f"the data is {data!r:.80}: {_ONE_EACH}")
    return [_as_dataset(each, f"node {k}", model, loss) for k, each in enumerate(data)]


def as_examples(data: Any, whose: str, model: nn.Module, loss: Loss) -> tuple[Any, Tensor]:
    """All examples of a data set as (inputs, targets): for evaluation. Inputs may be tensors in a tuple or a dictionary."""
    if isinstance(data, DataLoader):  # all of its examples are evaluated, in whatever batches
        followed = {"batch_size": data.batch_size or 1, "shuffle": True, "generator": data.generator}
        _refuse_settings(data, whose, followed)
        _warn_of_speed([data], whose)
    dataset: Any = _as_dataset(data, whose, model, loss)
    if not len(dataset):
        raise UsageError(f"{whose} has no examples: give at least one, or leave it out")
    if isinstance(dataset, (Images, FeatureSet)):
        return dataset.inputs(), dataset.labels
    if isinstance(dataset, (TensorDataset, Batch)):
        x, target = dataset.tensors
    else:
        x, target = default_collate([dataset[i] for i in range(len(dataset))])
    return x, target


def _as_dataset(data: Any, whose: str, model: nn.Module, loss: Loss) -> Dataset[Any]:
    if isinstance(data, DataLoader):  # which examples a round draws is the run's business
        data = data.dataset
    if isinstance(data, tuple):
        data = tuple(part.to_numpy() if hasattr(part, "to_numpy") else part for part in data)
    if _is_pair(data):
        data = TensorDataset(*_as_tensors(data, whose))
    elif _is_batch(data):
        data = Batch(*data)
    kind = type(data).__name__
    if hasattr(data, "iloc"):
        raise UsageError(
            f"the data of {whose} is a {kind}: say what its columns mean, dpps.data.table_dataset(frame, 'schema.toml'); "
            "dpps data describe drafts the schema"
        )
    by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not by_number or isinstance(data, (IterableDataset, Mapping, str, Tensor, np.ndarray)):
        raise UsageError(
            f"the data of {whose} is a {kind}: give a map-style data set (with len() and [index]), because a round "
            "draws examples by number; or (inputs, targets)"
        )
    if isinstance(data, TensorDataset):
        return _fitted(data, whose, model, loss)
    dataset: Dataset[Any] = _Named(data, whose) if len(data) and isinstance(data[0], Mapping) else data
    return dataset


def _fitted(data: TensorDataset, whose: str, model: nn.Module, loss: Loss) -> TensorDataset:
    """The same with inputs in the model's precision, and whole numbers as labels where the loss takes classes."""
    if len(data.tensors) != 2:
        raise UsageError(
            f"the data of {whose} is a TensorDataset of {len(data.tensors)} tensors: give two, inputs and targets; several "
            "inputs go into a tuple or a dictionary, ((a, b), targets)"
        )
    x, target = data.tensors
    if takes_classes(loss) and target.ndim == 1:
        odd = target[target != target.round()] if target.is_floating_point() else target[:0]
        if len(odd):
            raise UsageError(
                f"the labels of {whose} are fractions such as {float(odd[0]):.6g}: classes are numbered 0, 1, ...; "
                "for regression give loss=torch.nn.functional.mse_loss"
            )
        target = target.long()
    precision = next((p.dtype for p in model.parameters() if p.is_floating_point()), x.dtype)
    # features stay in half precision until a batch is read, which gives float32
    if x.is_floating_point() and not (isinstance(data, FeatureSet) and precision == torch.float32):
        x = x.to(precision)
    return data if x is data.tensors[0] and target is data.tensors[1] else TensorDataset(x, target)


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


def _as_tensors(pair: Any, whose: str) -> tuple[Tensor, Tensor]:
    odd = [part.dtype for part in pair if isinstance(part, np.ndarray) and part.dtype.kind not in "biuf"]
    if odd:
        raise UsageError(
            f"the data of {whose} has values of the kind {odd[0]}: give numbers; tables with texts and gaps are read by "
            "dpps.data.table_dataset(frame, 'schema.toml')"
        )
    x, target = (
        part if isinstance(part, Tensor) else torch.from_numpy(np.require(part, requirements="W"))
        for part in pair
    )
    if not x.ndim or not target.ndim or len(x) != len(target):
        raise UsageError(
            f"the data of {whose} has inputs of shape {tuple(x.shape)} and targets of shape {tuple(target.shape)}: "
            "give one target per example, in (inputs, targets)"
        )
    return x, target


# Settings of DataLoaders: a run takes the data set out of a DataLoader and makes batches itself

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
    "collate_fn": "a run puts its own batches together, so do it in the data set's __getitem__, and give the data set",
    "worker_init_fn": "a run has no worker processes and would not call it, so prepare the data set before you give it",
    "generator": "a run draws its examples from its own seed, so leave it out, and give the run a seed: Run(..., seed=0)",
}
_SPEED = (
    *("num_workers", "pin_memory", "timeout", "multiprocessing_context", "prefetch_factor"),
    *("persistent_workers", "pin_memory_device", "in_order"),
)
"""Settings that concern speed only."""


def check_loaders(data: Any, batch_size: object, *, random: bool) -> None:
    """Refuse DataLoaders to train on with settings that the run would not follow. Warn about those that concern speed only.

    Args:
        data: as given for the nodes.
        batch_size: of the algorithm.
        random: whether the run draws its examples at random.
    """
    nodes = enumerate(data if isinstance(data, (list, tuple)) else ())
    loaders = {f"node {k}": each for k, each in nodes if isinstance(each, DataLoader)}
    followed = {"batch_size": batch_size} | ({"shuffle": True} if random else {})
    for whose, loader in loaders.items():
        _refuse_settings(loader, whose, followed, f", the algorithm {batch_size}")
    _warn_of_speed(loaders.values(), "the nodes" if len(loaders) > 1 else "".join(loaders))


def _warn_of_speed(loaders: Iterable[DataLoader[Any]], whose: str) -> None:
    """One warning, however many DataLoaders have such settings."""
    usual = DataLoader[Any]([0])  # type: ignore[arg-type]
    found = dict.fromkeys(
        f"{name}={getattr(loader, name)}"
        for loader in loaders
        for name in _SPEED
        if getattr(loader, name, None) != getattr(usual, name, None)
    )
    found.pop("prefetch_factor=2", None)  # torch fills it in where there are workers
    if found:
        log.warning(
            "%s in the DataLoader of %s has no effect, because a run reads the examples in its own process: leave it out",
            ", ".join(found),
            whose,
        )


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
    usual = DataLoader[Any]([0], loader.batch_size)  # type: ignore[arg-type]
    names = "drop_last", "collate_fn", "worker_init_fn", "generator"
    own = {name: getattr(loader, name) for name in names}
    return found | {name: value for name, value in own.items() if value != getattr(usual, name)}
