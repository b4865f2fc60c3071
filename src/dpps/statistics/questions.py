r"""Questions, each a block of numbers per record whose length is at most 1, so that one record's share of a sum is bounded.

A question turns every record into a vector (`encode`), the sum of which is released with noise, and turns a noised sum into an
answer with an interval (`answer`). Everything else about it is public: the column's range or categories come from the schema, bins
and time points from the question. Nothing is ever taken from the data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from torch import Tensor

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
        """As `answers.json` has it; None for what noise has swallowed."""

        def plain(numbers: Array) -> Any:
            shown = [None if bad else float(x) for x, bad in zip(numbers, self.too_noisy, strict=True)]
            return shown if self.labels else shown[0]

        found: dict[str, Any] = {"query": self.query}
        if self.labels:
            found[self.axis] = list(self.labels)
        found |= {"value": plain(self.value), "low": plain(self.low), "high": plain(self.high)}
        found |= {"noise": plain(self.noise), "method": self.method}
        found["too_noisy"] = self.too_noisy.tolist() if self.labels else bool(self.too_noisy[0])
        return found if self.counts is None else found | {"counts": self.counts.tolist()}


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

    def __init__(self, text: str = "count()") -> None:
        self.text = text

    def encode(self, records: Records) -> Array:
        return np.ones((length(records), 1))

    def answer(self, sums: Array, noise: float) -> Answer:
        reach = np.full(1, Z * noise)
        return Answer(
            self.text, sums, np.maximum(sums - reach, 0), sums + reach, reach / Z, "noise", np.zeros(1, bool)
        )


class Histogram(Question):
    """The share of records in each cell: a category's values, a number's bins, or pairs of them; "missing" is a cell of its own.

    The interval solves for the shares p that the noised cell and the noised total do not rule out (Fieller), with the sampling
    error of p itself (Wilson): cell and total share noise.
    """

    def __init__(self, text: str, axes: Sequence[tuple[str, tuple[str, ...], Array | None]]) -> None:
        self.text, self._axes = text, axes
        self._labels: list[tuple[str, ...]] = [()]
        for _, names, _ in axes:
            self._labels = [(*before, name) for before in self._labels for name in (*names, "missing")]
        self.width = len(self._labels)

    def encode(self, records: Records) -> Array:
        place = np.zeros(length(records))
        for column, names, edges in self._axes:
            values = records[column]
            if edges is not None:
                inside = np.clip(
                    np.searchsorted(edges, np.nan_to_num(values), "right") - 1, 0, len(names) - 1
                )
                values = np.where(np.isnan(values), -1, inside)
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


def with_jacobian(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """The values of a function, and a row of derivatives for each."""
    return function(at), torch.func.jacrev(function)(at)


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
            named = (
                [column.name]
                if isinstance(column, Number)
                else [f"{column.name}={x}" for x in column.values[1:]]
            )
            self.terms += [(column, name) for name in named]
        d, numbers = len(variables), sum(isinstance(column, Number) for column in variables)
        self._squares = [i for i, (column, _) in enumerate(self.terms) if isinstance(column, Number)]
        different = [
            (i, j)
            for i in range(len(self.terms))
            for j in range(i)
            if self.terms[i][0] is not self.terms[j][0]
        ]
        self._pairs = torch.tensor(different, dtype=torch.int64).reshape(-1, 2).T
        self.bound = (self.a**2 + d + self.b**2 * numbers / 4 + self.c**2 * d * (d - 1) / 2) ** 0.5
        self.width = 1 + len(self.terms) + len(self._squares) + len(different)

    def encode(self, records: Records) -> Array:
        x = np.column_stack([_inputs(column, records[column.name]) for column in self.variables])
        whole = np.asarray(~np.isnan(x).any(1))
        x = np.where(whole[:, None], x, 0.0)
        i, j = self._pairs.numpy()
        parts = [
            np.full((len(x), 1), self.a),
            x,
            self.b * (x[:, self._squares] ** 2 - 0.5),
            self.c * x[:, i] * x[:, j],
        ]
        block: Array = np.concatenate(parts, 1) * whole[:, None] / self.bound
        return block

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
        value, low, high = (self._number.unscaled(np.clip(x, -1, 1)) for x in (np.array([mean]), low, high))
        sd = s * np.hypot(1, mean / self.a) / count * self._number.span / 2
        return Answer(
            self.text, value, low, high, np.array([sd]), "Fieller", bad | (count < 2 * Z * s / self.a)
        )


class Smooth(Moments):
    """A smooth function of the moments. The interval is the delta method's, with noise and sampling error."""

    clear = 4.0
    """How many standard deviations of its noise `firmness` must be above zero."""

    @abstractmethod
    def estimate(self, m: Tensor) -> Tensor:
        """The values, in scaled numbers."""

    @abstractmethod
    def sampling(self, m: Tensor) -> Tensor:
        """The variance that they have without noise."""

    @abstractmethod
    def firmness(self, m: Tensor) -> Tensor:
        """One number that is positive by nature, and by which the estimate divides."""

    @abstractmethod
    def in_units(self, value: Array, low: Array, high: Array, sd: Array) -> tuple[Array, Array, Array, Array]:
        """Values, interval and noise in the columns' own units."""

    labels: tuple[Any, ...] = ()
    axis = "labels"

    def answer(self, sums: Array, noise: float) -> Answer:
        given = torch.from_numpy(sums)
        m = self.matrix(given)
        firm, slope = with_jacobian(lambda sums: self.firmness(self.matrix(sums)), given)
        bad = not bool(m[0, 0] > 1) or not firm > self.clear * noise * float(slope.norm())
        if bad:
            none = np.full(max(1, len(self.labels)), np.nan)
            lost = np.ones(len(none), bool)
            return Answer(self.text, none, none, none, none, "delta", lost, self.labels, self.axis)
        value, jacobian = with_jacobian(lambda sums: self.estimate(self.matrix(sums)), given)
        sd = noise * jacobian.norm(dim=1)
        reach = Z * (sd**2 + self.sampling(m).clamp(min=0)).sqrt()
        v, d, r = value.numpy(), sd.numpy(), reach.numpy()
        found = self.in_units(v, v - r, v + r, d)
        return Answer(self.text, *found, "delta", np.zeros(len(v), bool), self.labels, self.axis)


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
        return _covariance(m).reshape(-1)

    firmness = estimate

    def sampling(self, m: Tensor) -> Tensor:
        return 2 * _covariance(m).reshape(-1) ** 2 / m[0, 0]

    def in_units(self, value: Array, low: Array, high: Array, sd: Array) -> tuple[Array, Array, Array, Array]:
        f = self._factor
        return value * f, np.maximum(low, 0) * f, high * f, sd * f


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

    def in_units(self, value: Array, low: Array, high: Array, sd: Array) -> tuple[Array, Array, Array, Array]:
        return np.tanh(value), np.tanh(low), np.tanh(high), sd * (1 - np.tanh(value) ** 2)


