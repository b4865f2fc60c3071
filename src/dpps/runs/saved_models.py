"""Loading saved models: every file says how to build and use its model, and what its privacy is worth."""

from __future__ import annotations

import copy
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpps.data.node_files import read_examples
from dpps.data.schema import ImageSchema, Schema, parse_schema
from dpps.errors import RunError, UsageError
from dpps.features import build as build_extractor
from dpps.features import extract
from dpps.learning.gradients.calling import logits_of
from dpps.models import build as build_model
from dpps.runs.folder import RunFolder
from dpps.runs.results import METADATA
from dpps.tasks import Classification, Task

_AT_ONCE = 1000


@dataclass(frozen=True, eq=False)
class Saved:
    """A node's model on disk: what its file says, and its tensors."""

    path: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Saved:
        """The file, refused if no run wrote it."""
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {}).get(METADATA)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        except (OSError, SafetensorError) as error:
            raise RunError(f"{path} cannot be read ({error}): train again, or copy it anew") from error
        if text is None:
            raise UsageError(
                f"{path} does not say what model it is of (an older version wrote it): train again, or use load_state_dict"
            )
        return cls(path, json.loads(text), tensors)

    @property
    def schema(self) -> Schema | ImageSchema | None:
        """How tables or images become inputs."""
        found = (self.facts["input"] or {}).get("schema")
        return None if found is None else parse_schema(tomllib.loads(found), str(self.path))

    @property
    def task(self) -> Task:
        """What the model predicts."""
        schema = self.schema
        if schema is not None:
            return schema.task
        return Classification(tuple(str(name) for name in self.facts["input"]["classes"]))

    def load(self, model: nn.Module | None = None) -> nn.Module:
        """The model, ready to use: built as the file says, or a copy of `model` with this node's parameters."""
        built = self._build() if model is None else copy.deepcopy(model)
        own, trained = built.state_dict(), {*self.facts["shared"], *self.facts["local"]}
        missing = [name for name in (*self.tensors, *sorted(trained)) if name not in own]
        others = [
            name for name in self.tensors if name in own and own[name].shape != self.tensors[name].shape
        ]
        if missing or others:
            raise UsageError(
                f"the parameter {(missing + others)[0]!r} of {self.path} does not fit "
                f"{type(built).__name__}: give the model it was trained as"
            )
        built.load_state_dict(dict(self.tensors), strict=False)  # frozen parameters are the model's own
        return built.eval()

    def _build(self) -> nn.Module:
        build = self.facts["model"]
        if "name" not in build:
            raise UsageError(
                f"{self.path} is of a run made in Python ({build['class']}), which keeps no code: "
                "dpps.load(folder, model=YourModel(...))"
            )
        with torch.random.fork_rng(devices=[]):  # building draws start weights, which are replaced
            network, _ = build_model(**build | {"shape": tuple(build["shape"])})
        return self.task.head(network)

    def examples(self, path: Path, *, labelled: bool) -> tuple[Tensor, Tensor | None]:
        """What a file as for --node-data holds, prepared as in training, and the class numbers if they are asked for."""
        how = self.facts["input"]
        if how is None:
            raise UsageError(
                f"{self.path} is of a run made in Python, which does not say how examples become inputs: use "
                "dpps.load(folder, model=...)"
            )
        shape = tuple(how["shape"])
        x, y = read_examples(path, prod(shape), labelled=labelled, columns=how["columns"], schema=self.schema)
        if x[0].numel() == prod(shape):
            x = x.view(len(x), *shape)
        if x.ndim != len(shape) + 1 or x.shape[2:] != shape[1:] or x.shape[1] not in (1, shape[0]):
            raise UsageError(f"{path} has examples of shape {tuple(x.shape[1:])}: the model reads {shape}")
        classes = self.task.outputs
        if y is not None and not y.is_floating_point() and not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise UsageError(
                f"{path}: labels run from {int(y.min())} to {int(y.max())}: the model knows 0 to {classes - 1}; labels start at 0"
            )
        x = x.expand(len(x), *shape)
        if how["features"] != "none":
            extractor = build_extractor(how["features"], shape)
            return extract(extractor, TensorDataset(x, torch.zeros(len(x)))).inputs(), y
        if how["mean"] is not None:
            mean, deviation = (torch.tensor(how[name])[:, None, None] for name in ("mean", "deviation"))
            x = (x - mean) / deviation
        return x, y


def choose(folder: str | Path, node: int | None = None) -> dict[int, Path]:
    """The files of the models in a run's folder, by node: all of them, or that of one."""
    found = RunFolder(folder).model_files()
    if not found:
        raise UsageError(f"{folder} holds no models: name the folder of a finished run (dpps train --out)")
    if node is None:
        return found
    if node not in found:
        raise UsageError(f"--node is {node}: {folder} holds models of the nodes {', '.join(map(str, found))}")
    return {node: found[node]}


def load(folder: str | Path, model: nn.Module | None = None) -> dict[int, nn.Module]:
    """Load the trained models of a finished run (or of `Run.save`), by node number.

    Args:
        folder: folder of the run, such as "runs/x".
        model: needed for a run made in Python, which stores no code: a model of the same architecture. It
            is copied. Frozen parameters are not in the files and keep their values from this model.
    """
    return {node: Saved.read(path).load(model) for node, path in choose(folder).items()}


@torch.no_grad()
def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits for every example."""
    model.eval()
    return torch.cat([logits_of(model(part)) for part in torch.split(x, _AT_ONCE)])
