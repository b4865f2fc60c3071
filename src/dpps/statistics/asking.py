"""From the text of a question, such as `mean(age, by=sex)`, to the question."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpps.errors import UsageError, unknown
from dpps.statistics.questions import (
    Answer,
    Array,
    Category,
    Columns,
    Correlation,
    Count,
    Histogram,
    Mean,
    Number,
    Quantiles,
    Question,
    Records,
    Regression,
    Survival,
    Variance,
    one_hot,
)

_TOKEN = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|\[([^\]]*)\]|([=,~+])|([^\s=,~+"'\[\]]+))""")
MOST_BINS = 4096
_EVERYWHERE = ("by", "weight")  # options of every question


@dataclass
class Call:
    """A question as it was written."""

    text: str
    name: str
    columns: Columns
    given: list[str]
    """What stands in the parentheses."""
    options: dict[str, str | list[float]]
    """What is given by name, such as `bins=10`."""
    formula: tuple[str, list[str]] | None = None
    """The outcome and the inputs of `y ~ x1 + x2`."""

    def column(self, name: str) -> Number | Category:
        """The column of this name."""
        if name not in self.columns:
            raise unknown(f"column in {self.text}", name, sorted(self.columns))
        return self.columns[name]

    def number(self, name: str) -> Number:
        """The column of this name, if it holds numbers."""
        found = self.column(name)
        if not isinstance(found, Number):
            raise UsageError(
                f"{self.text}: {name} is a category: ask for histogram({name}), or declare it as a number with its range"
            )
        return found

    def category(self, name: str) -> Category:
        """The column of this name, if it holds categories."""
        found = self.column(name)
        if not isinstance(found, Category):
            raise UsageError(f"{self.text}: {name} is a number: only a category can be used there")
        return found

    def numbers(self, least: int = 1, most: int | None = None) -> list[Number]:
        """All that was given, as columns of numbers."""
        return [self.number(name) for name in self.expect(least, least if most is None else most)]

    def expect(self, least: int, most: int) -> list[str]:
        """What was given, refused if it is too little or too much."""
        if not least <= len(self.given) <= most:
            wanted = str(least) if least == most else f"{least} or more"
            raise UsageError(f"{self.text}: {len(self.given)} given in parentheses, {wanted} expected")
        return self.given

    def list_of(self, option: str) -> list[float] | None:
        """An option that is a list of increasing numbers, such as `times=[12, 24]`."""
        found = self.options.get(option)
        if found is None or isinstance(found, str):
            return None
        if len(found) < 2 or any(not a < b for a, b in itertools.pairwise(found)):
            raise UsageError(
                f"{self.text}: {option}={found}: give two or more numbers, each above the one before it"
            )
        return found

    def whole(self, option: str, usual: int, least: int = 2) -> int:
        """An option that is a whole number."""
        found = self.options.get(option, str(usual))
        if not isinstance(found, str) or not found.isdecimal() or not least <= int(found) <= MOST_BINS:
            raise UsageError(
                f"{self.text}: {option}={found}: give a whole number from {least} to {MOST_BINS}"
            )
        return int(found)

    def weight(self) -> float:
        """The share of the noise budget that the question asks for, relative to the others'."""
        try:
            found = float(str(self.options.get("weight", 1)))
        except ValueError:
            found = 0.0
        if not 1e-3 <= found <= 1e3:
            raise UsageError(
                f"{self.text}: weight={self.options['weight']}: give a number from 0.001 to 1000; 2 halves the noise "
                "compared with a question of weight 1"
            )
        return found


def ask(text: str, columns: Columns) -> Question:
    """The question in a text such as `quantiles(age, 0.25, 0.5, 0.75)`, about columns of which this is public."""
    call = _read(text, columns)
    make, allowed = QUESTIONS[call.name]
    for option in call.options:
        if option not in (*allowed, *_EVERYWHERE):
            raise unknown(f"option of {call.name} in {text}", option, (*allowed, *_EVERYWHERE))
    if (call.formula is not None) != (call.name == "regression"):
        raise UsageError(f"{text}: a formula belongs to regression, such as regression(pressure ~ age + sex)")
    question = make(call)
    by = call.options.get("by")
    if by is not None:
        question = Grouped(question, call.category(str(by)))
    question.weight = call.weight()
    return question


def _read(text: str, columns: Columns) -> Call:
    outer = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", text, re.DOTALL)
    if outer is None:
        raise UsageError(f"the question {text!r} cannot be read: write it as mean(age) or table(sex, stage)")
    name, inner = outer.groups()
    if name not in QUESTIONS:
        raise unknown("question", name, tuple(QUESTIONS))
    tokens: list[tuple[str, Any]] = []
    place = 0
    while inner[place:].strip():
        found = _TOKEN.match(inner, place)
        if found is None:
            raise UsageError(f"{text}: {inner[place:].strip()!r} cannot be read: close quotes and brackets")
        place = found.end()
        quoted, single, listed, sign, word = found.groups()
        if sign:
            tokens.append(("sign", sign))
        elif listed is not None:
            tokens.append(("list", _numbers(listed, text)))
        else:
            tokens.append(("word", next(x for x in (quoted, single, word) if x is not None)))
    return _parsed(Call(text.strip(), name, columns, [], {}), tokens)


def _numbers(listed: str, text: str) -> list[float]:
    try:
        return [float(part) for part in listed.split(",")]
    except ValueError:
        raise UsageError(f"{text}: [{listed}] is no list of numbers: write [0, 18, 65]") from None


