"""From a configuration to a finished folder: data, model, nodes, ledger, training, summary."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpps import data, models
from dpps.config import TrainConfig
from dpps.data.node_files import node_folder, read_node
from dpps.disk import write_aside
from dpps.errors import RunError, UsageError
from dpps.learning.tensorboard import TensorBoard
from dpps.learning.training import Callback, Run, Training, check_labels
from dpps.privacy.ledger import Budget, Ledger
from dpps.privacy.statement import Booked, Privacy, Tally, finite_or_none
from dpps.privacy.units import Plan, Terms
from dpps.site import Site
from dpps.version import versions

#: Files and folders that a run writes: the only things --overwrite deletes.
_OURS = (
    "summary.json",
    "rounds.csv",
    "ledger.jsonl",
    "checkpoint",
    "models",
    "run.json",
    "report.html",
    "tensorboard",
)


@dataclass
class Job:
    """A prepared run."""

    config: TrainConfig
    folder: Path
    training: Training
    split: list[list[int]]
    skipped_weights: list[str]
    privacy: Privacy
    site: Site

    def run(self) -> dict[str, Any]:
        """Train, write the summary, return it."""
        try:
            run = self.training.run()
        finally:
            if isinstance(self.training.charges, Booked):
                self.training.charges.ledger.close()
        self.privacy = self.site.privacy(run.privacy, self.config)
        run.save(self.site.folder(self.folder) / "models")
        own = self._summary(run)
        _write_summary(self.site.folder(self.folder), own)
        summary = self.site.network_summary(own, run, self.config)
        if summary is None:
            return own
        _write_summary(self.folder, summary)
        return summary

    def _summary(self, run: Run) -> dict[str, Any]:
        logs, learner = self.training.rounds, self.training.learner
        real = [log.real for log in logs if log.real is not None]
        estimated = [log.estimated for log in logs if log.estimated is not None]
        above = sum(
            log.real > log.estimated for log in logs if log.real is not None and log.estimated is not None
        )
        return {
            "test_accuracy": run.accuracy,
            "accuracy_by_epoch": self.training.accuracy_by_epoch,
            "accuracy_by_node": run.accuracy_by_node,
            "own_accuracy": run.own_accuracy,
            "own_accuracy_by_node": run.own_accuracy_by_node,
            "rounds": len(logs),
            "final_loss": finite_or_none(logs[-1].loss) if logs else None,
            "shared_parameters": learner.partition.shared_size,
            "local_parameters": learner.partition.local_size,
            "real_sensitivity_mean": fmean(real) if real else None,
            "real_sensitivity_max": max(real, default=None),
            "estimated_sensitivity_mean": fmean(estimated) if estimated else None,
            "estimated_sensitivity_max": max(estimated, default=None),
            "rounds_real_above_estimated": above if real and estimated else None,
            "privacy": self.privacy.to_json(),
            "bytes_sent_per_node": sum(log.bytes for log in logs),
            "seconds": self.training.seconds,
            "split": self.split,
            "gradients": type(learner.engine).__name__.lower(),
            "weights_left_fresh": self.skipped_weights,
            "config": self.config.to_json(),
            "versions": versions(),
        }


def prepare(config: TrainConfig, callbacks: Sequence[Callback] = (), site: Site | None = None) -> Job:
    """Check everything that can be checked, then make the run ready. Nothing is written before all checks have passed.

    Args:
        config: what to do.
        callbacks: called after every round.
        site: where the nodes are; by default all in this process.
    """
    site = site or Site()
    out = config.out or Path("runs") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    config = site.settle(config.resolved(), out)
    unit = config.privacy()  # refuses bad privacy settings before any data is read
    config.network()
    folder, rows = site.folder(out), site.rows(config)
    _check_folder(folder, config)
    if config.tensorboard:
        callbacks = (TensorBoard(folder / "tensorboard"), *callbacks)  # first: another may end the run
    examples = _examples(config, rows)
    torch.manual_seed(config.seed)
    model, prefixes = models.build(
        config.model,
        config.shared_names(),
        examples.shape,
        examples.classes,
        norm=config.norm,
        dropout=0.0 if config.unit == "record" else 0.1,
    )
    skipped = models.load_weights(model, config.weights) if config.weights else []
    if examples.test is not None:
        check_labels(model, *examples.test)
    fabric = site.fabric(config, model)
    algorithm = config.algorithm_object(model, prefixes, site.noise(config), fabric)
    charges: list[Booked | Tally] = [Tally()]

    def open_ledger(plan: Plan, terms: Terms) -> Booked:
        _clear(folder, config)
        durable = site.durable or config.secure_noise
        booked = Booked(_ledger(folder, config, plan, terms, rows, durable), terms.sampling)
        charges[0] = booked
        return booked

    learner = algorithm.start(examples.train, config.epochs, open_ledger)
    if unit is None:
        _clear(folder, config)
    training = Training(
        learner,
        config.epochs,
        charges[0],
        examples.test,
        examples.held_out,
        callbacks,
        folder,
        config.checkpoint_every,
    )
    site.take_up(training, config)
    _check_coverage(training, folder)
    privacy = site.privacy(training.privacy(), config)
    return Job(config, out, training, examples.split, skipped, privacy, site)


@dataclass(frozen=True, eq=False)
class Examples:
    """What the nodes held here learn from and are tested on."""

    train: list[data.Images] | list[TensorDataset]
    held_out: list[tuple[Tensor, Tensor]]
    test: tuple[Tensor, Tensor] | None
    split: list[list[int]]
    """How many of each label every node has."""
    shape: tuple[int, ...]
    classes: int


def _examples(config: TrainConfig, rows: range) -> Examples:
    if config.node_data is not None:
        return _own_examples(config, rows)
    dataset = data.load(config.data, config.data_dir, progress=not config.quiet)
    node_sets, held_out, split = deal(dataset, config, rows)
    test = dataset.test.inputs(), dataset.test.labels
    return Examples(node_sets, held_out, test, split, dataset.train.shape, dataset.classes)


def _own_examples(config: TrainConfig, rows: range) -> Examples:
    """Each node's own files; nobody else's are looked at."""
    assert config.node_data is not None
    assert config.classes is not None
    folders = [node_folder(config.node_data, node, len(rows) == 1) for node in rows]
    files = [read_node(folder, config.classes) for folder in folders]
    shapes = {tuple(part[0].shape[1:]) for f in files for part in (f.train, f.test) if part is not None}
    if len(shapes) > 1:
        raise UsageError(f"--node-data: examples of shapes {sorted(shapes)}: all must have the same shape")
    held_out = [f.test for f in files if f.test is not None]
    if held_out and len(held_out) < len(files):
        raise UsageError(
            "--node-data: some nodes have a test file and others not: give all of them one, or none"
        )
    split = [np.bincount(f.train[1].numpy(), minlength=config.classes).tolist() for f in files]
    train = [TensorDataset(*f.train) for f in files]
    return Examples(train, held_out, None, split, shapes.pop(), config.classes)


def deal(
    dataset: data.DataSet, config: TrainConfig, rows: range | None = None
) -> tuple[list[data.Images], list[tuple[Tensor, Tensor]], list[list[int]]]:
    """The nodes' training sets (parts of one), their held-out examples, and how many of each label they have.

    Args:
        dataset: what is dealt.
        config: how.
        rows: the nodes wanted; all without it.
    """
    labels = dataset.train.labels.numpy()
    needed = config.nodes * config.batch_size
    if len(labels) < needed:
        raise UsageError(
            f"{config.data} has {len(labels)} training examples, fewer than {config.nodes} nodes x batch {config.batch_size} = {needed}: "
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


def _check_folder(folder: Path, config: TrainConfig) -> None:
    """An --out with another run in it is refused; a run to be resumed must be there and be the same."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder} is a file: name a folder")
    found = [name for name in _OURS if (folder / name).exists()]
    if config.resume:
        if "run.json" not in found:
            raise UsageError(f"--resume: there is no run in {folder}; leave --resume out to start one")
        _same_run(folder, config)
    elif found and not config.overwrite:
        raise UsageError(
            f"--out {folder} already holds a run ({', '.join(found)}): add --resume or --overwrite, or choose another folder"
        )


