"""What all runs of a data set have spent together, as a promise of one unit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpps.privacy.accountant import SUM_OF_ROUNDS, Charge, total
from dpps.privacy.units import UNITS
from dpps.runs.data_ledger import Note, Spent


@dataclass(frozen=True)
class Together:
    """A total over runs, or why there is none."""

    epsilon: float | None
    """None: not known."""
    records_per_user: int
    """How many records of one person it covers: the most that any of the runs was told."""
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
        return Together(
            None,
            group,
            f"a run of the unit {' and '.join(foreign)} has sent what the unit {unit} does not cover",
        )
    lost = [run.note for run in sent if run.charges is None]
    if endless := [note.ledger for note in lost if note.promised is None]:
        return Together(
            None,
            group,
            f"{endless[0]} is gone or not whole, and its run had no target epsilon: restore it",
        )
    promised = [_for_group(note, unit, group) for note in lost]
    epsilon, lost_delta = (math.fsum(values) for values in zip((0.0, 0.0), *promised, strict=True))
    kept = [run for run in sent if run.charges]
    if not _has_total(unit):
        rounds = total(
            _charges(kept), 0.0
        ).epsilon  # its noise depends on the data: only the plain sum stands
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
    """Epsilon and delta that a run promised, for as many records as another run was told that one person owns.

    Of k groups, (epsilon, delta) becomes k epsilon and delta (1 + e^epsilon + ... + e^((k - 1) epsilon)).
    """
    assert note.promised is not None
    times = math.ceil(group / note.records_per_user) if note.unit == unit else 1
    if (times - 1) * note.promised > 700:
        return math.inf, math.inf
    return times * note.promised, note.delta * math.fsum(math.exp(k * note.promised) for k in range(times))
