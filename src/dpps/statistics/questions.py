r"""Questions, each a block of numbers per record whose length is at most 1, so that one record's share of a sum is bounded.

A question turns every record into a vector (`encode`), the sum of which is released with noise, and turns a noised sum into an
answer with an interval (`answer`). Everything else about it is public: the column's range or categories come from the schema, bins
and time points from the question. Nothing is ever taken from the data.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
            self.text, sums, np.maximum(sums - reach, 0), sums + reach, reach / Z, "noise", none_of(1)
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


def none_of(count: int) -> NDArray[np.bool_]:
    """So many times no."""
    return np.zeros(count, dtype=bool)


def length(records: Records) -> int:
    """How many records there are."""
    return len(next(iter(records.values())))
