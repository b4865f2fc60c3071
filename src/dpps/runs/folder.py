"""A run's folder: the only place that knows the names of its files."""

import csv
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from dpps.disk import locked, private, private_folder, sync_folder, write_private, write_synced, writing
from dpps.errors import RunError, UsageError
from dpps.privacy.ledger import LedgerFile, unused, witness_of
from dpps.privacy.promise import Contract
from dpps.runs.callbacks import COLUMNS, RoundLog


def model_name(node: int | str) -> str:
    """What the file of a node's model is called."""
    return f"node-{node}.safetensors"


def new_folder(prefix: str = "") -> Path:
    """Where results go when nobody says where."""
    return Path("runs") / f"{prefix}{datetime.now(UTC):%Y%m%d-%H%M%S}"


def replaced_ledgers(ledger: Path) -> list[Path]:
    """Ledgers of messages that left which --overwrite moved aside, in the place of this one."""
    return sorted(ledger.parent.glob("ledger-until-*.jsonl"))


class RunFolder:
    """Where one process of a run keeps its ledger, log, checkpoints, models and summary. Only the owner can read the files."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.ledger = self.path / "ledger.jsonl"
        self.rounds = self.path / "rounds.csv"
        self.summary = self.path / "summary.json"
        self.settings = self.path / "run.json"
        self.schema = self.path / "run-schema.toml"
        self.models = self.path / "models"
        self.checkpoints = self.path / "checkpoint"
        self.tensorboard = self.path / "tensorboard"
        self.report = self.path / "report.html"
        self.identity = self.path / "identity.key"
        self.card = self.path / "model-card.md"
        self.answers = self.path / "answers.json"
        self.message = self.path / "message.safetensors"

        folders = (self.checkpoints, self.models, self.tensorboard)
        documents = (self.settings, self.schema, self.report, self.card, self.answers, self.message)
        self._ours = (self.summary, self.rounds, *folders, *documents)
        """What a run writes besides its ledger: the only things that --overwrite deletes (in `models`, only models)."""

    def others(self) -> list[str]:
        """The names of files and folders that no run wrote. Files that a killed run was writing do not count."""
        ours = {path.name for path in (*self._ours, self.ledger, witness_of(self.ledger))}
        found = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(path.name for path in found if path.name not in ours and path.suffix != ".part")

    # Before a run starts

    def check_new(self, overwrite: bool = False) -> None:
        """Refuse a folder that holds a run (unless it may be replaced), or other files under the names that a run uses.
        A ledger without charges and nothing else is left over from a start that failed."""
        self._check_is_folder()
        used = [] if unused(self.ledger) else [self.ledger]
        found = ", ".join(path.name for path in (*used, *(p for p in self._ours if p.exists())))
        is_run = self.settings.exists() or self.ledger.exists()
        if found and not is_run:
            raise UsageError(
                f"--out {self.path} holds {found}, which no run wrote (there is no {self.settings.name}): choose another folder"
            )
        if found and not overwrite:
            raise UsageError(
                f"--out {self.path} already holds a run ({found}): add --resume or --overwrite (in Python Run.open or overwrite=True), or "
                "choose another folder"
            )

    def check_same(self, fingerprint: str, config: Mapping[str, Any]) -> None:
        """Refuse to go on with a run that is not there, or that computes something else."""
        self._check_is_folder()
        if not self.settings.exists():
            raise UsageError(
                f"there is no run in {self.path} to continue: leave --resume out (in Python use Run, not Run.open) to start one"
            )
        before = self.read_settings()
        if before.get("fingerprint") != fingerprint:
            runtime = ("out", "resume", "overwrite", "quiet")
            kept = {k: v for k, v in before.get("config", {}).items() if k in config and k not in runtime}
            differ = ", ".join(k for k, v in kept.items() if config[k] != v)
            raise UsageError(
                f"the run in {self.path} has other settings "
                f"({differ or 'the shape of the model, the weights of the topology, or what --schema says'}): use the same, or start a new run"
            )

    def _check_is_folder(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out {self.path} is a file: name a folder")

    def claim(self, overwrite: bool = False) -> None:
        """Take the folder, after all checks have passed. With `overwrite`, the run in it is deleted."""
        try:
            private_folder(self.path)
        except OSError as error:
            raise UsageError(f"--out {self.path} cannot be made: {error.strerror}") from error
        if not overwrite:
            return
        with locked(self.ledger):  # one of messages that left is moved aside, never deleted
            left = self.ledger.exists() and _messages_left(self.ledger)
            kept = self.ledger.with_name(f"ledger-until-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.jsonl")
            for old, new in ((witness_of(self.ledger), witness_of(kept)), (self.ledger, kept)):
                if left and old.exists():
                    old.rename(new)
                old.unlink(missing_ok=True)
        for path in self.models.glob(model_name("*")):
            path.unlink()
        for path in self._ours:
            if path.is_dir() and (path != self.models or not any(path.iterdir())):
                shutil.rmtree(path)
            elif not path.is_dir():
                path.unlink(missing_ok=True)

    def sign(self, settings: Mapping[str, Any]) -> None:
        """Write run.json. The ledger is created first, so if this file exists, a missing ledger was lost."""
        write_private(self.settings, (json.dumps(settings, indent=1) + "\n").encode())

    # What is there

    def read_settings(self) -> dict[str, Any]:
        """What `sign` wrote."""
        return _read_json(self.settings)

    def read_summary(self) -> dict[str, Any]:
        """The summary of a finished run."""
        return _read_json(self.summary)

    def model_files(self) -> dict[int, Path]:
        """The model files by node: of this process, of all processes of the run, or saved by `Run.save`."""
        places = (self.models, *self.path.glob("rank-*/models"), self.path)
        files = {p.stem.removeprefix("node-"): p for place in places for p in place.glob(model_name("*"))}
        return dict(sorted((int(node), p) for node, p in files.items() if node.isdecimal()))

    def contract(self) -> Contract | None:
        """The contract of the first start; None if there is no ledger."""
        if not self.ledger.exists():
            return None
        header = LedgerFile.read_header(self.ledger)
        return Contract.from_json(header.get("contract"), f"ledger {self.ledger}")

    # While it runs

    def open_log(self, before: Sequence[RoundLog]) -> IO[str]:
        """Open rounds.csv and write the rounds of earlier starts."""
        with writing(self.rounds):
            file = open(self.rounds, "w", newline="", opener=private)  # noqa: SIM115 - the run closes it
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(log.row() for log in before)
            file.flush()
        return file

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json atomically."""
        text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
        private_folder(self.path)
        write_private(self.summary, text.encode())