class Regression(Smooth):
    """Least squares of one number on numbers and categories: the intercept and a slope for every term."""

    axis = "terms"

    def __init__(self, text: str, outcome: Number, inputs: Sequence[Number | Category]) -> None:
        super().__init__(text, [*inputs, outcome])
        self._outcome = outcome
        self.labels = ("intercept", *(name for _, name in self.terms[:-1]))
        columns = [column for column, _ in self.terms[:-1]]
        # an input of the scale [-1, 1] is (x - middle) / half; indicators are as they are
        half = np.array([c.span / 2 if isinstance(c, Number) else 1.0 for c in columns])
        middle = np.array([(c.low + c.high) / 2 if isinstance(c, Number) else 0.0 for c in columns])
        self._to_units = torch.eye(len(self.labels), dtype=torch.float64)
        self._to_units[0, 1:] = torch.from_numpy(-middle / half)
        self._to_units[1:, 1:] = torch.diag(torch.from_numpy(1 / half))

    def _solved(self, m: Tensor) -> Tensor:
        solved: Tensor = torch.linalg.solve(m[:-1, :-1], m[:-1, -1])
        return solved

    def estimate(self, m: Tensor) -> Tensor:
        return self._to_units @ self._solved(m)

    def firmness(self, m: Tensor) -> Tensor:
        smallest: Tensor = torch.linalg.eigvalsh(_covariance(m)[:-1, :-1])[0]
        return smallest

    def sampling(self, m: Tensor) -> Tensor:
        beta = self._solved(m)
        left = ((m[-1, -1] - beta @ m[:-1, -1]) / (m[0, 0] - len(beta)).clamp(min=1)).clamp(min=0)
        inverse: Tensor = torch.linalg.inv(m[:-1, :-1])
        return left * (self._to_units @ inverse @ self._to_units.T).diagonal()

    def in_units(self, value: Array, low: Array, high: Array, sd: Array) -> tuple[Array, Array, Array, Array]:
        half, middle = self._outcome.span / 2, (self._outcome.low + self._outcome.high) / 2
        moved = np.array([middle] + [0.0] * (len(value) - 1))
        return value * half + moved, low * half + moved, high * half + moved, sd * half


