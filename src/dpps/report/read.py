"""What is known of a run, read from its folder or from a `Run` in memory: the report reads a run's files here
and nowhere else."""

import csv
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpps.errors import RunError, UsageError
from dpps.learning.algorithm import ALGORITHMS
from dpps.noise.mechanisms import MECHANISMS
from dpps.privacy.accountant import Charge
from dpps.privacy.ledger import Ledger
from dpps.privacy.ledger_file import LedgerFile
from dpps.privacy.promise import Privacy, account, charges_ahead
from dpps.privacy.units import UNITS, NodeSwap, PrivacyOptions, Unit
from dpps.runs.baselines import read_comparisons
from dpps.runs.callbacks import RoundLog
from dpps.runs.folder import RunFolder
from dpps.runs.options import Options, effective
from dpps.runs.run import Run
from dpps.runs.summary import Comparisons
from dpps.sensitivity import SENSITIVITIES
from dpps.topology import Topology

Charges = Sequence[tuple[int, Charge]]
"""(round, charge) of every message of one node."""

_ESTIMATORS = {
    "Certified": "certified",
    "Paper": "estimated (paper)",
    "WorstCase": "worst case",
    "Oracle": "oracle",
}


@dataclass(frozen=True)
class Accuracy:
    """How good the models of a run or of a baseline are, in percent. What was not measured is None or empty."""

    mean: float | None = None
    by_epoch: Sequence[float] = ()
    by_node: Sequence[float] = ()
    own: float | None = None
    """Mean over the nodes, each on its own test data."""
    own_by_node: Sequence[float] = ()

    @property
    def latest(self) -> float | None:
        """At the end, or as far as the run has come."""
        return self.mean if self.mean is not None or not self.by_epoch else self.by_epoch[-1]

    @property
    def only_own(self) -> bool:
        """Whether there is no other measurement than on each node's own test data."""
        return self.latest is None and self.own is not None

    @property
    def judged(self) -> tuple[float | None, Sequence[float]]:
        """What a run is judged by, and the same by node: the common test set, or where there is none each node's own test data."""
        if self.latest is None:
            return self.own, self.own_by_node
        return self.latest, self.by_node

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Accuracy":
        """From a summary, or from one of its `baselines`, which has the same names."""
        return cls(
            facts.get("test_accuracy"),
            facts.get("accuracy_by_epoch") or (),
            facts.get("accuracy_by_node") or (),
            facts.get("own_accuracy"),
            facts.get("own_accuracy_by_node") or (),
        )


@dataclass(frozen=True)
class RunRecord:
    """A run as the report shows it. What a run does not have is None or empty."""

    name: str
    data: str
    model: str
    algorithm: str
    finished: bool
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    rounds: Sequence[RoundLog]
    accuracy: Accuracy
    privacy: Privacy
    unit: Unit | None
    charges: Charges
    """Of the node that paid most; rounds repeated after a crash are there twice and count twice."""
    seconds: Mapping[str, float]
    bytes_sent: int | None
    shared_parameters: int | None
    local_parameters: int | None
    nodes: int
    network: str
    """What the topology is called."""
    topology: Topology | None
    """None where only its name is known: a run made in Python keeps no code in its folder."""
    sync_every: int
    command: str | None
    """The command line that repeats the run; None for a run started from Python, and for one member's part in a federation's."""
    private_noise: bool
    """Whether nobody can know the noise; otherwise the run was a simulation."""
    federation: bool = False
    """Whether the run was one member's part of a federation."""
    own_statistics: bool = False
    """Whether the nodes' models keep statistics of their data, as BatchNorm does."""
    part: str | None = None
    """Of a distributed run: the process whose records are shown."""
    baselines: Mapping[str, Accuracy] = field(default_factory=dict)
    comparisons: Comparisons = field(default_factory=dict)
    metrics_by_epoch: Sequence[Mapping[str, Mapping[str, Sequence[float | None]]]] = ()
    """Per epoch: by data ("test", "own"), metric and node."""
    metrics: Mapping[str, Mapping[str, Sequence[float | None]]] = field(default_factory=dict)
    """The same at the end."""
    by_class: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """By data: a row for every class, of the nodes together."""
    labels: Sequence[Sequence[int]] = ()
    """How many training examples of each label every node has."""

    @property
    def title(self) -> str:
        """The run in one line."""
        return f"{self.data}, {self.model}, {self.algorithm} on {self.nodes} nodes"

    @property
    def accuracy_is_covered(self) -> bool:
        """Whether accuracy on public data may be passed on. Where a unit promises a total but does not clip each example, local
        parameters and statistics are not noised, and what is computed with them is as private as they are."""
        own = bool(self.local_parameters) or self.own_statistics
        noiseless = self.unit is not None and self.unit.has_total and not self.unit.per_example
        return not (noiseless and own)

    @property
    def simulated(self) -> bool:
        """Whether there is an epsilon, and messages that it does not protect."""
        return self.unit is not None and not self.private_noise

    @property
    def estimator(self) -> str:
        """What the estimated sensitivity is called."""
        if not isinstance(self.unit, NodeSwap):
            return "bound by clipping"
        kind = type(self.unit.sensitivity).__name__
        return _ESTIMATORS.get(kind, kind)


