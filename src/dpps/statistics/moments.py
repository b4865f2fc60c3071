r"""Means, variances, correlations and regressions: functions of sums of products of scaled numbers."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpps.statistics.questions import (
    Answer,
    Array,
    Category,
    Number,
    Question,
    Records,
    Z,
    between_roots,
    one_hot,
    with_jacobian,
)


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
