"""Splits of a training set over the nodes, and held-out parts for testing. Repeatable by seed."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dpps.errors import UsageError, unknown

Index = npt.NDArray[np.int64]

_SPLIT, _HOLD_OUT = 1, 2


def split(labels: npt.ArrayLike, nodes: int, how: str, seed: int) -> list[Index]:
    """Split examples over nodes: the indices of each node's examples, without overlap.

    - `iid`: one shuffle of all examples, node r takes every N-th of them starting at r. The order is that of
      the shuffle, as in the authors' runs.
    - `dirichlet:ALPHA`: for each label, the shares of the nodes are drawn from a symmetric Dirichlet
      distribution: the smaller ALPHA, the more the nodes differ. A node left without examples gets one
      of the largest node's. Every example is used.
    - `label:K`: each node sees K labels. Each label is seen by equally many nodes, give or take one, which
      share its examples evenly. With N K below the number of labels some labels are left out.

    Args:
        labels: the label of each example.
        nodes: N, the number of nodes.
        how: one of the three forms.
        seed: the same seed gives the same split.
    """
    known = np.asarray(labels).astype(np.int64)
    if nodes < 1:
        raise UsageError(f"nodes {nodes}: give at least 1")
    if len(known) < nodes:
        raise UsageError(
            f"{len(known)} examples are too few for {nodes} nodes: use at most {len(known)} nodes"
        )
    rng = _generator(seed, _SPLIT)
    name, _, value = how.partition(":")
    if how == "iid":
        order = rng.permutation(len(known))
        return [order[node::nodes] for node in range(nodes)]
    if name == "dirichlet":
        try:
            alpha = float(value)
        except ValueError:
            alpha = math.nan
        # The upper bound keeps the Gamma draws behind a Dirichlet one finite; the shares are equal long before.
        if not 0 < alpha <= 1e9:
            raise UsageError(
                f"split {how!r}: ALPHA must be above 0 and at most 1e9, for example dirichlet:0.5"
            )
        return _dirichlet(known, nodes, alpha, rng)
    if name == "label":
        classes = len(np.unique(known))
        if not value.isdecimal() or not 1 <= int(value) <= classes:
            raise UsageError(
                f"split {how!r}: K must be a whole number from 1 to {classes}, for example label:2"
            )
        return _by_label(known, nodes, int(value), rng)
    raise unknown("split", how, ("iid", "dirichlet:ALPHA", "label:K"))


def describe(labels: npt.ArrayLike, parts: Sequence[Index]) -> list[list[int]]:
    """How many examples of each label every node holds: row r for node r, column c for label c."""
    known = np.asarray(labels).astype(np.int64)
    classes = int(known.max()) + 1
    return [np.bincount(known[part], minlength=classes).tolist() for part in parts]


def hold_out(parts: Sequence[Index], fraction: float, seed: int) -> tuple[list[Index], list[Index]]:
    """Split each node's examples into a training part, in the same order, and a random test part.

    The test part follows the node's own distribution, which its local parameters learn. Both parts have at
    least one example of every node.
    """
    if not 0 < fraction < 1:
        raise UsageError(f"held-out fraction {fraction}: give a number above 0 and below 1")
    kept, held = [], []
    for node, part in enumerate(parts):
        if len(part) < 2:
            raise UsageError(
                f"node {node} holds {len(part)} example(s), too few to hold some out: use fewer nodes"
            )
        count = min(max(round(fraction * len(part)), 1), len(part) - 1)
        chosen = np.zeros(len(part), dtype=bool)
        chosen[_generator(seed, _HOLD_OUT, node).choice(len(part), count, replace=False)] = True
        kept.append(part[~chosen])
        held.append(part[chosen])
    return kept, held


def hold_out_own(
    x: Tensor, labels: Tensor, part: float, seed: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keep back about this part of a node's own examples for testing: (for training), (kept back).

    Where an example goes depends on its own content and the public seed alone, so one example more or less moves no other one:
    otherwise what is promised for one example would not hold.
    """

    def chance(example: Tensor, label: Tensor) -> float:
        """Between 0 and 1, the same for equal examples."""
        target = label.numpy().tobytes() if label.is_floating_point() else str(int(label)).encode()
        content = b"|".join((str(seed).encode(), example.numpy().tobytes(), target))
        return int.from_bytes(hashlib.sha256(content).digest()[:8]) / 2**64

    kept = torch.tensor([chance(*one) < part for one in zip(x, labels, strict=True)])
    return (x[~kept], labels[~kept]), (x[kept], labels[kept])


def _generator(*key: int) -> np.random.Generator:
    """Random numbers that depend on the whole key, so that splits share none with other uses of the seed."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def _dirichlet(labels: Index, nodes: int, alpha: float, rng: np.random.Generator) -> list[Index]:
    shares: list[list[Index]] = [[] for _ in range(nodes)]
    for examples in _shuffled_by_label(labels, rng):
        cuts = np.cumsum(rng.dirichlet(np.full(nodes, alpha)))[:-1] * len(examples)
        for share, piece in zip(shares, np.split(examples, np.rint(cuts).astype(np.int64)), strict=True):
            share.append(piece)
    parts = [rng.permutation(np.concatenate(share)).tolist() for share in shares]
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [np.array(part, dtype=np.int64) for part in parts]


def _by_label(labels: Index, nodes: int, per_node: int, rng: np.random.Generator) -> list[Index]:
    groups = _shuffled_by_label(labels, rng)
    holders = _holders(len(groups), nodes, per_node, rng)
    shares: list[list[Index]] = [[] for _ in range(nodes)]
    for examples, sharing in zip(groups, holders, strict=True):
        if len(examples) < len(sharing):
            raise UsageError(
                f"label {labels[examples[0]]} has {len(examples)} examples for the {len(sharing)} nodes that "
                f"share it in split 'label:{per_node}': use fewer nodes or a smaller K"
            )
        if sharing:
            for node, piece in zip(sharing, np.array_split(examples, len(sharing)), strict=True):
                shares[node].append(piece)
    return [rng.permutation(np.concatenate(share)) for share in shares]


def _holders(classes: int, nodes: int, per_node: int, rng: np.random.Generator) -> list[list[int]]:
    """For each label the nodes that see it: each node in turn takes the labels seen least, ties at random."""
    holders: list[list[int]] = [[] for _ in range(classes)]
    for node in range(nodes):
        seen = np.array([len(sharing) for sharing in holders])
        for label in np.lexsort((rng.random(classes), seen))[:per_node]:
            holders[label].append(node)
    return holders


def _shuffled_by_label(labels: Index, rng: np.random.Generator) -> list[Index]:
    order = rng.permutation(len(labels))
    return [order[labels[order] == label] for label in np.unique(labels)]