# Quantiles and survival curves: running counts over a public grid, all of them at once.
#
# The counts below every threshold are A h for the histogram h, with A the matrix of +1 (at or below) and -1 (above). A is negacyclic:
# every column is the one before it, shifted by one, with the sign of what comes round turned. So it has a square root R of the same
# kind, the best factorisation there is for Gaussian noise. A record sends a column of R (all have the same length), the noised sum R h is
# multiplied by R once more, and the noise on each running count grows with the logarithm of the number of bins only:
# 2.0 times that of one cell for 120 bins, where a plain histogram has up to 5.5.


@lru_cache(maxsize=32)
def root(bins: int) -> Array:
    """R: R R is the matrix with +1 on and below its diagonal and -1 above it."""
    turn = np.exp(1j * np.pi * np.arange(bins) / bins)  # makes a circulant matrix of a negacyclic one
    values = np.fft.fft(turn * np.ones(bins))
    first = (np.fft.ifft(np.sqrt(values)) / turn).real
    shift = np.subtract.outer(np.arange(bins), np.arange(bins))
    found: Array = np.where(shift >= 0, first[shift], -first[shift])
    return found


def _column_length(bins: int) -> float:
    return float(np.linalg.norm(root(bins)[:, 0]))


class Quantiles(Question):
    """Quantiles of a number. The interval holds the thresholds whose rank may be that of the quantile (Woodruff)."""

    largest_sum = float("inf")

    def __init__(self, text: str, number: Number, probabilities: tuple[float, ...], bins: int = 128) -> None:
        self.text, self._number, self._at, self.width = text, number, probabilities, bins

    def encode(self, records: Records) -> Array:
        x = self._number.scaled(records[self._number.name])
        missing = np.isnan(x)
        place = np.clip(np.floor((np.nan_to_num(x) + 1) / 2 * self.width), 0, self.width - 1).astype(np.int64)
        block: Array = (root(self.width) / _column_length(self.width))[:, place].T * ~missing[:, None]
        return block

    def answer(self, sums: Array, noise: float) -> Answer:
        r = root(self.width) * _column_length(self.width)
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
        code = (root(self._bins) / _column_length(self._bins))[:, place].T
        block: Array = np.concatenate([code * (whole & died)[:, None], code * (whole & ~died)[:, None]], 1)
        return block

    def _curve(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The logarithm of survival, events and numbers at risk at each time."""
        r = torch.from_numpy(root(self._bins) * _column_length(self._bins))
        runs = r @ sums.reshape(2, -1).T
        runs = (runs + runs[-1]) / 2  # at or below each threshold: events, censored
        events = runs[:-1, 0].diff(prepend=torch.zeros(1, dtype=torch.float64))
        gone = torch.cat([torch.zeros(1, dtype=torch.float64), runs[:-2].sum(1)])
        risk = runs[-1].sum() - gone
        log = torch.log1p(-(events / risk.clamp(min=1)).clamp(max=0.999)).cumsum(0)
        return log, events, risk

    def answer(self, sums: Array, noise: float) -> Answer:
        given = torch.from_numpy(sums)
        log, jacobian = with_jacobian(lambda x: self._curve(x)[0], given)
        risk, risk_jacobian = with_jacobian(lambda x: self._curve(x)[2], given)
        events = self._curve(given)[1]
        sd = noise * jacobian.norm(dim=1)
        left = (risk - events).clamp(min=1)
        greenwood = (events.clamp(min=0) / (risk.clamp(min=1) * left)).cumsum(0)
        reach = Z * (sd**2 + greenwood).sqrt()
        lost = risk < 2 * Z * noise * risk_jacobian.norm(dim=1)
        bad = lost.cummax(0).values | (reach > 1.5)
        value = np.minimum.accumulate(np.clip(log.exp().numpy(), 0, 1))
        low, high = np.clip((log - reach).exp().numpy(), 0, 1), np.clip((log + reach).exp().numpy(), 0, 1)
        return Answer(
            self.text, value, low, high, value * sd.numpy(), "Greenwood", bad.numpy(), self._times, "times"
        )
