"""What a page shows of a run, read from its folder or from a `Run` in memory."""

import csv
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from dpps.errors import RunError, UsageError
from dpps.noise.mechanisms import MECHANISMS
from dpps.privacy.accountant import Charge
from dpps.privacy.ledger import Ledger, LedgerFile
from dpps.privacy.promise import account, charges_ahead
from dpps.privacy.units import UNITS, PrivacyOptions, Unit
from dpps.runs.callbacks import COLUMNS, TOTAL, RoundLog
from dpps.runs.folder import RunFolder
from dpps.runs.options import Options, effective
from dpps.runs.run import Run
from dpps.runs.summary import Summary
from dpps.sensitivity import SENSITIVITIES

SPENT_POINTS = 8
"""How often the accountant is asked along a run: it takes a good part of a second each time."""


@dataclass(frozen=True)
class Reported:
    """A run on a page: its summary, and what only its folder says."""

    name: str
    summary: Summary
    log: Sequence[RoundLog]
    options: Mapping[str, Any]
    """Those that changed the result."""
    unit: Unit | None
    charges: Sequence[tuple[int, Charge]]
    """(round, charge) of every message of the node that paid most; rounds repeated after a crash are there twice and count twice."""
    data: str = "own data"
    command: str | None = None
    """The command line that repeats the run; None for a run started from Python, and for one member's part in a federation's."""
    finished: bool = True
    part: str | None = None
    """Of a distributed run: the process whose records are shown."""

    @property
    def title(self) -> str:
        """The run in one line."""
        config = self.summary.config
        return f"{self.data}, {config['model']}, {config['algorithm']} on {config['nodes']} nodes"

    def spent(self) -> dict[int, float]:
        """Epsilon after each round, or after a few of them where only the accountant can tell; empty when there is none."""
        total = self.summary.privacy.epsilon_spent
        if self.unit is None or not self.charges or total is None:
            return {}
        lines = sorted(self.charges, key=lambda line: line[0])
        if not self.unit.has_total:  # only the plain sum stands
            sums = accumulate((charge.event.pure_epsilon or 0.0) * charge.count for _, charge in lines)
            return dict(zip((at for at, _ in lines), sums, strict=True))
        ends = {at: k + 1 for k, (at, _) in enumerate(lines)}
        rounds = list(ends)
        step = max(1, math.ceil((len(rounds) - 1) / (SPENT_POINTS - 1)))
        charges = [charge for _, charge in lines]
        found = {at: self.unit.total(charges[: ends[at]]).epsilon for at in rounds[:-1:step]}
        return {**found, rounds[-1]: total}


def read_run(run: Run, name: str) -> Reported:
    """A run in memory."""
    ledger, row = _dearest(run.unit, [run.ledger])
    options = _switched_on({**run.summary.config, **run.summary.chosen})
    return Reported(name, run.summary, run.log, options, run.unit, ledger.history_of(row))


def read_folder(folder: Path, name: str) -> Reported:
    """A run's folder; without summary.json the run is unfinished.

    Raises:
        UsageError: there is no run in the folder, another version wrote it, or there is nothing to show yet.
    """
    whole = RunFolder(folder)
    ranks = sorted(folder.glob("rank-*/"), key=lambda path: (len(path.name), path.name))
    parts = [RunFolder(path) for path in ranks]  # the processes of a distributed run that are on this machine
    records = parts[0] if parts else whole
    process = records.path.resolve().name
    settings = _json(records.settings) or {}
    found = _json(whole.summary) or _json(records.summary)
    if not found and not settings:
        raise UsageError(
            f"{folder} is not a run: it has no {records.settings.name}; name a folder written by dpps train --out"
        )
    config: Mapping[str, Any] = (found or settings).get("config", {})
    written = (found or settings).get("versions", {}).get("dpps", "unknown")
    other = f"{folder} was written by another version of dpps ({written}): report it with that one"
    if not config or settings.get("federation"):  # of a federation, 0.2 did not keep the names
        raise UsageError(other)
    options = Options.from_json(config, str(folder), other) if "data" in config else None
    unit = _promised(config, records, folder) if options is None else options.privacy()
    ledgers = [LedgerFile.read(part.ledger) for part in parts or [whole]] if unit else []
    ledger, row = _dearest(unit, ledgers)
    log = _rounds(records.rounds)
    if found:
        try:
            summary = Summary.from_json(found)
        except (KeyError, TypeError) as error:
            raise UsageError(f"{other} (summary.json: {error})") from error
    else:
        summary = _so_far(settings, unit, records, ledger, log)
    processes = len(summary.bytes_sent_by_rank or ())
    schema = records.schema if records.schema.exists() else None
    return Reported(
        name,
        summary,
        log,
        _switched_on({**config, **summary.chosen}) if options is None else options_shown(options, summary),
        unit,
        ledger.history_of(row),
        "own data" if options is None else data_name(options),
        None if options is None or summary.members else command(options, processes, schema),
        finished=bool(found),
        part=process if process.startswith("rank-") else None,
    )