def _messages_left(ledger: Path) -> bool:
    """Whether messages charged to this ledger really left; assumed of a ledger that cannot be read, unless it is unused."""
    try:
        return bool(LedgerFile.read_header(ledger).get("durable", True))
    except RunError:
        return not unused(ledger)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): start a new run in another folder") from error
    return found if isinstance(found, dict) else {}


# Checkpoints in safetensors and JSON, written atomically. The last two are kept, and a damaged one is skipped with a warning

log = logging.getLogger(__name__)

KEPT = 2
_ASIDE = "aside-"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `round` rounds."""

    round: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


def save_checkpoint(
    folder: Path, round_: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
) -> None:
    """Write the checkpoint of a round. The one before stays until this one is completely on disk.

    Raises:
        RunError: the disk refused (full, say); the older checkpoint is untouched.
    """
    target, aside = folder / f"round-{round_:09d}", folder / f".round-{round_:09d}.part"
    data = save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    text = json.dumps({**meta, "round": round_, "sha256": hashlib.sha256(data).hexdigest()}, indent=1)
    try:
        private_folder(folder)
        shutil.rmtree(aside, ignore_errors=True)
        private_folder(aside)
        write_synced(aside / "tensors.safetensors", data)
        write_synced(aside / "meta.json", text.encode())
        sync_folder(aside)
        if target.exists():  # the same round again, after a resume
            shutil.rmtree(target)
        aside.rename(target)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        kept = _all(folder)
        safe = f"{kept[-1]} is intact" if kept else "there is no older one"
        raise RunError(
            f"the checkpoint of round {round_} cannot be written to {folder}: {error.strerror}; {safe}"
        ) from error
    kept, old = _all(folder)[-KEPT:], _all(folder)[:-KEPT]
    if len(kept) == KEPT:  # those set aside are needed no more once all that are kept are as far
        old += [path for path in _all(folder, f"{_ASIDE}round-") if _round(path) <= _round(kept[0])]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(folder: Path, at: int | None = None) -> Checkpoint | None:
    """The newest whole checkpoint, or that of round `at`; None if there is none.

    Raises:
        RunError: there are checkpoints and all of them are damaged.
    """
    found = [path for path in _all(folder) if at in (None, _round(path))]
    whole = next(_whole(found), None)
    if found and whole is None:
        raise RunError(
            f"all checkpoints in {folder} are damaged: start again with --overwrite or another --out"
        )
    return whole


def whole_rounds(folder: Path) -> list[int]:
    """The rounds that have a readable checkpoint, ascending."""
    return sorted(checkpoint.round for checkpoint in _whole(_all(folder)))


def _whole(paths: Sequence[Path]) -> Iterator[Checkpoint]:
    """Those that can be read, newest first."""
    for path in reversed(paths):
        try:
            yield _read(path)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            log.warning("checkpoint %s is damaged (%s): going back to the one before", path, error)


def set_aside_after(folder: Path, round_: int) -> None:
    """Rename the checkpoints of later rounds, because the run goes on from `round_`."""
    for path in _all(folder):
        if _round(path) > round_:
            aside = path.with_name(f"{_ASIDE}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)  # of an attempt before that one
            path.rename(aside)
            log.warning("going on from round %d: checkpoint %s is now %s", round_, path, aside.name)


def _round(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _read(path: Path) -> Checkpoint:
    meta = json.loads((path / "meta.json").read_text())
    if not isinstance(meta, dict):
        raise ValueError("meta.json holds no object")  # noqa: TRY004 - the file is damaged, no caller is wrong
    data = (path / "tensors.safetensors").read_bytes()
    if hashlib.sha256(data).hexdigest() != meta.pop("sha256"):
        raise ValueError("checksum differs")
    return Checkpoint(int(meta.pop("round")), load(data), meta)


def _all(folder: Path, prefix: str = "round-") -> list[Path]:
    """Our own checkpoints, without copies that somebody made next to them."""
    return sorted(p for p in folder.glob(f"{prefix}*") if p.name.removeprefix(prefix).isdecimal())