def _parsed(call: Call, tokens: list[tuple[str, Any]]) -> Call:
    """Parts between commas: a column or number, `option=value`, or a formula."""
    parts: list[list[tuple[str, Any]]] = [[]]
    for token in tokens:
        if token == ("sign", ","):
            parts.append([])
        else:
            parts[-1].append(token)
    for part in parts if tokens else []:
        kinds = [kind if kind != "sign" else value for kind, value in part]
        values = [value for _, value in part]
        if kinds == ["word"]:
            call.given.append(values[0])
        elif kinds in (["word", "=", "word"], ["word", "=", "list"]):
            call.options[values[0]] = values[2]
        elif kinds[:3] == ["word", "~", "word"] and kinds[3:] == ["+", "word"] * ((len(kinds) - 3) // 2):
            call.formula = values[0], values[2::2]
        else:
            shown = " ".join(str(value) for value in values)
            raise UsageError(
                f"{call.text}: {shown!r} cannot be read: separate columns by commas, options as bins=10"
            )
    return call


class Grouped(Question):
    """A question asked for every value of a category: a record's block stands in its own group's place."""

    def __init__(self, question: Question, by: Category) -> None:
        self._question, self._by = question, by
        self.text, self.largest_sum = question.text, question.largest_sum
        self.width = question.width * len(by.values)

    def encode(self, records: Records) -> Array:
        block, group = self._question.encode(records), records[self._by.name]
        own = one_hot(group, len(self._by.values)) * (group >= 0)[:, None]
        return (own[:, :, None] * block[:, None, :]).reshape(len(block), self.width)

    def answer(self, sums: Array, noise: float) -> Answer:
        each = [self._question.answer(part, noise) for part in sums.reshape(len(self._by.values), -1)]
        groups = list(zip(self._by.values, each, strict=True))
        labels = tuple(
            (g, *(x if isinstance(x, tuple) else (x,))) for g, a in groups for x in (a.labels or ((),))
        )
        counts = [a.counts for a in each if a.counts is not None]
        return Answer(
            self.text,
            value=np.concatenate([a.value for a in each]),
            low=np.concatenate([a.low for a in each]),
            high=np.concatenate([a.high for a in each]),
            noise=np.concatenate([a.noise for a in each]),
            method=each[0].method,
            too_noisy=np.concatenate([a.too_noisy for a in each]),
            labels=labels,
            axis=each[0].axis,
            counts=np.concatenate(counts) if counts else None,
        )


def _axis(call: Call, name: str) -> tuple[str, tuple[str, ...], Array | None]:
    """A column as an axis of a histogram: its name, its cells, and the edges of a number's bins."""
    column = call.column(name)
    if isinstance(column, Category):
        return name, column.values, None
    if "bins" not in call.options:
        raise UsageError(
            f"{call.text}: {name} is a number: say which bins, as bins=10 or bins=[0, 18, 65, 120]"
        )
    edges = np.array(call.list_of("bins") or np.linspace(column.low, column.high, call.whole("bins", 10) + 1))
    return name, tuple(f"{a:g} to {b:g}" for a, b in itertools.pairwise(edges)), edges


def _histogram(call: Call) -> Question:
    axes = 1 if call.name == "histogram" else 2
    return Histogram(call.text, [_axis(call, name) for name in call.expect(axes, axes)])


def _quantiles(call: Call) -> Question:
    name, *given = call.expect(2, 1000)
    try:
        at = tuple(float(p) for p in given)
    except ValueError:
        at = (-1.0,)
    if not all(0 < p < 1 for p in at):
        raise UsageError(
            f"{call.text}: quantiles are numbers between 0 and 1, such as quantiles(age, 0.25, 0.5, 0.75)"
        )
    return Quantiles(call.text, call.number(name), at, call.whole("bins", 128, 8))


def _regression(call: Call) -> Question:
    assert call.formula is not None
    outcome, inputs = call.formula
    if outcome in inputs or len(set(inputs)) < len(inputs):
        raise UsageError(f"{call.text}: every column may stand in a formula once")
    return Regression(call.text, call.number(outcome), [call.column(name) for name in inputs])


def _survival(call: Call) -> Question:
    name, event_name = call.expect(2, 2)
    time, event = call.number(name), call.category(event_name)
    if len(event.values) != 2:
        raise UsageError(
            f"{call.text}: {event.name} has {len(event.values)} values: an event either happened or not, so declare two"
        )
    happened = str(call.options.get("event", event.values[1]))
    if happened not in event.values:
        raise unknown(f"value of {event.name} in {call.text}", happened, event.values)
    times = call.list_of("times") or np.linspace(time.low, time.high, call.whole("bins", 24) + 1)[1:].tolist()
    return Survival(call.text, time, event.name, event.values.index(happened), tuple(times))


QUESTIONS: Mapping[str, tuple[Callable[[Call], Question], Sequence[str]]] = {
    "count": (lambda call: Count(call.text, *call.expect(0, 0)), ()),
    "mean": (lambda call: Mean(call.text, *call.numbers()), ()),
    "variance": (lambda call: Variance(call.text, *call.numbers()), ()),
    "histogram": (_histogram, ("bins",)),
    "table": (_histogram, ("bins",)),
    "quantiles": (_quantiles, ("bins",)),
    "correlation": (lambda call: Correlation(call.text, call.numbers(2, 1000)), ()),
    "regression": (_regression, ()),
    "km": (_survival, ("times", "bins", "event")),
}
"""What can be asked, and the options of each."""
