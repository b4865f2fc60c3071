"""From options to a run: data, model, algorithm, unit and network as the options of `dpps train` say."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dpps import data, features, models
from dpps.data.node_files import NodeFiles, check_headers, node_folder, read_node
from dpps.data.schema import Remarks, Schema, read_schema
from dpps.data.splits import hold_out_own
from dpps.errors import UsageError
from dpps.learning.algorithms import ALGORITHMS
from dpps.learning.sampling import parse_batch
from dpps.runs.callbacks import Callback, TensorBoard
from dpps.runs.deployment import Deployment, Simulation
from dpps.runs.folder import RunFolder
from dpps.runs.options import Options, build_arguments, check_task, refuse_retired, weighted
from dpps.runs.run import Run, as_device
from dpps.runs.summary import Description, fingerprint, model_facts
from dpps.tasks import Classification, Task

AnySchema = Schema | data.ImageSchema


def make_run(
    options: Options,
    folder: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    deployment: Deployment | None = None,
) -> Run:
    """What `Run.from_options` gives."""
    deployment = deployment or Simulation()
    out = options.out if folder is None else Path(folder)
    options = replace(options, out=out).resolve()
    kept = None if out is None else deployment.folder(out)
    resumed, overwrite = deployment.decide_resume(kept, options.resume, options.overwrite)
    options = replace(options, resume=resumed, overwrite=overwrite)
    unit, topology = options.privacy(), options.network()  # refused before any data is read
    device = as_device(options.device)
    rows = deployment.rows(options.nodes)
    schema = None if options.schema is None else read_schema(options.schema)
    if isinstance(schema, Schema):
        schema.check_target(str(options.schema))
    check_task(options)  # before data is read
    identity = options.fingerprint()
    if schema is not None:  # where a schema file lies does not matter; what it says does
        identity = fingerprint({identity: schema.checksum()})
    if kept is not None:  # early, before data is read; the run looks again when it starts
        if resumed:
            refuse_retired(kept.read_settings().get("config", {}) if kept.settings.exists() else {}, str(out))
            kept.check_same(identity, options.to_json())
        else:
            kept.check_new(overwrite)
    examples = _examples(options, rows, schema)
    examples = replace(examples, task=weighted(options, examples.task))
    torch.manual_seed(options.seed)
    algorithm = ALGORITHMS[options.algorithm]
    build = build_arguments(options, examples.shape, examples.task)
    network, prefixes = models.build(**build)
    model, prefixes = examples.task.head(network), examples.task.shared(prefixes)
    skipped = models.load_weights(model, options.weights) if options.weights else []
    if options.tensorboard:
        if kept is None:
            raise UsageError("--tensorboard needs --out DIR: the folder for its events")
        callbacks = (TensorBoard(kept.tensorboard), *callbacks)  # first: another may end the run
    run = Run(
        algorithm(model, prefixes, task=examples.task, input_length=examples.length, **options.rates()),
        examples.train,
        topology=topology,
        privacy=unit,
        test=examples.test,
        held_out=examples.held_out,
        metrics=options.measures(),
        folder=out,
        deployment=deployment,
        sync_every=options.sync_every,
        mixes=options.mixes,
        seed=options.seed,
        secure_noise=options.secure_noise,
        declared_sizes=options.sizes(),
        spare_rounds=options.spare_rounds,
        checkpoint_every=options.checkpoint_every,
        callbacks=callbacks,
        track_real=options.track_real,
        device=device,
        overwrite=overwrite,
        description=Description(
            options.to_json(),
            options.common() | examples.facts(),
            identity,
            model_facts(model),
            build,
            examples.how_to_read(),
            _sources(options, rows),
            examples.split,
            skipped,
            None if schema is None else schema.to_toml(),
            _node_names(options, rows),
        ),
    )
    run.resumed = resumed
    return run


def kept_options(out: Path, rank: int | None = None) -> Options:
    """The options of the run in a folder, to continue it. Of several processes, one that died before it wrote anything takes what another
    one kept.

    Raises:
        UsageError: there is no run that options can continue.
    """
    ranks = sorted(out.glob("rank-*"))
    if rank is None and ranks and not RunFolder(out).settings.exists():
        raise UsageError(
            f"{out} is a run of several processes: start them all again, "
            f"torchrun --nproc-per-node {len(ranks)} -m dpps resume {out}"
        )
    if rank is not None and RunFolder(out).settings.exists():
        raise UsageError(f"{out} is a run of one process: continue it without torchrun, dpps resume {out}")
    places = [out] if rank is None else [out / f"rank-{rank}", *ranks]
    folder = next((f for f in map(RunFolder, places) if f.settings.exists()), None)
    if folder is None:
        raise UsageError(f"there is no run in {out}: name the folder given with --out")
    settings = folder.read_settings()
    if settings.get("federation"):
        raise UsageError(f"{out} is one member's part of a federation: give its dpps federation join again")
    return Options.from_json(
        settings.get("config", {}),
        str(out),
        f"{out} was made in Python: open it with its algorithm and data (dpps.Run.open)",
    )


def reopen(out: Path, deployment: Deployment | None = None, **more: Any) -> Run:
    """The run that `dpps train` left in a folder, made again from the options it keeps there."""
    deployment = deployment or Simulation()
    options = kept_options(out, deployment.rank)
    return make_run(replace(options, resume=True, overwrite=False), out, deployment=deployment, **more)


def _sources(options: Options, rows: range) -> tuple[str, ...]:
    """Where each node's own data is; a public data set has nothing to spend."""
    if options.node_data is None:
        return ()
    return tuple(str(node_folder(options.node_data, node, len(rows) == 1)) for node in rows)


