"""What a run computes, in JSON: what tells it from another run, and what its summary says about it."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
from torch import nn

from dpps.learning.algorithm import Algorithm
from dpps.privacy.units import Unit
from dpps.topology import Topology

_ROUNDS = 8  # of a topology that are compared
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True)
class Description:
    """Settings of a run.

    Attributes:
        config: everything, for summary.json and run.json.
        common: what all processes of a distributed run must have alike.
        fingerprint: equal for two runs that compute the same.
        model: checksums of the model's shape and of its start weights.
        build: the arguments of `dpps.models.build` that make the model again; None: it was made in Python.
        sources: where the files of each node held here are; empty: not known, or public.
        input: how a file becomes inputs of the model (shape, classes, features, scaling, columns); None: not known.
    """

    config: Mapping[str, Any]
    common: Mapping[str, Any]
    fingerprint: str
    model: Mapping[str, str]
    build: Mapping[str, Any] | None = None
    input: Mapping[str, Any] | None = None
    sources: tuple[str, ...] = ()


def describe(
    algorithm: Algorithm, topology: Topology, unit: Unit | None, options: Mapping[str, Any]
) -> Description:
    """The description of a run made in Python; one made by options is described by its options."""
    named = {
        f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.name not in ("model", "shared")
    }
    config = {
        "algorithm": type(algorithm).__name__.lower(),
        "model": type(algorithm.model).__name__,
        "shared": [slot.name for slot in algorithm.partition.shared],
        **{name: _plain(value) for name, value in named.items()},
        "nodes": topology.nodes,
        "topology": _plain(topology),
        "unit": "none" if unit is None else unit.name,
        **({f.name: _plain(getattr(unit, f.name)) for f in fields(unit)} if is_dataclass(unit) else {}),
        **{name: _plain(value) for name, value in options.items()},
    }
    config = {name.replace("_", "-"): value for name, value in config.items()}
    facts = model_facts(algorithm.model)
    unnamed = {"parameters": facts["model"], "weights": weights_of(topology)}
    return Description(config, config, fingerprint({**config, **unnamed}), facts)


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


def fingerprint(what: Mapping[str, Any]) -> str:
    """A short checksum of settings."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """As JSON has it; what JSON has not, by its name, which is the same in every process: without its address in memory."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return getattr(value, "__qualname__", None) or _ADDRESS.sub("", str(value))
