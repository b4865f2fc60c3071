r"""Questions about all records, and their answers.

A question turns every record into a vector of length at most 1 (`encode`), so that one record's share of the sum is bounded. The sum
is released with noise, and the question turns it into an answer with an interval (`answer`). Everything else is public: ranges and
categories come from the schema, bins and time points from the question, and nothing from the data.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

from dpps.errors import UsageError, unknown

Array = NDArray[np.float64]
Z = 1.959963984540054
"""Half the width of a 95 % interval in standard errors."""


@dataclass(frozen=True)
class Number:
    """A column of numbers; `values` has NaN where a value is missing."""

    name: str
    low: float
    high: float

    def scaled(self, values: Array) -> Array:
        """From the public range to [-1, 1]; what lies outside counts as the nearer end."""
        return np.clip((values - self.low) * (2 / (self.high - self.low)) - 1, -1, 1)

    def unscaled(self, x: Array) -> Array:
        """From [-1, 1] back to the range."""
        return self.low + (x + 1) * (self.span / 2)

    @property
    def span(self) -> float:
        """From the lowest to the highest value."""
        return self.high - self.low


@dataclass(frozen=True)
class Category:
    """A column of declared values; encoded as their place, -1 where a value is missing."""

    name: str
    values: tuple[str, ...]


Columns = Mapping[str, Number | Category]
"""What is public of every column."""
Records = Mapping[str, Array]
"""The records of one node: numbers as they are (NaN: missing), categories by their place (-1: missing)."""


@dataclass(frozen=True)
class Answer:
    """The answer to one question.

    Attributes:
        query: the question, as it was asked.
        value: a number, or one for each of `labels`.
        low, high: the 95 % interval, which takes the noise into account.
        noise: the standard deviation of the noise in the value.
        method: how the interval was made.
        too_noisy: whether the noise is too large for the answer to mean anything; ignore value, low and
            high then.
        labels: what the values belong to: categories, cells, terms, probabilities, times. Empty: there is one value.
        axis: the name of `labels` in files: "labels", "terms", "at" or "times".
        counts: of a histogram or table: the noised counts behind the shares.
    """

    query: str
    value: Array
    low: Array
    high: Array
    noise: Array
    method: str
    too_noisy: NDArray[np.bool_]
    labels: tuple[Any, ...] = ()
    axis: str = "labels"
    counts: Array | None = None

    def as_json(self) -> dict[str, Any]:
        """As in `answers.json`; None for what is too noisy."""

        def plain(numbers: Array) -> Any:
            shown = [None if bad else float(x) for x, bad in zip(numbers, self.too_noisy, strict=True)]
            return shown if self.labels else shown[0]

        return {
            "query": self.query,
            **({self.axis: list(self.labels)} if self.labels else {}),
            **{name: plain(getattr(self, name)) for name in ("value", "low", "high", "noise")},
            "method": self.method,
            "too_noisy": self.too_noisy.tolist() if self.labels else bool(self.too_noisy[0]),
            **({} if self.counts is None else {"counts": self.counts.tolist()}),
        }


class Question(ABC):
    """One question about all records."""

    text: str
    width: int
    """Numbers per record."""
    weight: float = 1.0
    """Of its share in a release with other questions."""
    largest_sum: float = 1.0
    """The most that the absolute values of a record's numbers add up to, where Laplace noise suits; infinite: it does not."""

    @abstractmethod
    def encode(self, records: Records) -> Array:
        """(records, width), every row of length at most 1."""

    @abstractmethod
    def answer(self, sums: Array, noise: float) -> Answer:
        """From the noised sums of all records.

        Args:
            sums: of `encode`, over all records.
            noise: its standard deviation on each of them.
        """


def one_hot(places: Array, count: int) -> Array:
    """A row for each record with a 1 at its place; -1 is the last."""
    rows = np.zeros((len(places), count))
    rows[np.arange(len(places)), places.astype(np.int64)] = 1
    return rows


# How many