def _node_names(options: Options, rows: range) -> tuple[str, ...]:
    """What the nodes' folders are called, a link what it points to; of a/site-{rank}/b it is the part with the number."""
    if options.node_data is None:
        return ()
    parts = options.node_data.parts
    numbered = [k for k, part in enumerate(parts) if "{rank}" in part]
    template = Path(*parts[: numbered[-1] + 1]) if numbered else options.node_data
    names = tuple(node_folder(template, node, len(rows) == 1).resolve().name for node in rows)
    return names if len(set(names)) == len(names) else ()


@dataclass(frozen=True, eq=False)
class Examples:
    """What the nodes held here learn from and are tested on."""

    train: Sequence[Dataset[Any]]
    held_out: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor] | None
    split: list[list[int]] | None
    """How many of each class every node has."""
    shape: tuple[int, ...]
    task: Task
    input: Mapping[str, Any]
    """How an example becomes an input of the model: its shape, features, and the mean and deviation of images."""
    columns: tuple[str, ...] | None = None
    """What the columns of the nodes' own files are called, where they say."""
    schema: AnySchema | None = None
    """What the nodes' own tables mean."""

    def how_to_read(self) -> dict[str, Any]:
        """What saved models say of files with further examples."""
        schema = None if self.schema is None else self.schema.to_toml()
        classes: Sequence[object] = range(self.task.outputs)  # numbers, unless a schema names them
        if self.schema is not None:
            classes = self.task.classes if isinstance(self.task, Classification) else ()
        return {**self.input, "classes": list(classes), "columns": self.columns, "schema": schema}

    @property
    def length(self) -> float | None:
        """How long the inputs of tables are by their schema; None: not known."""
        return None if self.schema is None or self.input["features"] != "none" else self.schema.length

    def facts(self) -> dict[str, str]:
        """What all processes must have alike: the schema; without one, columns are told apart by their place."""
        if self.schema is not None:
            return {"schema of --node-data": self.schema.checksum()}
        if self.columns is None:
            return {}
        return {"columns of --node-data": hashlib.sha256(repr(self.columns).encode()).hexdigest()[:16]}


def _examples(options: Options, rows: range, schema: AnySchema | None) -> Examples:
    if options.node_data is not None:
        return _own_examples(options, rows, schema)
    dataset = data.load(options.data, options.data_dir, progress=not options.quiet)
    how = _input(dataset.train, options.features)
    if options.features != "none":
        kept = data.folder_beside(options.data, options.data_dir)
        dataset = features.of_data_set(dataset, options.features, kept, progress=not options.quiet)
    node_sets, held_out, split = deal(dataset, options, rows)
    test = dataset.test.inputs(), dataset.test.labels
    task = Classification(tuple(map(str, range(dataset.classes))))
    return Examples(node_sets, held_out, test, split, dataset.train.shape, task, how)


