"""From options to a run: data, model, algorithm, unit and network as `dpps train` was told."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpps import data, features, models
from dpps.data.node_files import NodeFiles, check_headers, node_folder, read_node
from dpps.data.schema import Schema, read_schema
from dpps.data.splits import hold_out_own
from dpps.errors import UsageError
from dpps.learning.algorithm import ALGORITHMS
from dpps.learning.inputs import check_examples
from dpps.learning.sampling import parse_batch
from dpps.runs.config import TrainConfig
from dpps.runs.config_files import from_json
from dpps.runs.deployment import Deployment, Here
from dpps.runs.description import Description, fingerprint, model_facts
from dpps.runs.folder import RunFolder
from dpps.runs.run import Callback, Run
from dpps.runs.tensorboard import TensorBoard


def make_run(config: TrainConfig, callbacks: Sequence[Callback] = (), where: Deployment | None = None) -> Run:
    """The run that the options describe; nothing is written before it starts.

    Args:
        config: what to do.
        callbacks: called after every round.
        where: where the nodes are; by default all in this process.
    """
    where = where or Here()
    config = config.resolved()
    out = config.out or Path("runs") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    given = where.folder(out) if config.out else None
    resume, overwrite = where.settle(given, config.resume, config.overwrite)
    config = replace(config, resume=resume, overwrite=overwrite)
    unit, topology = config.privacy(), config.network()  # refused before any data is read
    folder, rows = where.folder(out), where.rows(config.nodes)
    schema = None if config.schema is None else read_schema(config.schema)
    _check_folder(folder, config, schema)
    examples = _examples(config, rows, schema)
    torch.manual_seed(config.seed)
    algorithm = ALGORITHMS[config.algorithm]
    build: dict[str, Any] = {
        "name": config.model,
        "shared": algorithm.shares(config.shared),
        "shape": examples.shape,
        "classes": examples.classes,
        "norm": config.norm,
        "dropout": 0.0 if config.per_example else 0.1,
    }
    model, prefixes = models.build(**build)
    skipped = models.load_weights(model, config.weights) if config.weights else []
    if examples.test is not None:
        check_examples([TensorDataset(*examples.test)], ["the test set"], model, F.cross_entropy)
    if config.tensorboard:
        callbacks = (TensorBoard(folder.tensorboard), *callbacks)  # first: another may end the run
    run = Run(
        algorithm(model, prefixes, **config.rates()),
        examples.train,
        topology=topology,
        privacy=unit,
        test=examples.test,
        held_out=examples.held_out,
        metrics=config.measures(),
        folder=out,
        where=where,
        sync_every=config.sync_every,
        mixes=config.mixes,
        seed=config.seed,
        secure_noise=config.secure_noise,
        declared_sizes=config.sizes(),
        spare_rounds=config.spare_rounds,
        checkpoint_every=config.checkpoint_every,
        callbacks=callbacks,
        track_real=config.track_real,
        overwrite=config.overwrite,
        description=Description(
            config.to_json(),
            config.common() | examples.facts(),
            _fingerprint(config, schema),
            model_facts(model),
            build,
            examples.how_to_read(),
            _sources(config, rows),
        ),
        remarks={"split": examples.split, "weights_left_fresh": skipped}
        | ({} if schema is None else {"schema": schema.to_toml()}),
    )
    run.resumed = config.resume
    return run


def reopen(out: Path, where: Deployment | None = None, **options: Any) -> Run:
    """The run that `dpps train` left in a folder, made again from the options it keeps there."""
    folder = (where or Here()).folder(out)
    if not folder.settings.exists():
        several = "its processes have folders of their own, start them all again with --resume"
        remedy = several if any(out.glob("rank-*")) else "name the folder of a run"
        raise UsageError(f"there is no run in {folder.path}: {remedy}")
    kept = folder.read_settings().get("config", {})
    config = from_json(kept, f"{out} was made in Python: open it with its algorithm and data")
    return make_run(replace(config, out=out, resume=True, overwrite=False), where=where, **options)


def _sources(config: TrainConfig, rows: range) -> tuple[str, ...]:
    """Where each node's own data is; a public data set has nothing to spend."""
    if config.node_data is None:
        return ()
    return tuple(str(node_folder(config.node_data, node, len(rows) == 1)) for node in rows)


def _fingerprint(config: TrainConfig, schema: Schema | data.ImageSchema | None) -> str:
    """Where a schema file lies is a circumstance; what it says is not."""
    return config.fingerprint() if schema is None else fingerprint({config.fingerprint(): schema.checksum()})


def _check_folder(folder: RunFolder, config: TrainConfig, schema: Schema | data.ImageSchema | None) -> None:
    """Early, before data is read; the run looks again when it starts."""
    if config.resume:
        folder.check_same(_fingerprint(config, schema), config.to_json())
    else:
        folder.check_new(config.overwrite)


@dataclass(frozen=True, eq=False)
class Examples:
    """What the nodes held here learn from and are tested on."""

    train: Sequence[Dataset[Any]]
    held_out: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor] | None
    split: list[list[int]]
    """How many of each label every node has."""
    shape: tuple[int, ...]
    classes: int
    input: Mapping[str, Any]
    """How an example becomes an input of the model: its shape, features, and the mean and deviation of images."""
    columns: tuple[str, ...] | None = None
    """What the columns of the nodes' own files are called, where they say."""
    schema: Schema | data.ImageSchema | None = None
    """What the nodes' own tables mean."""

    def how_to_read(self) -> dict[str, Any]:
        """What saved models say of files with further examples."""
        schema = None if self.schema is None else self.schema.to_toml()
        classes = range(self.classes) if self.schema is None else self.schema.classes
        return {**self.input, "classes": list(classes), "columns": self.columns, "schema": schema}

    def facts(self) -> dict[str, str]:
        """What all processes must have alike: the schema; without one, columns are told apart by their place."""
        if self.schema is not None:
            return {"schema of --node-data": self.schema.checksum()}
        if self.columns is None:
            return {}
        return {"columns of --node-data": hashlib.sha256(repr(self.columns).encode()).hexdigest()[:16]}