class Count(Question):
    """How many records there are."""

    width = 1

    def __init__(self, text: str) -> None:
        self.text = text

    def encode(self, records: Records) -> Array:
        return np.ones((length(records), 1))

    def answer(self, sums: Array, noise: float) -> Answer:
        low, high = np.maximum(sums - Z * noise, 0), sums + Z * noise
        return Answer(self.text, sums, low, high, np.full(1, noise), "noise", np.zeros(1, bool))


class Histogram(Question):
    """The share of records in each cell: a category's values, a number's bins, or pairs of them; "missing" is a cell of its own.

    The interval solves for the shares p that the noised cell and the noised total do not rule out (Fieller), with the sampling
    error of p itself (Wilson): cell and total share noise.
    """

    def __init__(self, text: str, axes: Sequence[tuple[str, tuple[str, ...], Array | None]]) -> None:
        self.text, self._axes = text, axes
        self._labels = list(product(*((*names, "missing") for _, names, _ in axes)))
        self.width = len(self._labels)

    def encode(self, records: Records) -> Array:
        place = np.zeros(length(records))
        for column, names, edges in self._axes:
            values = records[column]
            if edges is not None:
                bins = np.searchsorted(edges, np.nan_to_num(values), "right") - 1
                values = np.where(np.isnan(values), -1, np.clip(bins, 0, len(names) - 1))
            place = place * (len(names) + 1) + np.where(values < 0, len(names), values)
        return one_hot(place, self.width)

    def answer(self, sums: Array, noise: float) -> Answer:
        total, v, k = sums.sum(), noise**2, len(sums)
        square = np.full(k, total**2 - Z**2 * (k * v - total))
        low, high, bad = between_roots(square, 2 * sums * total + Z**2 * (total - 2 * v), sums**2 - Z**2 * v)
        bad |= total < 2 * Z * noise * k**0.5  # nothing can be divided by a total that may be 0
        share = np.clip(sums / max(total, 1.0), 0, 1)
        sd = noise * np.sqrt(1 - 2 * share + k * share**2) / max(total, 1.0)
        labels = tuple(cell[0] if len(cell) == 1 else cell for cell in self._labels)
        low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
        return Answer(self.text, share, low, high, sd, "Wilson and Fieller", bad, labels, counts=sums)