def _input(examples: data.Images | data.FeatureSet, chosen: str) -> dict[str, Any]:
    """How the images of a named data set become inputs: features are computed of them as they are stored."""
    if chosen != "none" or not isinstance(examples, data.Images):
        stored = examples.pixels.shape[1:] if isinstance(examples, data.Images) else examples.shape
        return {"shape": tuple(stored), "features": chosen, "mean": None, "deviation": None}
    scaling = {"mean": examples.mean, "deviation": examples.deviation}
    return {"shape": examples.shape, "features": "none", **scaling}


def _own_examples(options: Options, rows: range, schema: AnySchema | None) -> Examples:
    """Each node's own files; nobody else's are looked at."""
    assert options.node_data is not None
    task = schema.task if schema is not None else Classification(tuple(map(str, range(options.classes or 0))))
    folders = [node_folder(options.node_data, node, len(rows) == 1) for node in rows]
    with Remarks() as remarks:
        files = [read_node(folder, options.classes or 0, schema, remarks) for folder in folders]
    shapes = {tuple(part[0].shape[1:]) for f in files for part in (f.train, f.test) if part is not None}
    if len(shapes) > 1:
        raise UsageError(f"--node-data: examples of shapes {sorted(shapes)}: all must have the same shape")
    held_out = [f.test for f in files if f.test is not None]
    if held_out and len(held_out) < len(files):
        raise UsageError(
            "--node-data: some nodes have a test file and others not: give all of them one, or none"
        )
    if not held_out and options.hold_out:
        files, held_out = _keep_back(files, folders, options.hold_out, options.seed)
    check_headers({folder: file.columns for folder, file in zip(folders, files, strict=True)})
    columns = files[0].columns
    split = None
    if isinstance(task, Classification):
        split = [np.bincount(f.train[1].numpy(), minlength=task.outputs).tolist() for f in files]
    train: list[Any] = [TensorDataset(*f.train) for f in files]
    shape = shapes.pop()
    how = {"shape": shape, "features": options.features, "mean": None, "deviation": None}
    if options.features != "none":
        extractor, show = features.build(options.features, shape), not options.quiet
        pairs = zip(train, folders, strict=True)
        train = [features.extract(extractor, each, folder, progress=show) for each, folder in pairs]
        seen = [features.extract(extractor, TensorDataset(*each), progress=show) for each in held_out]
        held_out, shape = [(each.inputs(), each.labels) for each in seen], train[0].shape
    return Examples(train, held_out, None, split, shape, task, how, columns, schema)


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
    dataset: data.DataSet, options: Options, rows: range | None = None
) -> tuple[Sequence[data.Images | data.FeatureSet], list[tuple[Tensor, Tensor]], list[list[int]]]:
    """The training sets (parts of one) of the nodes wanted, their held-out examples, and how many of each label they have."""
    labels = dataset.train.labels.numpy()
    batch = None if options.batch_size is None else parse_batch(options.batch_size)
    if isinstance(batch, int) and len(labels) < options.nodes * batch:
        raise UsageError(
            f"{options.data} has {len(labels)} training examples, fewer than {options.nodes} nodes x batch "
            f"{batch} = {options.nodes * batch}: "
            "use fewer nodes or a smaller batch"
        )
    parts = data.split(labels, options.nodes, options.split, options.seed)
    kept, held = data.hold_out(parts, options.hold_out, options.seed) if options.hold_out else (parts, [])
    if rows is not None:
        kept, held = kept[rows.start : rows.stop], held[rows.start : rows.stop]
    whole = dataset.train.ordered(np.concatenate(kept))
    ends = np.cumsum([0, *(len(part) for part in kept)])
    node_sets = [whole.part(a, b) for a, b in pairwise(ends)]
    held_out = [(dataset.train.inputs(part), dataset.train.labels[torch.from_numpy(part)]) for part in held]
    return node_sets, held_out, data.describe(labels, kept)
