"""The data ledger: what all runs on a data set have spent together. Every run with real noise is recorded
for its nodes' data.

The notes are in one file of the user's (`$DPPS_STATE`, or the system's folder for state),
one JSON object per line: which data, by its path and by a checksum of its files,
so that it is found again where it was moved; and where the run's ledger is, and the checksum of its first line,
so that another run's ledger in the same place is not taken for it.
What was spent is read from the ledgers themselves. A note is written before the first message of a run.
If a ledger is missing, the run's full promised epsilon is counted.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpps.disk import private, private_folder, sync_folder
from dpps.errors import RunError, UsageError
from dpps.privacy.accountant import SUM_OF_ROUNDS, Charge, total
from dpps.privacy.ledger import LedgerFile
from dpps.privacy.units import UNITS
from dpps.runs.folder import RunFolder, replaced_ledgers

if TYPE_CHECKING:
    from dpps.runs.run import Run

STATE = "DPPS_STATE"
IN_MEMORY = "in memory:"
"""Before the checksum of data that was given to a run as tensors."""
_FILE = "data-ledgers.jsonl"
_VERSION = 1
"""Of a line. A line of a higher one may mean more than this version can count; a field that is not known to this one adds nothing."""
_FEATURES = re.compile(r"features-[0-9a-f]{32}\.safetensors")


@dataclass(frozen=True)
class Note:
    """One run of one data set."""

    data: str
    """Where it was."""
    checksum: str
    """Of the files there."""
    ledger: str
    """Path of the run's ledger."""
    first_seal: str
    """Checksum of the ledger's first line, which no other run has."""
    node: int
    unit: str
    delta: float
    records_per_user: int
    promised: float | None
    """The epsilon that the run may spend; None: it has no such limit."""
    distance: float
    """Of the noise of all planned rounds from the noise charged for."""
    started: str


@dataclass(frozen=True)
class Spent:
    """What a run has spent of a data set."""

    note: Note
    charges: list[Charge] | None
    """None: its ledger, or the end of it, is gone."""


def note_runs(run: "Run") -> None:
    """Note a run whose messages leave before it sends any, for each data set of the nodes held here.

    A run that goes on was noted at its first start, unless that was cut off: what is missing is made up for.
    """
    if run.unit is not None and isinstance(run.ledger, LedgerFile):
        unit, distance = run.unit, run.nodes.noise_distance(run.plan.paid)
        note_ledger(run.ledger, run, unit.delta, unit.records_per_user, unit.epsilon, distance)


