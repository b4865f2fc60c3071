"""What there is to tell of a run, read from its folder or from a `Run` in memory."""

import csv
import dataclasses
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpps.config import TrainConfig
from dpps.errors import RunError, UsageError
from dpps.learning import RoundLog, Run
from dpps.privacy.accountant import Charge
from dpps.privacy.statement import Privacy, account, entry
from dpps.privacy.units import NodeSwap, Unit
from dpps.report.spending import Spending, by_round
from dpps.topology import Topology
from dpps.version import versions

#: Options that say where and how a run was carried out; the command that repeats it leaves them out.
_LEFT_OUT = ("out", "resume", "overwrite", "checkpoint_every", "quiet", "timeout")

_ESTIMATORS = {
    "Certified": "certified",
    "Paper": "estimated (paper)",
    "WorstCase": "worst case",
    "Oracle": "oracle",
}


@dataclass(frozen=True)
class Story:
    """A run as the page tells it. What a run does not have is None or empty."""

    name: str
    title: str
    finished: bool
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    rounds: Sequence[RoundLog]
    accuracy: float | None
    accuracy_by_epoch: Sequence[float]
    accuracy_by_node: Sequence[float]
    own_accuracy: float | None
    own_accuracy_by_node: Sequence[float]
    privacy: Privacy
    spent: Spending
    seconds: Mapping[str, float]
    bytes_sent: int | None
    shared_parameters: int | None
    local_parameters: int | None
    topology: Topology
    sync_every: int
    estimator: str
    """What the estimated sensitivity is called."""
    command: str | None
    """The command line that repeats the run; None for a run started from Python."""
    fresh_noise: bool
    """Whether nobody can know the noise, so that a repetition differs."""
    part: str | None = None
    """Of a distributed run: the process whose records are shown."""


def read_folder(folder: Path, name: str) -> Story:
    """The story of a run's folder; without summary.json it is told as unfinished.

    Raises:
        UsageError: there is no run in the folder, or nothing to show yet.
    """
    parts = _parts(folder)
    records = parts[0] if parts else folder
    summary = _json(folder / "summary.json") or _json(records / "summary.json")
    found = summary or _json(records / "run.json")
    if found is None:
        raise UsageError(
            f"{folder} is not a run: it has no run.json; name a folder written by dpps train --out"
        )
    kept = {} if summary else _checkpoint(records)
    config = _configuration(found["config"], folder)
    unit, rounds = config.privacy(), _rounds(records, kept)
    lines = max((_ledger(part / "ledger.jsonl") for part in parts or [folder]), key=len) if unit else []
    process = records.resolve().name
    distributed = process.startswith("rank-")
    fresh_noise = not config.seeded_noise if distributed else config.secure_noise
    privacy = (
        Privacy(**summary["privacy"])
        if summary
        else account(unit, [charge for _, charge in lines], private_noise=fresh_noise)
    )
    facts = summary or kept
    return Story(
        name=name,
        title=f"{config.data}, {config.model}, {config.algorithm} on {config.nodes} nodes",
        finished=summary is not None,
        config=found["config"],
        versions=found["versions"],
        rounds=rounds,
        accuracy=facts.get("test_accuracy"),
        accuracy_by_epoch=facts.get("accuracy_by_epoch") or [],
        accuracy_by_node=facts.get("accuracy_by_node") or [],
        own_accuracy=facts.get("own_accuracy"),
        own_accuracy_by_node=facts.get("own_accuracy_by_node") or [],
        privacy=privacy,
        spent=by_round(unit, lines, privacy.epsilon),
        seconds=facts.get("seconds", {}),
        bytes_sent=facts.get("bytes_sent_per_node"),
        shared_parameters=facts.get("shared_parameters"),
        local_parameters=facts.get("local_parameters"),
        topology=config.network(),
        sync_every=0 if config.algorithm == "pedfl" else config.sync_every,
        estimator=_estimator(unit),
        command=command(config, len(facts.get("bytes_sent_by_rank", []))),
        fresh_noise=fresh_noise,
        part=process if distributed else None,
    )


def read_run(run: Run, name: str) -> Story:
    """The story of a run in memory."""
    learner = run.learner
    settings, terms, mechanism = learner.config, learner.terms, learner.protocol.mechanism
    sampling = terms.sampling if terms else 1.0
    lines = [
        (log.round, entry(log.round, mechanism, log.used, log.scale, sampling).charge)
        for log in run.rounds
        if log.used is not None
    ]
    model = type(settings.model).__name__
    return Story(
        name=name,
        title=f"{model} on {settings.topology.nodes} nodes",
        finished=True,
        config={"model": model, **_settings(settings)},
        versions=versions(),
        rounds=run.rounds,
        accuracy=run.accuracy,
        accuracy_by_epoch=run.accuracy_by_epoch,
        accuracy_by_node=run.accuracy_by_node,
        own_accuracy=run.own_accuracy,
        own_accuracy_by_node=run.own_accuracy_by_node,
        privacy=run.privacy,
        spent=by_round(settings.privacy, lines, run.privacy.epsilon),
        seconds=run.seconds,
        bytes_sent=sum(log.bytes for log in run.rounds),
        shared_parameters=learner.partition.shared_size,
        local_parameters=learner.partition.local_size,
        topology=settings.topology,
        sync_every=settings.sync_every,
        estimator=_estimator(settings.privacy),
        command=None,
        fresh_noise=learner.protocol.noise.private,
    )


