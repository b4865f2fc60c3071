"""Checks of a run's arguments: mistakes are refused in one line, before anything is written."""

import os
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, SupportsIndex, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dpps.errors import UsageError, unknown
from dpps.learning.algorithms import Algorithm
from dpps.learning.gradients.batch import EngineName
from dpps.learning.gradients.calling import FAILURES, pick
from dpps.learning.inputs import check_examples, tell_unscaled
from dpps.learning.preflight import made_up_outputs
from dpps.noise.source import NoiseSource
from dpps.runs.deployment import Deployment
from dpps.sensitivity import Sensitivity
from dpps.tasks import Metric, rehearse


def check_kinds(
    algorithm: object, deployment: object, noise: object, watch: object, folder: object, engine: str
) -> None:
    """Refuse arguments of the wrong kind."""
    if not isinstance(algorithm, Algorithm):
        given = " ".join(repr(algorithm).split())  # a model is written on many lines
        raise UsageError(
            f"the algorithm is {given:.80}: give one with its model, such as dpps.PartPSP(model, shared=['layer1'])"
        )
    if not isinstance(deployment, Deployment):
        raise UsageError(
            f"deployment is {deployment!r:.80}: give dpps.Simulation() or dpps.TorchDistributed(...)"
        )
    if not isinstance(noise, NoiseSource | None):
        raise UsageError(f"noise is {noise!r:.80}: give a source such as dpps.Seeded(1), or leave it out")
    known = isinstance(watch, Mapping) and all(isinstance(value, Sensitivity) for value in watch.values())
    if not (watch is None or known):
        raise UsageError(f"watch is {watch!r:.80}: give sensitivities by names of yours, in a dictionary")
    if not isinstance(folder, str | PathLike | None):
        raise UsageError(f"folder is {folder!r}: give a path, or None to keep all in memory")
    if engine not in get_args(EngineName):
        raise unknown("engine", engine, get_args(EngineName))


def check_count(name: str, value: object, least: int = 0) -> None:
    """Refuse what is no number of rounds, steps or epochs."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or int(value) < least:
        raise UsageError(f"{name} is {value!r}: it must be a whole number, {least} or more")


def as_callbacks(callbacks: Any) -> list[Any]:
    """Functions to call after a round, given as several or as one."""
    found = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in found:
        if not callable(callback):
            raise UsageError(f"a callback is {callback!r}: give functions of (run, log)")
    return found


def as_device(device: str) -> str:
    """Where tensors live. "auto" is a CUDA device if there is one, of several processes on a machine each its own, else the CPU.

    Raises:
        UsageError: the device is not there, or cannot do what is needed.
    """
    if device == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % count}" if count else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device is {device!r}: choose auto, cpu, cuda or cuda:N") from error
    if found.type == "mps":
        raise UsageError(
            f"device is {device!r}, which has no float64, and clipping relies on it: choose cpu or cuda"
        )
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device is {device!r}, which this machine or this torch does not have: choose cpu")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device is {device!r}: this machine has {torch.cuda.device_count()} CUDA devices, numbered from 0"
        )
    return device


def check_seed(seed: int) -> int:
    """Seeds are keys of random streams: whole numbers, 0 or more."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= seed < 1 << 64:
        raise UsageError(f"seed is {seed!r}: it must be a whole number from 0 to 2^64 - 1")
    return int(seed)


def check_data(
    algorithm: Algorithm, datasets: Sequence[Dataset[Any]], sizes: Sequence[int], rows: Sequence[int]
) -> None:
    """Every node held here has examples that suit the model and the loss."""
    if len(datasets) != len(rows):
        raise UsageError(f"{len(datasets)} data sets for {len(rows)} nodes: give one per node")
    if 0 in sizes:
        raise UsageError(f"node {rows[sizes.index(0)]} has no examples: give every node at least one")
    check_examples(datasets, [f"node {row}" for row in rows], algorithm.model, algorithm.loss)
    tell_unscaled(datasets, rows)


def try_metrics(
    algorithm: Algorithm, metrics: Mapping[str, Metric], sets: Sequence[tuple[Any, Tensor]]
) -> None:
    """Try metrics before the first round, on invented outputs and targets like those of the data."""
    for x, targets in sets if metrics else ():
        try:
            outputs, invented = made_up_outputs(algorithm.model, pick(x, 0), targets[0])
        except FAILURES:  # outputs that are no tensor: only the metric knows
            continue
        rehearse(metrics, outputs, invented)