def _same_run(folder: Path, config: TrainConfig) -> None:
    try:
        before = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder / 'run.json'} cannot be read ({error}): start a new run in another folder"
        ) from error
    if before["fingerprint"] != config.fingerprint():
        now = config.to_json()
        differ = [
            k
            for k, v in before["config"].items()
            if now.get(k) != v and k not in ("out", "resume", "overwrite", "quiet")
        ]
        raise UsageError(
            f"--resume: the run in {folder} has other settings ({', '.join(differ)}): use the same, or start a new run"
        )


def _check_coverage(training: Training, folder: Path) -> None:
    """A ledger that lacks rounds of the state was lost or put back: what was spent is not known."""
    done, charges = training.learner.state.round, training.charges
    if isinstance(charges, Booked) and training.learner.partition.shared and not charges.ledger.covers(done):
        charges.ledger.close()
        raise RunError(
            f"the ledger in {folder} lacks rounds that the checkpoint (round {done}) has: it was lost or replaced by an older one, "
            "so what was spent is not known; restore it, or start a new run"
        )


def _clear(folder: Path, config: TrainConfig) -> None:
    """Everything is checked: make the folder ours. A ledger of messages that really left is moved aside, never deleted."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} cannot be made: {error.strerror}") from error
    if config.resume:
        return
    if config.overwrite:
        _keep_ledger(folder / "ledger.jsonl")
    for name in _OURS if config.overwrite else ():
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    header = {"fingerprint": config.fingerprint(), "config": config.to_json(), "versions": versions()}
    write_aside(folder / "run.json", (json.dumps(header, indent=1) + "\n").encode())


def _keep_ledger(path: Path) -> None:
    """Messages that left cannot be taken back, so the ledger of a run with secure noise outlives it."""
    if path.exists() and b'"durable":true' in path.read_bytes().partition(b"\n")[0]:
        path.rename(path.with_name(f"ledger-until-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.jsonl"))


def _ledger(
    folder: Path, config: TrainConfig, plan: Plan, terms: Terms, rows: range, durable: bool
) -> Ledger:
    header = {
        "run": config.fingerprint(),
        "unit": config.unit,
        "mechanism": terms.mechanism.name,
        "rows": list(rows),
        "durable": durable,
    }
    path = folder / "ledger.jsonl"
    # In the units with a total, rounds beyond the plan are refused before they are sent; replays count.
    budget = Budget(rounds=plan.paid) if config.epsilon is not None else None
    if config.resume and path.exists():
        return Ledger.open(path, header, durable, budget=budget)
    return Ledger.create(path, header, durable, budget=budget)


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
    write_aside(folder / "summary.json", text.encode())