def command(config: TrainConfig, processes: int = 0) -> str:
    """The shortest command line that resolves to this configuration; a distributed run needs a folder, too."""
    wanted, plain = config.resolved(), TrainConfig()
    given = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in _LEFT_OUT and getattr(config, f.name) != getattr(plain, f.name)
    }
    for option in list(given):
        fewer = {k: v for k, v in given.items() if k != option}
        if _meaning(fewer) == _meaning(given):
            given = fewer
    assert TrainConfig(**given).resolved().fingerprint() == wanted.fingerprint()
    words = [word for option, value in given.items() for word in _option(option, value)]
    start = ["launch", "--nproc", str(processes), "--out", "again"] if processes else ["train"]
    return shlex.join(["dpps", *start, *words])


def _meaning(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What these options resolve to; None if they have no meaning together."""
    try:
        return TrainConfig(**options).resolved().to_json()
    except UsageError:
        return None


def _option(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


def _configuration(options: Mapping[str, Any], folder: Path) -> TrainConfig:
    fields = {f.name.replace("_", "-"): f for f in dataclasses.fields(TrainConfig)}
    strange = [name for name in options if name not in fields]
    if strange:
        raise UsageError(
            f"{folder} was written by another version of dpps (option {strange[0]} is unknown): report it with that one"
        )
    values: dict[str, Any] = {}
    for name, value in options.items():
        is_path = value is not None and "Path" in str(fields[name].type)
        values[fields[name].name] = Path(value) if is_path else value
    return TrainConfig(**values)


def _settings(settings: Any) -> dict[str, Any]:
    """The arguments of a PartPSP that have a short text."""
    plain = ("lr_shared", "lr_local", "lr_step", "batch_size", "local_steps", "sync_every", "seed", "engine")
    shared = settings.shared if isinstance(settings.shared, (str, list, tuple)) else "by a function"
    return {
        "shared": shared if isinstance(shared, str) else ", ".join(shared),
        "topology": repr(settings.topology),
        "privacy": repr(settings.privacy) if settings.privacy else "none",
        **{name.replace("_", "-"): getattr(settings, name) for name in plain},
    }


def _estimator(unit: Unit | None) -> str:
    if not isinstance(unit, NodeSwap):
        return "bound by clipping"
    kind = type(unit.sensitivity).__name__
    return _ESTIMATORS.get(kind, kind)


# Files


def _parts(folder: Path) -> list[Path]:
    """The folders of a distributed run's processes, as far as they are on this machine."""
    found = [path for path in folder.glob("rank-*") if path.is_dir()]
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}): restore it from a copy, or repeat the run") from error
    if not isinstance(found, dict):
        raise RunError(f"{path} is damaged (not an object): restore it from a copy, or repeat the run")
    return found


def _checkpoint(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint says about the rounds so far; empty when there is none."""
    found = sorted((folder / "checkpoint").glob("round-*/meta.json"))
    return (_json(found[-1]) or {}) if found else {}


def _rounds(folder: Path, kept: Mapping[str, Any]) -> list[RoundLog]:
    """The lines of rounds.csv; a last one without its end is half written, by a run that was killed or still goes on."""
    path = folder / "rounds.csv"
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): the run has nothing to show yet"
        ) from error
    watched = {row[0]: row[-1] for row in kept.get("rounds", [])}
    logs = []
    for number, row in enumerate(csv.DictReader(whole.splitlines()), start=2):
        try:
            logs.append(_log(row, watched))
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{path} is damaged at line {number}: restore it from a copy, or repeat the run"
            ) from error
    if not logs:
        raise UsageError(f"{path} has no complete round yet: wait for the run's first rounds")
    return logs


def _log(row: Mapping[str, str], watched: Mapping[int, dict[str, float]]) -> RoundLog:
    real, estimated, used = (
        float(row[name]) if row[name] else None for name in ("real", "estimated", "used")
    )
    scale, epsilon, loss = (float(row[name]) for name in ("scale", "epsilon", "loss"))
    at = int(row["round"])
    return RoundLog(at, real, estimated, used, scale, epsilon, loss, watched=watched.get(at, {}))


def _ledger(path: Path) -> list[tuple[int, Charge]]:
    """(round, charge) of every message of the node that paid most. Only read: a run may still be writing it."""
    try:
        whole, _, _ = path.read_bytes().rpartition(b"\n")
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}): what was spent is not known") from error
    try:
        header, *lines = [json.loads(line) for line in whole.split(b"\n")]
        payer = _payer(header["rows"], lines)
        return [
            (int(line["round"]), _charge(line))
            for line in lines
            if line["rows"] == "all" or payer in line["rows"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged: what was spent is not known; restore it from a copy") from error


def _payer(rows: Sequence[int], lines: Sequence[Mapping[str, Any]]) -> int:
    sent = dict.fromkeys(rows, 0)
    for line in lines:
        for row in () if line["rows"] == "all" else line["rows"]:
            sent[row] += line["reserved"]
    return max(sent, key=lambda row: sent[row])


def _charge(line: Mapping[str, Any]) -> Charge:
    return Charge(
        mechanism=line["mechanism"],
        epsilon=float(line["epsilon"]),
        noise_multiplier=float(line["noise_multiplier"]),
        sampling=float(line["sampling"]),
        count=int(line["reserved"]),
    )


def finite(value: float | None) -> bool:
    """Whether a value can be drawn."""
    return value is not None and math.isfinite(value)