def read_folder(folder: Path, name: str) -> RunRecord:
    """A run's folder; without summary.json the run is unfinished.

    Raises:
        UsageError: there is no run in the folder, or nothing to show yet.
    """
    whole, parts = RunFolder(folder), _parts(folder)
    records = parts[0] if parts else whole
    summary = _json(whole.summary) or _json(records.summary)
    found = summary or _json(records.settings)
    if found is None:
        raise UsageError(
            f"{folder} is not a run: it has no {records.settings.name}; name a folder written by dpps train --out"
        )
    kept = {} if summary else _checkpoint(records)
    facts, settings = summary or kept, _json(records.settings) or {}
    process = records.path.resolve().name
    distributed = process.startswith("rank-")
    if "data" in found["config"]:
        config = _configuration(found["config"], folder)
        private_noise = not config.seeded_noise if distributed else config.secure_noise
        made = _made_by_options(config, facts, private_noise, records, settings.get("federation", False))
    else:
        private_noise = settings.get("private_noise", False)
        made = _made_in_python(found["config"], facts, records, folder)
    rounds = _rounds(records, kept)
    unit: Unit | None = made["unit"]
    ledgers = [LedgerFile.read(part.ledger) for part in parts or [whole]] if unit else []
    ledger, row = _dearest(unit, ledgers)
    return RunRecord(
        name=name,
        **made,
        **_results(facts),
        finished=summary is not None,
        versions=found["versions"],
        rounds=rounds,
        privacy=_finished(summary) if summary else _so_far(unit, records, ledger, rounds, private_noise),
        charges=ledger.history_of(row),
        private_noise=private_noise,
        part=process if distributed else None,
    )


