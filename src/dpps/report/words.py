"""What page and card say about privacy: what epsilon means, who is protected, what is not covered; and how numbers are written."""

import math
import re
from decimal import ROUND_CEILING, Decimal

from dpps.privacy.accountant import NO_PROTECTION, label
from dpps.privacy.promise import Privacy
from dpps.privacy.units import UNITS, Contribution, Record
from dpps.report.read import Reported

SIMULATION = "simulation: messages not private"
OWN_EYES = "for the node's own eyes"
UNCOVERED = "not covered by the guarantee"

WHOLE_NODE = "a node holds its own data and not any other", "with other data", "with its own data"
ONE_RECORD = "one particular record is in the data", "without the record", "with it"

_OPENINGS = (
    "Protected:|Guarantee:|No guarantee for the run as a whole:|Not covered:|Also not covered:|No protection:"
)


def badges(privacy: Privacy) -> list[str]:
    """What must be said next to an epsilon."""
    if privacy.unit == "none":
        return ["no protection"]
    useless = privacy.epsilon is None or privacy.epsilon > NO_PROTECTION
    return ["no meaningful protection"] * useless + [SIMULATION] * privacy.simulated


def epsilon(privacy: Privacy) -> str:
    """The number alone, rounded up as everywhere."""
    text = label(math.inf if privacy.epsilon is None else privacy.epsilon)
    found = text.removeprefix("epsilon ").partition(" (")[0]
    return found if privacy.epsilon is None else f"{Decimal(found):,}"


def number(value: float) -> str:
    """Four digits, for people; what cannot be written briefly is written with a power of ten."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{float(f'{value:.4g}'):,}".removesuffix(".0")
    digits, _, power = f"{value:.2e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    digits = digits.rstrip("0").rstrip(".")
    return f"10{raised}" if digits == "1" else f"{digits}×10{raised}"


def small(value: float) -> str:
    """As short as it can be: 1e-5."""
    return re.sub(r"e-0*", "e-", f"{value:g}")


def protected(unit: str) -> str:
    """What the unit protects, in a few words."""
    if unit == "none":
        return "messages were sent without noise"
    return f"protects {UNITS[unit].protects}" if unit in UNITS and UNITS[unit].protects else unit


def detection(epsilon: float, delta: float, false_alarms: float = 0.01) -> float:
    """The largest rate of true alarms at this rate of false alarms, by the trade-off that epsilon and delta promise."""
    if epsilon > 700:  # its exponential is no number
        return 1.0
    factor = math.exp(epsilon)
    return min(1.0, factor * false_alarms + delta, 1 - (1 - delta - false_alarms) / factor)


def meaning(run: Reported) -> str:
    """What epsilon means, as odds and with an example; for a unit without a total, that it means nothing of the kind. Empty without privacy."""
    unit = run.unit
    if unit is None:
        return ""
    differs = f"the data is this and not another that differs in {unit.protects or unit.name}"
    suspected = differs, "with the other", "with this"
    if unit.name == Contribution.name:
        suspected = WHOLE_NODE
    elif unit.name == Record.name and unit.records_per_user > 1:
        whose = f"the records of a person (up to {unit.records_per_user}) were used"
        suspected = whose, "without the records", "with them"
    elif unit.name == Record.name:
        suspected = "one particular training example was used", "without the example", "with it"
    return odds(run.summary.privacy, suspected, has_total=unit.has_total)


def odds(privacy: Privacy, suspected: tuple[str, str, str], *, has_total: bool = True) -> str:
    """What epsilon means for any release; `suspected` is (what is suspected, where it is not so, where it is)."""
    if not has_total:
        return (
            "Epsilon is a plain sum over rounds here. It does not limit what can be concluded from the run as a whole, and it "
            "promises nothing about any person's data."
        )
    if privacy.epsilon is None:
        return "Epsilon is infinite: nothing limits what can be concluded from the messages."
    rounded = float(epsilon(privacy).replace(",", ""))
    factor = number(_up(math.exp(rounded), 3)) if rounded <= 700 else "more than 10³⁰⁰"
    hypothesis, without, with_it = suspected
    most = 100 * detection(rounded, privacy.delta)
    slack = " Delta is 0: the bound holds without exception."
    if privacy.delta:
        chance = f"a chance of 1 in {number(1 / privacy.delta)} by which this bound may be exceeded"
        slack = f" Delta, {small(privacy.delta)}, is {chance}; the example includes it."
    someone = "With secure noise, someone" if privacy.simulated else "Someone"
    return (
        f"{someone} who sees everything that is sent can raise the odds that {hypothesis} by a factor of at most {factor} (e to "
        f"the power {rounded:g}): a suspicion that arises in 1 of 100 runs {without} arises in at most "
        f"{number(_up(most, 3 if most < 99 else 4))} of 100 runs {with_it}.{slack}"
    )


def _up(value: float, digits: int) -> float:
    """Rounded up: a bound is never shown smaller than it is."""
    exact = Decimal(repr(value))
    return float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - digits + 1), ROUND_CEILING))


def statement(text: str) -> list[tuple[str, list[str]]]:
    """(opening words, the rest) of each paragraph of a statement. What is not covered is a list, the others are one piece."""
    found = []
    for part in re.split(rf"\s+(?={_OPENINGS}|This run was a simulation)", text):
        match = re.match(f"({_OPENINGS})?(.*)", part, re.DOTALL)
        assert match is not None
        opening, rest = match[1] or "", match[2].strip()
        found.append((opening, re.split(r"(?<=;) ", rest) if "covered" in opening else [rest]))
    return found