def _examples(config: TrainConfig, rows: range, schema: Schema | data.ImageSchema | None) -> Examples:
    if config.node_data is not None:
        return _own_examples(config, rows, schema)
    dataset = data.load(config.data, config.data_dir, progress=not config.quiet)
    how = _input(dataset.train, config.features)
    if config.features != "none":
        kept = data.folder_beside(config.data, config.data_dir)
        dataset = features.of_data_set(dataset, config.features, kept, progress=not config.quiet)
    node_sets, held_out, split = deal(dataset, config, rows)
    test = dataset.test.inputs(), dataset.test.labels
    return Examples(node_sets, held_out, test, split, dataset.train.shape, dataset.classes, how)


def _input(examples: data.Images | data.FeatureSet, chosen: str) -> dict[str, Any]:
    """How the images of a named data set become inputs: features are computed of them as they are stored."""
    if chosen != "none" or not isinstance(examples, data.Images):
        stored = examples.pixels.shape[1:] if isinstance(examples, data.Images) else examples.shape
        return {"shape": tuple(stored), "features": chosen, "mean": None, "deviation": None}
    scaling = {"mean": examples.mean, "deviation": examples.deviation}
    return {"shape": examples.shape, "features": "none", **scaling}


def _own_examples(config: TrainConfig, rows: range, schema: Schema | data.ImageSchema | None) -> Examples:
    """Each node's own files; nobody else's are looked at."""
    assert config.node_data is not None
    classes = config.classes if schema is None else len(schema.classes)
    assert classes is not None
    folders = [node_folder(config.node_data, node, len(rows) == 1) for node in rows]
    files = [read_node(folder, classes, schema) for folder in folders]
    shapes = {tuple(part[0].shape[1:]) for f in files for part in (f.train, f.test) if part is not None}
    if len(shapes) > 1:
        raise UsageError(f"--node-data: examples of shapes {sorted(shapes)}: all must have the same shape")
    held_out = [f.test for f in files if f.test is not None]
    if held_out and len(held_out) < len(files):
        raise UsageError(
            "--node-data: some nodes have a test file and others not: give all of them one, or none"
        )
    if not held_out and config.hold_out:
        files, held_out = _keep_back(files, folders, config.hold_out, config.seed)
    check_headers({folder: file.columns for folder, file in zip(folders, files, strict=True)})
    columns = files[0].columns
    split = [np.bincount(f.train[1].numpy(), minlength=classes).tolist() for f in files]
    train, shape = [TensorDataset(*f.train) for f in files], shapes.pop()
    how = {"shape": shape, "features": config.features, "mean": None, "deviation": None}
    if config.features == "none":
        return Examples(train, held_out, None, split, shape, classes, how, columns, schema)
    extractor, show = features.FEATURES[config.features](shape), not config.quiet
    own = [features.extract(extractor, t, f, progress=show) for t, f in zip(train, folders, strict=True)]
    seen = [features.extract(extractor, TensorDataset(*t), progress=show) for t in held_out]
    tests = [(s.inputs(), s.labels) for s in seen]
    return Examples(own, tests, None, split, own[0].shape, classes, how, columns, schema)


def _keep_back(
    files: list[NodeFiles], folders: Sequence[Path], part: float, seed: int
) -> tuple[list[NodeFiles], list[tuple[Tensor, Tensor]]]:
    """Without test files: part of each node's own examples is for testing its model."""
    split = [hold_out_own(*file.train, part, seed) for file in files]
    for folder, (train, test) in zip(folders, split, strict=True):
        if not len(train[1]) or not len(test[1]):
            raise UsageError(
                f"--hold-out {part:g}: {folder} has {len(train[1]) + len(test[1])} examples, of which "
                f"{len(test[1])} are kept back for "
                "testing: choose another part, or give every node a test file"
            )
    return [replace(f, train=train) for f, (train, _) in zip(files, split, strict=True)], [
        t for _, t in split
    ]


def deal(
    dataset: data.DataSet, config: TrainConfig, rows: range | None = None
) -> tuple[Sequence[data.Images | data.FeatureSet], list[tuple[Tensor, Tensor]], list[list[int]]]:
    """The nodes' training sets (parts of one), their held-out examples, and how many of each label they have.

    Args:
        dataset: what is dealt.
        config: how.
        rows: the nodes wanted; all without it.
    """
    labels = dataset.train.labels.numpy()
    batch = None if config.batch_size is None else parse_batch(config.batch_size)
    if isinstance(batch, int) and len(labels) < config.nodes * batch:
        raise UsageError(
            f"{config.data} has {len(labels)} training examples, fewer than {config.nodes} nodes x batch "
            f"{batch} = {config.nodes * batch}: "
            "use fewer nodes or a smaller batch"
        )
    parts = data.split(labels, config.nodes, config.split, config.seed)
    kept, held = data.hold_out(parts, config.hold_out, config.seed) if config.hold_out else (parts, [])
    if rows is not None:
        kept, held = kept[rows.start : rows.stop], held[rows.start : rows.stop]
    whole = dataset.train.ordered(np.concatenate(kept))
    ends = np.cumsum([0, *(len(part) for part in kept)])
    node_sets = [whole.part(a, b) for a, b in pairwise(ends)]
    held_out = [(dataset.train.inputs(part), dataset.train.labels[torch.from_numpy(part)]) for part in held]
    return node_sets, held_out, data.describe(labels, kept)