def note_ledger(
    ledger: LedgerFile,
    run: "Run",
    delta: float,
    records_per_user: int,
    promised: float | None,
    distance: float = 0.0,
) -> None:
    """Note a ledger for each data set of the nodes of a run: its own, or that of numbers which were computed with its model.
    The other arguments are as in `Note`."""
    assert run.unit is not None
    noted = {(n.first_seal, n.node, n.data) for n in _notes()} if run.resumed else set()
    lines = []
    for node, data, content in _sources(run):
        if (ledger.first_seal, node, data) in noted:
            continue
        note = Note(
            data,
            content,
            str(ledger.path.resolve()),
            ledger.first_seal,
            node,
            run.unit.name,
            delta,
            records_per_user,
            promised,
            distance,
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
        lines.append(json.dumps({"version": _VERSION, **asdict(note)}).encode() + b"\n")
    if lines:
        _append(_path(), b"".join(lines))


def _sources(run: "Run") -> Iterator[tuple[int, str, str]]:
    """(node, where its data is, checksum) of the nodes held here, as far as their data has an identity: files, or for a run made
    in Python tensors in memory. A public data set has nothing to spend."""
    if run.description.sources:
        for node, source in zip(run.nodes.rows, run.description.sources, strict=True):
            path = Path(source).resolve()
            yield node, str(path), checksum(path)
    elif run.description.contents:
        for node, content in zip(run.nodes.rows, run.description.contents, strict=True):
            yield node, f"{IN_MEMORY} {content[:16]}", content
    elif run.description.build is None:
        for node, data in zip(run.nodes.rows, run._data, strict=True):
            if isinstance(data, TensorDataset):
                content = _content(data.tensors)
                yield node, f"{IN_MEMORY} {content[:16]}", content


def _content(tensors: Sequence[Tensor]) -> str:
    """A checksum of examples, in whatever order they are: a data set that was shuffled is the same."""
    plain = (t.detach().cpu().reshape(len(t), -1).contiguous().view(torch.uint8).numpy() for t in tensors)
    rows = zip(*plain, strict=True)
    each = sorted(hashlib.sha256(b"\0".join(part.tobytes() for part in row)).digest() for row in rows)
    return hashlib.sha256(b"".join(each)).hexdigest()


def notes_of(data: Path, node: int | None = None) -> list[Note]:
    """All runs of a data set, each node's once: found by the path where it is or was and by the checksum of what is there now; or of the data
    of a run's folder, of whose nodes `node` is meant."""
    exists, wanted = data.exists(), str(data.resolve())
    contents = _of_run(data, node) if exists else set()
    if not contents and exists:
        contents = {checksum(data)}
    found = [n for n in _notes() if n.data == wanted or n.checksum in contents]
    if not found and not exists:
        names = sorted({n.data for n in _notes()})
        listed = f"choose one of {', '.join(names)}" if names else "no run with real noise was made here yet"
        raise UsageError(f"{_path()} has no run on {data}: {listed}")
    return list({(n.first_seal, n.node): n for n in reversed(found)}.values())[::-1]


def _of_run(folder: Path, node: int | None) -> set[str]:
    """Checksums of the data that a run in this folder learned from; none where no run that was noted is there."""
    parts = [RunFolder(part) for part in (folder, *folder.glob("rank-*"))]
    ledgers = [part.ledger for part in parts if part.settings.exists() and part.ledger.exists()]
    seals = {LedgerFile.read_first_seal(ledger) for ledger in ledgers}
    found = {n.node: n.checksum for n in _notes() if n.first_seal in seals}
    if len(found) > 1 and node not in found:
        raise UsageError(
            f"{folder} is a run over the data of the nodes {', '.join(map(str, sorted(found)))}: say whose, such as --node {min(found)}"
        )
    return {content for of, content in found.items() if node in (None, of)}


def spent(notes: Sequence[Note], read: Callable[[Path], LedgerFile | None]) -> list[Spent]:
    """What each run has spent, from its ledger; `read` gives None where some of its lines may be gone."""
    found = []
    for note in notes:
        path = _ledger_of(note)
        ledger = None if path is None else read(path)
        found.append(Spent(note, None if ledger is None else ledger.charges_by_row()[note.node]))
    return found


def checksum(path: Path) -> str:
    """Of the files in a folder (or of one file): their names and contents."""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if _counts(p, path)) if path.is_dir() else [path]:
        name = file.relative_to(path).as_posix() if path.is_dir() else ""
        with file.open("rb") as content:
            digest.update(f"{name}\0{hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _ledger_of(note: Note) -> Path | None:
    """Where the ledger of this very run is: at its path, or moved aside there when the run was replaced."""
    path = Path(note.ledger)
    places = [*([path] if path.exists() else []), *replaced_ledgers(path)]
    return next((p for p in places if LedgerFile.read_first_seal(p) == note.first_seal), None)


def _counts(file: Path, folder: Path) -> bool:
    """Files of examples; what was computed of them and is kept beside them is hidden, or named as features are."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and not hidden and not _FEATURES.fullmatch(file.name)


def _path() -> Path:
    own = os.environ.get(STATE)
    if own:
        return Path(own) / _FILE
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "dpps" / _FILE


def _append(path: Path, lines: bytes) -> None:
    """Put lines on disk. A last line that was cut off goes: it is of a run that never began."""
    import fcntl  # there is none on Windows, where no run is durable

    try:
        private_folder(path.parent)
        with open(path, "ab+", opener=private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written ({error.strerror}), so what this data spends would not be known later: set ${STATE} to a "
            "folder that can; nothing was sent"
        ) from error


def _notes() -> Iterator[Note]:
    path = _path()
    if not path.exists():
        return
    whole = path.read_bytes().rpartition(b"\n")[0]
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            found: dict[str, Any] = json.loads(line)
            newer = found.get("version", 1) > _VERSION
            note = None if newer else Note(**{field.name: found[field.name] for field in fields(Note)})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunError(
                f"{path} is damaged at line {number}: what was spent is not known; restore the file from a copy"
            ) from error
        if note is None:
            raise RunError(
                f"{path} was written by a newer version of dpps (line {number} has version {found['version']}): use that one"
            )
        yield note


# What all runs of a data set have spent together


@dataclass(frozen=True)
class Together:
    """A total over runs, or why there is none."""

    epsilon: float | None
    """None: not known."""
    records_per_user: int
    """How many records of one person it covers: the most that any of the runs assumed."""
    remark: str = ""
    """Why it is not known and what to do; or what else must be said."""


def together(runs: Sequence[Spent], unit: str, delta: float) -> Together:
    """What all runs have spent together, as a promise of this unit.

    It is not known where a run promised this unit nothing (node-swap hides no record, and record no whole node), or where
    a ledger was lost whose run had no limit. A lost ledger's promised epsilon and delta are added to the total of the
    others (basic composition).
    """
    sent = [run for run in runs if run.charges is None or run.charges]
    units = (unit, *(UNITS[unit].implied_by if unit in UNITS else ()))
    group = max((run.note.records_per_user for run in sent if run.note.unit == unit), default=1)
    if foreign := sorted({run.note.unit for run in sent} - set(units)):
        words = f"a run of the unit {' and '.join(foreign)} has sent what the unit {unit} does not cover"
        return Together(None, group, words)
    lost = [run.note for run in sent if run.charges is None]
    if endless := [note.ledger for note in lost if note.promised is None]:
        words = f"{endless[0]} is gone or not whole, and its run had no target epsilon: restore it"
        return Together(None, group, words)
    promised = [_for_group(note, unit, group) for note in lost]
    epsilon, lost_delta = (math.fsum(values) for values in zip((0.0, 0.0), *promised, strict=True))
    kept = [run for run in sent if run.charges]
    if not _has_total(unit):
        # its noise depends on the data: only the plain sum stands
        rounds = total(_charges(kept), 0.0).epsilon
        return Together(rounds + epsilon, group, SUM_OF_ROUNDS)
    left = delta - lost_delta
    if left < 0 or (kept and left == 0):
        return Together(
            None,
            group,
            f"at delta {delta:g}: what the runs of lost ledgers promised takes {lost_delta:.3g} of it; restore them, or ask for a larger --delta",
        )
    epsilon += _of_kept(kept, unit, left, group)
    if not math.isfinite(epsilon):
        return Together(None, group, f"there is no bound at delta {delta:g}: ask for a larger --delta")
    return Together(epsilon, group)


def alone(run: Spent, delta: float) -> float | None:
    """What one run has spent; of a lost ledger, what was promised (at the delta of that promise). None: not known."""
    if run.charges is None:
        return run.note.promised
    if not _has_total(run.note.unit):
        return total(run.charges, 0.0).epsilon
    epsilon = _epsilon([run], delta, run.note.records_per_user)
    return epsilon if math.isfinite(epsilon) else None


def _has_total(unit: str) -> bool:
    """Whether the rounds of this unit make a total; of one that is registered elsewhere, its ledger decides."""
    return unit not in UNITS or UNITS[unit].has_total


def _of_kept(runs: Sequence[Spent], unit: str, delta: float, group: int) -> float:
    """By the accountant. A run of a stronger unit covers all records of a person as it is,
    so it is not composed at the price of a group, but beside it."""
    own = [run for run in runs if run.note.unit == unit]
    stronger = [run for run in runs if run.note.unit != unit]
    if not own or not stronger or group == 1:
        return _epsilon(runs, delta, group if own else 1)
    return _epsilon(own, delta / 2, group) + _epsilon(stronger, delta / 2, 1)


def _epsilon(runs: Sequence[Spent], delta: float, group: int) -> float:
    charges = _charges(runs)
    if not charges:
        return 0.0
    return total(charges, delta, group, distance=math.fsum(run.note.distance for run in runs)).epsilon


def _charges(runs: Sequence[Spent]) -> list[Charge]:
    return [charge for run in runs for charge in run.charges or ()]


def _for_group(note: Note, unit: str, group: int) -> tuple[float, float]:
    """Epsilon and delta that a run promised, for as many records of one person as another run assumed.

    Of k groups, (epsilon, delta) becomes k epsilon and delta (1 + e^epsilon + ... + e^((k - 1) epsilon)).
    """
    assert note.promised is not None
    times = math.ceil(group / note.records_per_user) if note.unit == unit else 1
    if (times - 1) * note.promised > 700:
        return math.inf, math.inf
    return times * note.promised, note.delta * math.fsum(math.exp(k * note.promised) for k in range(times))
