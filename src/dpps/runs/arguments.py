"""What `Run` is given, looked at when it is made: what cannot be meant is refused in one line, before anything else happens."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, SupportsIndex, get_args

import torch

from dpps.errors import UsageError, unknown
from dpps.learning.algorithm import Algorithm
from dpps.learning.gradients.batch import EngineName
from dpps.noise.source import NoiseSource
from dpps.runs.deployment import Deployment
from dpps.sensitivity import Sensitivity


def check_kinds(
    algorithm: object, where: object, noise: object, watch: object, folder: object, engine: str
) -> None:
    """Refuse arguments of another kind than a run is made of."""
    if not isinstance(algorithm, Algorithm):
        given = " ".join(repr(algorithm).split())  # a model is written on many lines
        raise UsageError(
            f"the algorithm is {given:.80}: give one with its model, such as dpps.PartPSP(model, shared=['layer1'])"
        )
    if not isinstance(where, Deployment):
        raise UsageError(f"where is {where!r:.80}: give dpps.Here() or dpps.TorchDistributed(...)")
    if not isinstance(noise, NoiseSource | None):
        raise UsageError(f"noise is {noise!r:.80}: give a source such as dpps.Seeded(1), or leave it out")
    known = isinstance(watch, Mapping) and all(isinstance(value, Sensitivity) for value in watch.values())
    if not (watch is None or known):
        raise UsageError(f"watch is {watch!r:.80}: give sensitivities by names of yours, in a dictionary")
    if not isinstance(folder, str | PathLike | None):
        raise UsageError(f"folder is {folder!r}: give a path, or None to keep all in memory")
    if engine not in get_args(EngineName):
        raise unknown("engine", engine, get_args(EngineName))


def check_counts(sync_every: object, mixes: object, spare_rounds: object, checkpoint_every: object) -> None:
    """Refuse what is no number of rounds or steps."""
    given = {"sync_every": sync_every, "spare_rounds": spare_rounds, "checkpoint_every": checkpoint_every}
    for name, value in {**given, "mixes": mixes}.items():
        least = 1 if name == "mixes" else 0
        if isinstance(value, bool) or not isinstance(value, SupportsIndex) or int(value) < least:
            raise UsageError(f"{name} is {value!r}: it must be a whole number, {least} or more")


def as_callbacks(callbacks: Any) -> list[Any]:
    """What is called after a round: functions, or one alone."""
    found = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in found:
        if not callable(callback):
            raise UsageError(f"a callback is {callback!r}: give functions of (run, log)")
    return found


def check_topology(topology: object, processes: int) -> None:
    """Refuse a name where not all nodes are here: how many they are is not known from the data sets."""
    if isinstance(topology, str) and processes > 1:
        raise UsageError(
            f"topology is {topology!r} in a run of {processes} processes: give the object with the number of all nodes"
        )


def check_held_out(held_out: Sequence[object], nodes: int) -> None:
    """Refuse another number of held-out data sets than there are nodes here."""
    if held_out and len(held_out) != nodes:
        raise UsageError(
            f"held_out has {len(held_out)} data sets for {nodes} nodes: give one per node, or none"
        )


def check_device(device: str) -> None:
    """A device that is not there is refused with those that are."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UsageError(f"device is {device!r}: choose cpu, cuda or mps") from error
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(kind, True):
        usable = ", ".join(name for name, ok in there.items() if ok)
        raise UsageError(
            f"device is {device!r}, which this machine or this torch does not have: choose {usable}"
        )


def check_seed(seed: int) -> int:
    """Seeds are keys of random streams: whole numbers, 0 or more."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= seed < 1 << 64:
        raise UsageError(f"seed is {seed!r}: it must be a whole number from 0 to 2^64 - 1")
    return int(seed)