def _results(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary says, as far as it does."""
    return {
        "accuracy": Accuracy.from_json(facts),
        "seconds": facts.get("seconds", {}),
        "bytes_sent": facts.get("bytes_sent_per_node"),
        "shared_parameters": facts.get("shared_parameters"),
        "local_parameters": facts.get("local_parameters"),
        "own_statistics": facts.get("own_statistics", False),
        "baselines": {k: Accuracy.from_json(v) for k, v in (facts.get("baselines") or {}).items()},
        "comparisons": read_comparisons(facts),
        "metrics_by_epoch": facts.get("metrics_by_epoch") or (),
        "metrics": facts.get("metrics_by_node") or {},
        "by_class": facts.get("by_class") or {},
        "labels": facts.get("split") or (),
    }


def _made_by_options(
    config: Options, facts: Mapping[str, Any], private_noise: bool, records: RunFolder, federation: bool
) -> dict[str, Any]:
    """What the options of `dpps train` say about a run."""
    topology = config.network()
    processes = len(facts.get("bytes_sent_by_rank", []))
    schema = records.schema if records.schema.exists() else None
    return {
        "data": data_name(config),
        "model": config.model,
        "algorithm": config.algorithm,
        "options": options_shown(config, private_noise, facts.get("chosen")),
        "unit": config.privacy(),
        "nodes": topology.nodes,
        "network": str(topology),
        "topology": topology,
        "sync_every": config.sync_every if ALGORITHMS[config.algorithm].synchronises else 0,
        "command": None if federation else command(config, processes, schema),
        "federation": federation,
    }


def _made_in_python(
    config: Mapping[str, Any], facts: Mapping[str, Any], records: RunFolder, folder: Path
) -> dict[str, Any]:
    """What a run made in Python says about itself: names instead of code, and its contract."""
    if config.get("unit", "none") not in ("none", *UNITS.names()):
        raise UsageError(
            f"{folder} holds a run of the unit {config['unit']}, which is not registered here: write its page from Python, with run.report(path)"
        )
    return {
        "data": "own data",
        "model": config["model"],
        "algorithm": config["algorithm"],
        "options": _shown({**config, **(facts.get("chosen") or {})}),
        "unit": _promised(config, records),
        "nodes": config["nodes"],
        "network": config["topology"],
        "topology": None,
        "sync_every": config["sync-every"],
        "command": None,
    }


def _promised(config: Mapping[str, Any], records: RunFolder) -> Unit | None:
    """The unit, from the contract in the ledger: with the promised epsilon, or the noise that was chosen."""
    contract = records.contract() if config["unit"] != "none" else None
    if contract is None:
        return None
    noise = "budget" if MECHANISMS[contract.mechanism].pure else "noise_multiplier"
    asked = {noise: contract.noise} if contract.epsilon is None else {"epsilon": contract.epsilon}
    trust = {} if contract.trust is None else {"trust": "pairs", "colluders": contract.trust["colluders"]}
    sensitivity = str(config.get("sensitivity", "")).partition("(")[0]
    options: dict[str, Any] = {
        "delta": contract.delta,
        "clip": contract.clip,
        "records_per_user": contract.records_per_user,
        "mechanism": contract.mechanism,
        "noise_rate": config.get("noise-rate", 1.0),
        **asked,
        **trust,
    }
    if registered := [n for n in SENSITIVITIES.names() if SENSITIVITIES[n].__name__ == sensitivity]:
        options["sensitivity"] = registered[0]
    return UNITS[contract.unit].from_options(PrivacyOptions(**options))


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not switched off."""
    return {k: v for k, v in settings.items() if v not in (None, False, 0) or k == "seed"}


def read_run(run: Run, name: str) -> RunRecord:
    """A run in memory."""
    summary = run.summary
    _, row = _dearest(run.unit, [run.ledger])
    return RunRecord(
        name=name,
        data="own data",
        model=type(run.algorithm.model).__name__,
        algorithm=type(run.algorithm).__name__.lower(),
        finished=True,
        options=_shown({**summary.config, **summary.chosen}),
        versions=summary.versions,
        rounds=run.log,
        privacy=summary.privacy,
        unit=run.unit,
        charges=run.ledger.history_of(row),
        nodes=run.topology.nodes,
        network=str(run.topology),
        topology=run.topology,
        sync_every=run.sync_every,
        command=None,
        private_noise=run.protocol.noise.private,
        **_results({**summary.to_json(), "split": None}),
    )


def _finished(summary: Mapping[str, Any]) -> Privacy:
    """As its summary says; one of an older version says only what was spent."""
    found = summary["privacy"]
    return Privacy(**{"epsilon_spent": found["epsilon"], **found})


def _so_far(
    unit: Unit | None, folder: RunFolder, ledger: Ledger, rounds: Sequence[RoundLog], private_noise: bool
) -> Privacy:
    """Of an unfinished run: what it promised, and what it has spent."""
    contract = folder.contract() if unit else None
    if unit is None or contract is None:
        return account(unit, ledger, private_noise=private_noise)
    calibration = contract.calibrate(unit.for_network(contract.plan.nodes))
    ahead = charges_ahead(calibration, contract.plan, len(rounds), ledger.messages)
    return account(unit, ledger, private_noise=private_noise, ahead=ahead, promised=contract.epsilon)


def _dearest(unit: Unit | None, ledgers: Sequence[Ledger]) -> tuple[Ledger, int]:
    """The node that paid most, and the ledger it is in."""
    if unit is None or not ledgers:
        return Ledger([0]), 0
    different: dict[tuple[Charge, ...], tuple[Ledger, int]] = {}
    for ledger in ledgers:
        for row, charges in ledger.charges_by_row().items():
            different.setdefault(tuple(charges), (ledger, row))
    if len(different) == 1:  # nobody paid more than the others: the accountant need not be asked
        return next(iter(different.values()))
    return different[max(different, key=lambda charges: unit.total(charges).epsilon)]


def _configuration(options: Mapping[str, Any], folder: Path) -> Options:
    return Options.from_json(options, str(folder), f"{folder} was written by another version of dpps")


# Options


_NEEDED_AGAIN = ("data-dir", "node-data", "schema", "weights")
"""Files that a run needs again; everything else about how it was executed is left out of the command."""


def options_shown(
    config: Options, private_noise: bool, chosen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options that changed the result, with the data by their name and the noise in words.

    Args:
        config: as the run was given them.
        private_noise: whether nobody can know the noise.
        chosen: what the run chose itself of what was left open.
    """
    found = effective(config, chosen)
    shown = {name: v for name, v in found.items() if name not in ("data", "secure-noise", "seeded-noise")}
    if config.noisy:
        shown["noise"] = "secure, from the operating system" if private_noise else "seeded (simulation)"
    return {"data": data_name(config), **shown}


def data_name(config: Options) -> str:
    """What the data are called: the data set, or the folder of the nodes' own files without a node's number."""
    if config.node_data is None:
        return config.data
    for part in reversed(config.node_data.parts):
        name = part.replace("{rank}", "").strip("-_. /")
        if name and name not in ("node", "rank", "data"):
            return name
    return "own data"


def command(config: Options, processes: int = 0, schema: Path | None = None) -> str:
    """The shortest command line that resolves to this configuration; a distributed run needs a folder, too.

    Args:
        config: as the run was given them.
        processes: how many it had; 0: a simulation.
        schema: where the schema can be read now, if not where the run was given it.
    """
    named, config = config.schema, replace(config, schema=schema or config.schema)
    wanted, plain = config.resolve(), Options()
    names = [name.replace("-", "_") for name in (*config.common(), *_NEEDED_AGAIN)]
    given = {n: getattr(wanted, n) for n in names if getattr(wanted, n) != getattr(plain, n)}
    meaning = _meaning(given)
    for option in list(given):
        fewer = {k: v for k, v in given.items() if k != option}
        if meaning is not None and _meaning(fewer) == meaning:
            given = fewer
    if named is not None:
        given["schema"] = named
    words = [word for option, value in given.items() for word in _option(option, value)]
    start = ["dpps", "train"]
    if processes:
        start = ["torchrun", "--nproc-per-node", str(processes), "-m", *start, "--out", "again"]
    return shlex.join([*start, *words])


def _meaning(options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What these options resolve to; None if they have no meaning together."""
    try:
        return Options(**options).resolve().to_json()
    except UsageError:
        return None


def _option(name: str, value: object) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", str(value)]


# Files


def _parts(folder: Path) -> list[RunFolder]:
    """The folders of a distributed run's processes, as far as they are on this machine."""
    found = [path for path in folder.glob("rank-*") if path.is_dir()]
    return [RunFolder(path) for path in sorted(found, key=lambda path: (len(path.name), path.name))]


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


def _checkpoint(folder: RunFolder) -> dict[str, Any]:
    """What the newest checkpoint says about the rounds so far; empty when there is none."""
    found = sorted(folder.checkpoints.glob("round-*/meta.json"))
    return (_json(found[-1]) or {}) if found else {}


def _rounds(folder: RunFolder, kept: Mapping[str, Any]) -> list[RoundLog]:
    """The lines of rounds.csv; a last one without its end is half written, by a run that was killed or still goes on."""
    path = folder.rounds
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
    real, estimated, used, epsilon = (
        float(row[name]) if row[name] else None for name in ("real", "estimated", "used", "epsilon")
    )
    scale, loss = (float(row[name]) for name in ("scale", "loss"))
    at = int(row["round"])
    return RoundLog(at, real, estimated, used, scale, epsilon, loss, watched=watched.get(at, {}))