def _so_far(
    settings: Mapping[str, Any], unit: Unit | None, folder: RunFolder, ledger: Ledger, log: Sequence[RoundLog]
) -> Summary:
    """Of an unfinished run: what it promised, what it has spent, and what the newest checkpoint says about the rounds so far."""
    checkpoints = sorted(folder.checkpoints.glob("round-*/meta.json"))
    kept = (_json(checkpoints[-1]) or {}) if checkpoints else {}
    promise: dict[str, Any] = {"private_noise": settings.get("private_noise", False)}
    if unit is not None and (contract := folder.contract()) is not None:
        calibration = contract.calibrate(unit.for_network(contract.plan.nodes))
        ahead = charges_ahead(calibration, contract.plan, len(log), ledger.messages)
        promise |= {"ahead": ahead, "promised": contract.epsilon}
    return Summary(
        rounds=len(log),
        privacy=account(unit, ledger, **promise),
        config=settings["config"],
        versions=settings["versions"],
        members=settings.get("members") or None,
        accuracy_by_epoch=kept.get("accuracy_by_epoch", ()),
        metrics_by_epoch=kept.get("metrics_by_epoch", ()),
        seconds=kept.get("seconds", {}),
    )


def _promised(config: Mapping[str, Any], records: RunFolder, folder: Path) -> Unit | None:
    """The unit of a run made in Python, from the contract in its ledger: with the promised epsilon, or the noise that was chosen."""
    if config["unit"] not in ("none", *UNITS.names()):
        why = f"the unit {config['unit']}, which is not registered here"
        raise UsageError(f"{folder} holds a run of {why}: write its page from Python, with run.report(path)")
    contract = records.contract() if config["unit"] != "none" else None
    if contract is None:
        return None
    names = ("delta", "clip", "records_per_user", "mechanism")
    options: dict[str, Any] = {name: getattr(contract, name) for name in names}
    options["noise_rate"] = config.get("noise-rate", 1.0)
    noise = "budget" if MECHANISMS[contract.mechanism].pure else "noise_multiplier"
    options |= {noise: contract.noise} if contract.epsilon is None else {"epsilon": contract.epsilon}
    if contract.trust is not None:
        options |= {"trust": "pairs", "colluders": contract.trust["colluders"]}
    kept = str(config.get("sensitivity", ""))
    named = set(re.findall(r"'(\w+)':", kept))  # 0.2 did not write its class
    registered = [
        name
        for name in SENSITIVITIES.names()
        if kept.startswith(f"{SENSITIVITIES[name].__name__}(")
        or (kept.startswith("{") and named == {*SENSITIVITIES[name].__annotations__} - {"own_options"})
    ]
    options |= {"sensitivity": registered[0]} if registered else {}
    return UNITS[contract.unit].from_options(PrivacyOptions(**options))


def _switched_on(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are not switched off."""
    return {k: v for k, v in settings.items() if v not in (None, False, 0) or k == "seed"}


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


# Options


_NEEDED_AGAIN = ("data-dir", "node-data", "schema", "weights")
"""Files that a run needs again; everything else about how it was executed is left out of the command."""


def options_shown(config: Options, summary: Summary) -> dict[str, Any]:
    """The options that changed the result, with the data by their name and the noise in words."""
    found = effective(config, summary.chosen)
    shown = {name: v for name, v in found.items() if name not in ("data", "secure-noise", "seeded-noise")}
    if summary.privacy.unit != "none":
        simulated = summary.privacy.simulated
        shown["noise"] = "seeded (simulation)" if simulated else "secure, from the operating system"
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
    """A short command line that resolves to this configuration; a distributed run of so many processes needs a folder, too. The schema
    may be read elsewhere than where the run was given it."""
    named, config = config.schema, replace(config, schema=schema or config.schema)
    wanted, plain = config.resolve(), Options()
    names = [name.replace("-", "_") for name in (*config.common(), *_NEEDED_AGAIN)]
    given = {n: getattr(wanted, n) for n in names if getattr(wanted, n) != getattr(plain, n)}
    if (meaning := _resolved(given)) is not None:
        # First leave out all that other options may imply. Whatever then resolves differently was given by the user, so name it.
        left_out = [name for name in given if getattr(plain, name) is None or name == "data"]
        while left_out and (found := _resolved(_without(given, left_out))) != meaning:
            differ = (n for n in left_out if found is None or getattr(found, n) != getattr(meaning, n))
            left_out.remove(next(differ, left_out[0]))
        given = _without(given, left_out)
    if named is not None:
        given["schema"] = named
    words = ["dpps", "train"]
    if processes:
        words = ["torchrun", "--nproc-per-node", str(processes), "-m", *words, "--out", "again"]
    for name, value in given.items():
        flag = name.replace("_", "-")
        words += (
            [f"--{flag}" if value else f"--no-{flag}"]
            if isinstance(value, bool)
            else [f"--{flag}", str(value)]
        )
    return shlex.join(words)


def _without(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def _resolved(options: Mapping[str, Any]) -> Options | None:
    """What these options resolve to; None if they have no meaning together."""
    try:
        return Options(**options).resolve()
    except UsageError:
        return None


# Files


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


def _rounds(path: Path) -> list[RoundLog]:
    """The lines of rounds.csv; a last one without its end is half written, by a run that was killed or still goes on."""
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror}): the run has nothing to show yet"
        ) from error
    log = []
    for number, row in enumerate(csv.DictReader(whole.splitlines()), start=2):
        try:
            known = [name for name in COLUMNS if name in row or name != TOTAL]  # 0.2 had no totals
            values: dict[str, Any] = {name: float(row[name]) if row[name] else None for name in known}
            log.append(RoundLog(**{**values, "round": int(row["round"])}))
        except (KeyError, TypeError, ValueError) as error:
            where = f"{path} is damaged at line {number}"
            raise RunError(f"{where}: restore it from a copy, or repeat the run") from error
    if not log:
        raise UsageError(f"{path} has no complete round yet: wait for the run's first rounds")
    return log
