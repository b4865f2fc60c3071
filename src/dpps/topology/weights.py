"""The weights of one round: a sparse matrix W, and what must hold for it."""

from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from dpps.errors import UsageError

TOLERANCE = 1e-9
"""How far a row or column sum may be from 1."""


class Weights:
    """The N x N matrix W of one round, dense or scipy.sparse; W[i, j] is what receiver i takes of sender j. It is copied.

    Stored by receiver: the entries of receiver i are ``indptr[i]:indptr[i + 1]``, senders ascending.
    """

    def __init__(self, matrix: Any) -> None:
        self.matrix = csr_array(matrix, dtype=np.float64, copy=True)
        self.matrix.sum_duplicates()
        self.matrix.eliminate_zeros()
        self.nodes: int = self.matrix.shape[0]
        self.indptr: NDArray[np.int64] = self.matrix.indptr.astype(np.int64)
        self.senders: NDArray[np.int64] = self.matrix.indices.astype(np.int64)
        self.values: NDArray[np.float64] = self.matrix.data

    @classmethod
    def from_entries(cls, nodes: int, receivers: Any, senders: Any, values: Any) -> Self:
        """W from its entries in any order; entries of the same place add up."""
        places = np.asarray(receivers, dtype=np.int64), np.asarray(senders, dtype=np.int64)
        if places[0].size and not (min(map(np.min, places)) >= 0 and max(map(np.max, places)) < nodes):
            raise UsageError(
                f"an entry lies outside the {nodes} x {nodes} matrix: nodes are 0 to {nodes - 1}"
            )
        return cls(coo_array((np.asarray(values, dtype=np.float64), places), shape=(nodes, nodes)))

    @classmethod
    def symmetric(cls, nodes: int, receivers: Any, senders: Any, values: Any) -> Self:
        """W from its entries off the diagonal; each node keeps for itself what is missing to 1."""
        everyone = np.arange(nodes)
        rest = 1.0 - np.bincount(receivers, weights=values, minlength=nodes)
        return cls.from_entries(
            nodes,
            np.concatenate([receivers, everyone]),
            np.concatenate([senders, everyone]),
            np.concatenate([values, rest]),
        )

    def dense(self) -> NDArray[np.float64]:
        """W with all its zeros, N x N numbers; for analysis and tests."""
        full: NDArray[np.float64] = self.matrix.toarray()
        return full

    @cached_property
    def receivers(self) -> NDArray[np.int64]:
        """The receiver of every entry, in the order of ``senders`` and ``values``."""
        return np.repeat(np.arange(self.nodes), np.diff(self.indptr))

    @cached_property
    def row_sums(self) -> NDArray[np.float64]:
        """What each receiver takes in all."""
        return np.asarray(self.matrix.sum(axis=1), dtype=np.float64)

    @cached_property
    def column_sums(self) -> NDArray[np.float64]:
        """What each sender gives away in all."""
        return np.asarray(self.matrix.sum(axis=0), dtype=np.float64)

    @cached_property
    def doubly_stochastic(self) -> bool:
        """Whether all rows and all columns sum to 1, up to 1e-9."""
        return bool(_all_one(self.row_sums) and _all_one(self.column_sums))

    @cached_property
    def out_degree(self) -> NDArray[np.int64]:
        """To how many others each node sends."""
        return np.bincount(self.senders[self.receivers != self.senders], minlength=self.nodes)

    def __repr__(self) -> str:
        return f"<Weights of {self.nodes} nodes, {len(self.values)} entries>"


def _all_one(sums: NDArray[np.float64]) -> bool:
    return bool(np.all(np.abs(sums - 1.0) <= TOLERANCE))


def check_weights(weights: Weights, where: str, *, doubly_stochastic: bool) -> None:
    """Refuses weights the protocol cannot run on, naming the first entry, row or column at fault.

    Args:
        where: What the weights are, for the message, such as ``round 3``.
        doubly_stochastic: Whether the rows, too, must sum to 1. The columns always must: W conserves the sum.
    """
    _check_entries(weights, where)
    if not _all_one(weights.column_sums):
        hint = "make each column sum to 1: W[i, j] is what receiver i takes of sender j"
        if _all_one(weights.row_sums):
            hint = "the rows do: pass the transpose, W[i, j] is what receiver i takes of sender j"
        raise UsageError(f"{where}: column {_first_off(weights.column_sums)}; {hint}")
    if doubly_stochastic and not _all_one(weights.row_sums):
        raise UsageError(f"{where}: row {_first_off(weights.row_sums)}; make each row sum to 1")


def _check_entries(weights: Weights, where: str) -> None:
    bad = np.flatnonzero(~np.isfinite(weights.values) | (weights.values < 0))
    if bad.size:
        i, j, value = weights.receivers[bad[0]], weights.senders[bad[0]], weights.values[bad[0]]
        raise UsageError(f"{where}: W[{i}, {j}] is {value:g}; weights must be finite and not negative")
    on_diagonal = weights.receivers == weights.senders
    missing = np.setdiff1d(np.arange(weights.nodes), weights.senders[on_diagonal & (weights.values > 0)])
    if missing.size:
        node = missing[0]
        raise UsageError(f"{where}: node {node} has no self-loop; give W[{node}, {node}] a positive weight")


def _first_off(sums: NDArray[np.float64]) -> str:
    worst = int(np.flatnonzero(np.abs(sums - 1.0) > TOLERANCE)[0])
    return f"{worst} sums to {sums[worst]:.12g}, not 1"