def between_roots(square: Array, linear: Array, constant: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Where square x^2 - linear x + constant <= 0: the two ends, and whether there is no such interval."""
    root = np.sqrt(np.maximum(linear**2 - 4 * square * constant, 0))
    bad = square <= 0
    twice = np.where(bad, 1.0, 2 * square)
    return (linear - root) / twice, (linear + root) / twice, bad


def length(records: Records) -> int:
    """How many records there are."""
    return len(next(iter(records.values())))


# Means, variances, correlations and regressions: functions of sums of products of scaled numbers


class Moments(Question):
    """Sums of 1, x_i, x_i^2 and x_i x_j over the records in which no x is missing.

    The block of a record is (a, x_i, b (x_i^2 - 1/2), c x_i x_j) / bound with every x in [-1, 1]. A category enters a regression as
    an indicator for each value but the first; at most one of these is 1, so together they are bounded as one number is.
    """

    a, b, c = 1.0, 2**0.5, 1.0
    largest_sum = float("inf")

    def __init__(self, text: str, variables: Sequence[Number | Category]) -> None:
        self.text, self.variables = text, tuple(variables)
        self.terms: list[tuple[Number | Category, str]] = []
        for column in variables:
            if isinstance(column, Number):
                self.terms.append((column, column.name))
            else:
                self.terms += [(column, f"{column.name}={value}") for value in column.values[1:]]
        columns = [column for column, _ in self.terms]
        self._squares = [i for i, column in enumerate(columns) if isinstance(column, Number)]
        pairs = [(i, j) for i, a in enumerate(columns) for j, b in enumerate(columns[:i]) if a is not b]
        self._pairs = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
        d, numbers = len(variables), len(self._squares)
        self.bound = (self.a**2 + d + self.b**2 * numbers / 4 + self.c**2 * d * (d - 1) / 2) ** 0.5
        self.width = 1 + len(self.terms) + numbers + len(pairs)

    def encode(self, records: Records) -> Array:
        x = np.column_stack([_inputs(column, records[column.name]) for column in self.variables])
        whole = np.asarray(~np.isnan(x).any(1))
        x = np.where(whole[:, None], x, 0.0)
        i, j = self._pairs.numpy()
        squares, products = self.b * (x[:, self._squares] ** 2 - 0.5), self.c * x[:, i] * x[:, j]
        block = np.column_stack([np.full(len(x), self.a), x, squares, products])
        scaled: Array = block * whole[:, None] / self.bound
        return scaled

    def matrix(self, sums: Tensor) -> Tensor:
        """The sums of (1, x)(1, x)' over the records, from those of the block."""
        d, q = len(self.terms), len(self._squares)
        count, first, square, cross = (sums * self.bound).split([1, d, q, len(sums) - 1 - d - q])
        count = count / self.a
        diagonal = first.clone()  # the square of an indicator is itself
        diagonal[self._squares] = square / self.b + count / 2
        m = torch.diag(torch.cat([count, diagonal]))
        i, j = self._pairs + 1
        lower = torch.zeros_like(m).index_put((i, j), cross / self.c)
        lower[1:, 0] = first
        return m + lower + lower.T


def _inputs(column: Number | Category, values: Array) -> Array:
    """A number in [-1, 1], or the indicators of a category; NaN where the value is missing."""
    if isinstance(column, Number):
        return column.scaled(values)[:, None]
    return np.where(values[:, None] < 0, np.nan, one_hot(values, len(column.values))[:, 1:])


class Mean(Moments):
    """The mean of a number. The interval holds the means that the noised sum and the noised count do not rule out (Fieller)."""

    a, b = 0.75, 0.5

    def __init__(self, text: str, number: Number) -> None:
        super().__init__(text, [number])
        self._number = number

    def answer(self, sums: Array, noise: float) -> Answer:
        m, s = self.matrix(torch.from_numpy(sums)).numpy(), noise * self.bound
        count, total = max(m[0, 0], 1.0), m[1, 0]
        mean = np.clip(total / count, -1, 1)
        spread = np.clip(m[1, 1] / count - mean**2, 0, 1 - mean**2)
        low, high, bad = between_roots(
            np.array([count**2 - (Z * s / self.a) ** 2]),
            np.array([2 * total * count]),
            np.array([total**2 - Z**2 * (s**2 + count * spread)]),
        )
        bad |= count < 2 * Z * s / self.a
        value, low, high = (self._number.unscaled(np.clip(x, -1, 1)) for x in (np.array([mean]), low, high))
        sd = np.array([s * np.hypot(1, mean / self.a) / count * self._number.span / 2])
        return Answer(self.text, value, low, high, sd, "Fieller", bad)


class Smooth(Moments):
    """A smooth function of the moments. The interval is the delta method's, with noise and sampling error."""

    clear = 4.0
    """How many standard deviations of its noise `firmness` must be above zero."""

    @abstractmethod
    def estimate(self, m: Tensor) -> Tensor:
        """The values, on the scale on which their interval is symmetric."""

    @abstractmethod
    def sampling(self, m: Tensor) -> Tensor:
        """The variance that they have without noise."""

    @abstractmethod
    def firmness(self, m: Tensor) -> Tensor:
        """One number that is positive by nature, and by which the estimate divides."""

    labels: tuple[Any, ...] = ()
    axis = "labels"

    def answer(self, sums: Array, noise: float) -> Answer:
        given = torch.from_numpy(sums)
        m, jacobian = self.matrix(given), torch.func.jacrev(lambda x: self.estimate(self.matrix(x)))
        slope = torch.func.jacrev(lambda x: self.firmness(self.matrix(x)))(given)
        if not m[0, 0] > 1 or not self.firmness(m) > self.clear * noise * float(slope.norm()):
            none = np.full(max(1, len(self.labels)), np.nan)
            lost = np.ones(len(none), bool)
            return Answer(self.text, none, none, none, none, "delta", lost, self.labels, self.axis)
        value, sd = self.estimate(m), noise * jacobian(given).norm(dim=1)
        reach = Z * (sd**2 + self.sampling(m).clamp(min=0)).sqrt()
        v, r, clear = value.numpy(), reach.numpy(), np.zeros(len(value), bool)
        return Answer(self.text, v, v - r, v + r, sd.numpy(), "delta", clear, self.labels, self.axis)


def _covariance(m: Tensor) -> Tensor:
    """Of the numbers, from their moments."""
    mean = m[1:, 0] / m[0, 0]
    return m[1:, 1:] / m[0, 0] - mean[:, None] * mean


class Variance(Smooth):
    """The variance of a number. Its sampling error is that of a normal distribution."""

    clear = 2.0

    def __init__(self, text: str, number: Number) -> None:
        super().__init__(text, [number])
        self._factor = (number.span / 2) ** 2

    def estimate(self, m: Tensor) -> Tensor:
        return self._factor * _covariance(m).reshape(-1)

    firmness = estimate

    def sampling(self, m: Tensor) -> Tensor:
        return 2 * self.estimate(m) ** 2 / m[0, 0]

    def answer(self, sums: Array, noise: float) -> Answer:
        found = super().answer(sums, noise)
        return replace(found, low=np.maximum(found.low, 0))


class Correlation(Smooth):
    """Pearson's correlation of every pair of numbers, on Fisher's scale."""

    def __init__(self, text: str, numbers: Sequence[Number]) -> None:
        super().__init__(text, numbers)
        self.labels = tuple((a.name, b.name) for k, a in enumerate(numbers) for b in numbers[k + 1 :])
        self._at = torch.triu_indices(len(numbers), len(numbers), 1)

    def estimate(self, m: Tensor) -> Tensor:
        c = _covariance(m)
        sd = c.diagonal().sqrt()
        i, j = self._at
        return torch.atanh((c / (sd[:, None] * sd))[i, j].clamp(-0.9999, 0.9999))

    def firmness(self, m: Tensor) -> Tensor:
        return _covariance(m).diagonal().min()

    def sampling(self, m: Tensor) -> Tensor:
        return (1 / (m[0, 0] - 3).clamp(min=1)).expand(len(self.labels))

    def answer(self, sums: Array, noise: float) -> Answer:
        found = super().answer(sums, noise)
        value, low, high = (np.tanh(x) for x in (found.value, found.low, found.high))
        return replace(found, value=value, low=low, high=high, noise=found.noise * (1 - value**2))


class Regression(Smooth):
    """Least squares of one number on numbers and categories: the intercept and a slope for every term."""

    axis = "terms"

    def __init__(self, text: str, outcome: Number, inputs: Sequence[Number | Category]) -> None:
        super().__init__(text, [*inputs, outcome])
        self.labels = ("intercept", *(name for _, name in self.terms[:-1]))
        # a number on the scale [-1, 1] is (x - middle) / half; indicators are as they are
        scales = [
            (c.span / 2, c.low + c.span / 2) if isinstance(c, Number) else (1.0, 0.0) for c, _ in self.terms
        ]
        half, middle = torch.tensor(scales, dtype=torch.float64).T
        self._to_units: Tensor = torch.diag(torch.cat([half.new_ones(1), 1 / half[:-1]]))
        self._to_units[0, 1:] = -middle[:-1] / half[:-1]
        self._to_units *= half[-1]
        self._start: Tensor = (
            middle[-1] * torch.eye(1, len(self.labels), dtype=torch.float64)[0]
        )  # of the intercept

    def estimate(self, m: Tensor) -> Tensor:
        """In the columns' own units."""
        return self._to_units @ self._solved(m) + self._start

    def _solved(self, m: Tensor) -> Tensor:
        """On the scale [-1, 1]."""
        found: Tensor = torch.linalg.solve(m[:-1, :-1], m[:-1, -1])
        return found

    def firmness(self, m: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(_covariance(m)[:-1, :-1])[0]  # type: ignore[no-any-return]

    def sampling(self, m: Tensor) -> Tensor:
        beta = self._solved(m)
        left = ((m[-1, -1] - beta @ m[:-1, -1]) / (m[0, 0] - len(beta)).clamp(min=1)).clamp(min=0)
        inverse: Tensor = torch.linalg.inv(m[:-1, :-1])
        return left * (self._to_units @ inverse @ self._to_units.T).diagonal()


# Quantiles and survival curves: running counts over a public grid, all of them at once.
#
# The counts below every threshold are A h for the histogram h, with A the matrix of +1 (at or below) and -1 (above). A is negacyclic:
# every column is the one before it, shifted by one, with the sign of what comes round turned. So it has a square root R of the same
# kind, the best factorisation there is for Gaussian noise. A record sends a column of R (all have the same length), the noised sum R h is
# multiplied by R once more, and the noise on each running count grows with the logarithm of the number of bins only:
# 2.0 times that of one cell for 120 bins, where a plain histogram has up to 5.5.


@lru_cache(maxsize=32)
def running_counts(bins: int) -> tuple[Array, Array]:
    """R over and times the length of its columns: columns of length 1 for records to send, and what their noised sum is multiplied by."""
    turn = np.exp(1j * np.pi * np.arange(bins) / bins)  # makes a circulant matrix of a negacyclic one
    first = (np.fft.ifft(np.sqrt(np.fft.fft(turn))) / turn).real
    shift = np.subtract.outer(np.arange(bins), np.arange(bins))
    root, size = np.where(shift >= 0, first[shift], -first[shift]), np.linalg.norm(first)
    return root / size, root * size


class Quantiles(Question):
    """Quantiles of a number. The interval holds the thresholds whose rank may be that of the quantile (Woodruff)."""

    largest_sum = float("inf")

    def __init__(self, text: str, number: Number, probabilities: tuple[float, ...], bins: int = 128) -> None:
        self.text, self._number, self._at, self.width = text, number, probabilities, bins

    def encode(self, records: Records) -> Array:
        x = self._number.scaled(records[self._number.name])
        missing = np.isnan(x)
        place = np.clip(np.floor((np.nan_to_num(x) + 1) / 2 * self.width), 0, self.width - 1).astype(np.int64)
        block: Array = running_counts(self.width)[0][:, place].T * ~missing[:, None]
        return block

    def answer(self, sums: Array, noise: float) -> Answer:
        r = running_counts(self.width)[1]
        below = r @ sums  # as many records at or below a threshold as above it: 0
        count = max(below[-1], 1.0)
        edges = np.linspace(-1, 1, self.width + 1)
        smooth = np.clip(isotonic_regression(below).x, -count, count)
        value, low, high, sd = (np.empty(len(self._at)) for _ in range(4))
        for k, p in enumerate(self._at):
            wanted = (2 * p - 1) * count
            spread = noise * np.linalg.norm(r - (2 * p - 1) * r[-1], axis=1)
            reach = Z * np.sqrt(spread**2 + 4 * count * p * (1 - p))
            distance = below - (2 * p - 1) * below[-1]
            value[k] = np.interp(wanted, np.concatenate([[-count], smooth]), edges)
            first = np.flatnonzero(distance + reach >= 0)
            last = np.flatnonzero(distance - reach <= 0)
            low[k] = edges[first[0]] if len(first) else edges[-1]
            high[k] = edges[min(last[-1] + 2, self.width)] if len(last) else edges[0]
            at = min(int(np.searchsorted(edges, value[k])), self.width) - 1
            near = slice(max(at - 2, 0), at + 3)  # how fast ranks grow there
            density = max((smooth[near][-1] - smooth[near][0]) / max(len(smooth[near]) - 1, 1), 1e-9)
            sd[k] = spread[max(at, 0)] / density * 2 / self.width
        bad = np.full(len(value), bool(count < 2 * Z * noise * np.linalg.norm(r[-1]))) | (high - low >= 1.5)
        value, low, high = (self._number.unscaled(x) for x in (value, low, high))
        sd = np.minimum(sd, 2) * self._number.span / 2
        return Answer(self.text, value, low, high, sd, "Woodruff", bad, self._at, "at")


class Survival(Question):
    """Kaplan and Meier's curve at public time points, by the running counts of events and of censored records.

    Times count as the next time point; what lies behind the last one is censored there. The interval is Greenwood's with noise, on
    the scale of the logarithm.
    """

    largest_sum = float("inf")

    def __init__(self, text: str, time: Number, event: str, happened: int, times: tuple[float, ...]) -> None:
        self.text, self._time, self._event, self._happened, self._times = text, time, event, happened, times
        self._bins = len(times) + 1
        self.width = 2 * self._bins

    def encode(self, records: Records) -> Array:
        time, event = records[self._time.name], records[self._event]
        whole = ~np.isnan(time) & (event >= 0)
        place = np.searchsorted(self._times, np.nan_to_num(time), "left")
        died = (event == self._happened) & (place < len(self._times))
        code = running_counts(self._bins)[0][:, place].T
        block: Array = np.concatenate([code * (whole & died)[:, None], code * (whole & ~died)[:, None]], 1)
        return block

    def _curve(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logarithm of survival, events and numbers at risk at each time."""
        runs = torch.from_numpy(running_counts(self._bins)[1]) @ sums.reshape(2, -1).T
        runs = (runs + runs[-1]) / 2  # at or below each threshold: events, censored
        events = runs[:-1, 0].diff(prepend=torch.zeros(1, dtype=torch.float64))
        gone = torch.cat([torch.zeros(1, dtype=torch.float64), runs[:-2].sum(1)])
        risk = runs[-1].sum() - gone
        log = torch.log1p(-(events / risk.clamp(min=1)).clamp(max=0.999)).cumsum(0)
        return log, events, risk

    def answer(self, sums: Array, noise: float) -> Answer:
        given = torch.from_numpy(sums)
        log, events, risk = self._curve(given)
        jacobian, _, risk_jacobian = torch.func.jacrev(self._curve)(given)
        sd = noise * jacobian.norm(dim=1)
        left = (risk - events).clamp(min=1)
        greenwood = (events.clamp(min=0) / (risk.clamp(min=1) * left)).cumsum(0)
        reach = Z * (sd**2 + greenwood).sqrt()
        lost = risk < 2 * Z * noise * risk_jacobian.norm(dim=1)
        bad = lost.cummax(0).values | (reach > 1.5)
        value = np.minimum.accumulate(np.clip(log.exp().numpy(), 0, 1))
        low, high = ((log + sign * reach).exp().clamp(0, 1).numpy() for sign in (-1, 1))
        sd = value * sd.numpy()
        return Answer(self.text, value, low, high, sd, "Greenwood", bad.numpy(), self._times, "times")


# From the text of a question, such as `mean(age, by=sex)`, to the question

_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s=,~+"'\[\]]+)"""
_PART = re.compile(
    rf"""\s*(?:(?P<given>{_WORD})
    | (?P<option>{_WORD})\s*=\s*(?P<value>{_WORD}|\[[^\]]*\])
    | (?P<outcome>{_WORD})\s*~\s*(?P<inputs>{_WORD}(?:\s*\+\s*{_WORD})*))\s*(?:,|$)""",
    re.VERBOSE,
)
"""What stands between commas: a column or number, `option=value`, or a formula."""
MOST_BINS = 4096
_EVERYWHERE = ("by", "weight")  # options of every question


class Call:
    """A question as it was written.

    Attributes:
        text: all of it.
        name: of the question, such as `mean`.
        columns: what is public of every column.
        given: what stands in the parentheses without a name.
        options: what is given by name, such as `bins=10`.
        formula: the outcome and the inputs of `y ~ x1 + x2`.
    """

    def __init__(self, text: str, columns: Columns) -> None:
        outer = re.fullmatch(r"\s*(\w+)\s*\((.*)\)\s*", text, re.DOTALL)
        if outer is None:
            raise UsageError(
                f"the question {text!r} cannot be read: write it as mean(age) or table(sex, stage)"
            )
        self.text, self.columns = text.strip(), columns
        self.name, inner = outer.groups()
        if self.name not in QUESTIONS:
            raise unknown("question", self.name, tuple(QUESTIONS))
        self.given: list[str] = []
        self.options: dict[str, str | list[float]] = {}
        self.formula: tuple[str, list[str]] | None = None
        place = 0
        while inner[place:].strip():
            part = _PART.match(inner, place)
            if part is None:
                raise self.refuse(
                    f"{inner[place:].strip()!r} cannot be read: separate columns by commas, write options as bins=10, and "
                    "close quotes and brackets"
                )
            place = part.end()
            if part["given"]:
                self.given.append(_bare(part["given"]))
            elif part["option"]:
                value = part["value"]
                self.options[_bare(part["option"])] = self._list(value) if value[0] == "[" else _bare(value)
            else:
                self.formula = _bare(part["outcome"]), [_bare(x) for x in re.findall(_WORD, part["inputs"])]

    def _list(self, listed: str) -> list[float]:
        try:
            return [float(part) for part in listed[1:-1].split(",")]
        except ValueError:
            raise self.refuse(f"{listed} is no list of numbers: write [0, 18, 65]") from None

    def refuse(self, why: str) -> UsageError:
        """An error that names the question."""
        return UsageError(f"{self.text}: {why}")

    def column(self, name: str) -> Number | Category:
        """The column of this name."""
        if name not in self.columns:
            raise unknown(f"column in {self.text}", name, sorted(self.columns))
        return self.columns[name]

    def number(self, name: str) -> Number:
        """The column of this name, if it holds numbers."""
        found = self.column(name)
        if not isinstance(found, Number):
            raise self.refuse(
                f"{name} is a category: ask for histogram({name}), or declare it as a number with its range"
            )
        return found

    def category(self, name: str) -> Category:
        """The column of this name, if it holds categories."""
        found = self.column(name)
        if not isinstance(found, Category):
            raise self.refuse(f"{name} is a number: only a category can be used there")
        return found

    def expect(self, least: int, most: int | None = None) -> list[str]:
        """What was given, refused if it is too little or too much."""
        if not least <= len(self.given) <= (most or least):
            wanted = f"{least} or more" if most else str(least)
            raise self.refuse(f"{len(self.given)} given in parentheses, {wanted} expected")
        return self.given

    def list_of(self, option: str) -> list[float] | None:
        """An option that is a list of increasing numbers, such as `times=[12, 24]`."""
        found = self.options.get(option)
        if found is None or isinstance(found, str):
            return None
        if len(found) < 2 or any(not a < b for a, b in pairwise(found)):
            raise self.refuse(f"{option}={found}: give two or more numbers, each above the one before it")
        return found

    def whole(self, option: str, usual: int, least: int = 2) -> int:
        """An option that is a whole number."""
        found = self.options.get(option, str(usual))
        if not isinstance(found, str) or not found.isdecimal() or not least <= int(found) <= MOST_BINS:
            raise self.refuse(f"{option}={found}: give a whole number from {least} to {MOST_BINS}")
        return int(found)

    def weight(self) -> float:
        """The share of the noise budget that the question asks for, relative to the others'."""
        try:
            found = float(str(self.options.get("weight", 1)))
        except ValueError:
            found = 0.0
        if not 1e-3 <= found <= 1e3:
            raise self.refuse(
                f"weight={self.options['weight']}: give a number from 0.001 to 1000; 2 halves the noise "
                "compared with a question of weight 1"
            )
        return found


def _bare(word: str) -> str:
    """Without its quotes."""
    return word[1:-1] if word[0] in "\"'" else word


def ask(text: str, columns: Columns) -> Question:
    """The question in a text such as `quantiles(age, 0.25, 0.5, 0.75)`, about columns of which this is public."""
    call = Call(text, columns)
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
        labels = tuple(
            (group, *(label if isinstance(label, tuple) else (label,)))
            for group, a in zip(self._by.values, each, strict=True)
            for label in (a.labels or ((),))
        )
        joined: dict[str, Any] = {
            name: np.concatenate([getattr(a, name) for a in each])
            for name in ("value", "low", "high", "noise", "too_noisy", "counts")
            if getattr(each[0], name) is not None
        }
        return replace(each[0], labels=labels, **joined)


def _axis(call: Call, name: str) -> tuple[str, tuple[str, ...], Array | None]:
    """A column as an axis of a histogram: its name, its cells, and the edges of a number's bins."""
    column = call.column(name)
    if isinstance(column, Category):
        return name, column.values, None
    if "bins" not in call.options:
        raise call.refuse(f"{name} is a number: say which bins, as bins=10 or bins=[0, 18, 65, 120]")
    edges = np.array(call.list_of("bins") or np.linspace(column.low, column.high, call.whole("bins", 10) + 1))
    return name, tuple(f"{a:g} to {b:g}" for a, b in pairwise(edges)), edges


def _histogram(call: Call) -> Question:
    axes = 1 if call.name == "histogram" else 2
    return Histogram(call.text, [_axis(call, name) for name in call.expect(axes)])


def _quantiles(call: Call) -> Question:
    name, *given = call.expect(2, 1000)
    try:
        at = tuple(float(p) for p in given)
    except ValueError:
        at = (-1.0,)
    if not all(0 < p < 1 for p in at):
        raise call.refuse("quantiles are numbers between 0 and 1, such as quantiles(age, 0.25, 0.5, 0.75)")
    return Quantiles(call.text, call.number(name), at, call.whole("bins", 128, 8))


def _regression(call: Call) -> Question:
    assert call.formula is not None
    outcome, inputs = call.formula
    if outcome in inputs or len(set(inputs)) < len(inputs):
        raise call.refuse("every column may stand in a formula once")
    return Regression(call.text, call.number(outcome), [call.column(name) for name in inputs])


def _survival(call: Call) -> Question:
    name, event_name = call.expect(2)
    time, event = call.number(name), call.category(event_name)
    if len(event.values) != 2:
        raise call.refuse(
            f"{event.name} has {len(event.values)} values: an event either happened or not, so declare two"
        )
    happened = str(call.options.get("event", event.values[1]))
    if happened not in event.values:
        raise unknown(f"value of {event.name} in {call.text}", happened, event.values)
    times = call.list_of("times") or np.linspace(time.low, time.high, call.whole("bins", 24) + 1)[1:].tolist()
    return Survival(call.text, time, event.name, event.values.index(happened), tuple(times))


QUESTIONS: Mapping[str, tuple[Callable[[Call], Question], Sequence[str]]] = {
    "count": (lambda call: Count(call.text, *call.expect(0)), ()),
    "mean": (lambda call: Mean(call.text, call.number(*call.expect(1))), ()),
    "variance": (lambda call: Variance(call.text, call.number(*call.expect(1))), ()),
    "histogram": (_histogram, ("bins",)),
    "table": (_histogram, ("bins",)),
    "quantiles": (_quantiles, ("bins",)),
    "correlation": (
        lambda call: Correlation(call.text, [call.number(name) for name in call.expect(2, 1000)]),
        (),
    ),
    "regression": (_regression, ()),
    "km": (_survival, ("times", "bins", "event")),
}
"""What can be asked, and the options of each."""
