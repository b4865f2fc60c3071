"""Splits: every example at most once, nobody empty, the same for the same seed."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpps.data import describe, hold_out, split
from dpps.errors import UsageError

FAST = settings(deadline=None, max_examples=40)
LABELS = np.random.default_rng(5).integers(0, 10, 1200)
HOWS = ["iid", "dirichlet:0.01", "dirichlet:0.5", "dirichlet:1e-300", "dirichlet:1e9", "label:1", "label:3"]


def joined(parts):
    return np.sort(np.concatenate(parts))


@st.composite
def labelled(draw):
    nodes = draw(st.integers(1, 12))
    labels = draw(st.lists(st.integers(0, 4), min_size=nodes, max_size=80))
    return np.array(labels), nodes


@FAST
@given(labelled(), st.integers(0, 2**40))
def test_iid_is_a_partition_into_equal_parts(case, seed):
    labels, nodes = case
    parts = split(labels, nodes, "iid", seed)
    np.testing.assert_array_equal(joined(parts), np.arange(len(labels)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_iid_is_one_shuffle_dealt_out_in_turn():
    """Node r of N takes every N-th index of one order, whatever N is."""
    order = split(LABELS, 1, "iid", 7)[0]
    for nodes in (2, 7, 10):
        parts = split(LABELS, nodes, "iid", 7)
        assert all(np.array_equal(part, order[node::nodes]) for node, part in enumerate(parts))
    assert not np.array_equal(order, np.arange(len(LABELS)))


@FAST
@given(labelled(), st.floats(1e-4, 1e4), st.integers(0, 2**40))
def test_dirichlet_is_a_partition_and_nobody_is_empty(case, alpha, seed):
    labels, nodes = case
    parts = split(labels, nodes, f"dirichlet:{alpha}", seed)
    assert len(parts) == nodes
    np.testing.assert_array_equal(joined(parts), np.arange(len(labels)))
    assert min(len(part) for part in parts) >= 1


def test_dirichlet_spread_follows_alpha():
    """Var of a symmetric Dirichlet share is (N - 1) / (N² (N alpha + 1)); the shares must show it."""
    labels = np.repeat(np.arange(200), 500)
    nodes = 5
    for alpha in (0.2, 1.0, 10.0):
        counts = np.array(describe(labels, split(labels, nodes, f"dirichlet:{alpha}", 3)))
        expected = (nodes - 1) / (nodes**2 * (nodes * alpha + 1))
        assert np.var(counts / 500) == pytest.approx(expected, rel=0.15)


@FAST
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**40))
def test_label_split_covers_labels_evenly(nodes, per_node, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(5), [20, 30, 25, 40, 13]))
    parts = split(labels, nodes, f"label:{per_node}", seed)
    used = joined(parts)
    assert len(np.unique(used)) == len(used)
    counts = np.array(describe(labels, parts))
    assert ((counts > 0).sum(axis=1) == per_node).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    assert (holders > 0).sum() == min(5, nodes * per_node)
    for label, total in enumerate(np.bincount(labels)):
        shares = counts[counts[:, label] > 0, label]
        if len(shares):
            assert shares.sum() == total
            assert shares.max() - shares.min() <= 1


def test_label_split_mixes_the_label_sets():
    seen = {tuple(np.flatnonzero(row)) for row in describe(LABELS, split(LABELS, 20, "label:2", 0))}
    assert len(seen) > 5


@pytest.mark.parametrize("how", HOWS)
def test_same_seed_same_split_other_seed_other_split(how):
    first, again, other = (split(LABELS, 6, how, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("how", ["dirichlet:0.5", "label:3"])
def test_parts_are_in_random_order(how):
    """Batches are taken in order, so labels must not come in runs."""
    for part in split(LABELS, 4, how, 0):
        changes = np.count_nonzero(np.diff(LABELS[part]))
        assert changes > 3 * len(np.unique(LABELS[part]))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("idd", "'iid'"),
        ("dirichet:0.5", "'dirichlet:ALPHA'"),
        ("labels:2", "'label:K'"),
        ("zzz", "iid, dirichlet:ALPHA, label:K"),
        ("iid:3", "'iid:3'"),
        ("dirichlet:0", "ALPHA"),
        ("dirichlet:-1", "ALPHA"),
        ("dirichlet:nan", "ALPHA"),
        ("dirichlet:inf", "ALPHA"),
        ("dirichlet", "ALPHA"),
        ("label:0", "1 to 10"),
        ("label:11", "1 to 10"),
        ("label:1.5", "1 to 10"),
        ("label", "1 to 10"),
    ],
)
def test_wrong_split_says_what_is_allowed(how, message):
    with pytest.raises(UsageError) as caught:
        split(LABELS, 4, how, 0)
    assert message in str(caught.value)


@pytest.mark.parametrize("how", HOWS)
def test_fewer_examples_than_nodes(how):
    with pytest.raises(UsageError, match=r"3 examples .*4 nodes.*3 nodes"):
        split(np.array([0, 1, 1]), 4, how, 0)


def test_other_bounds():
    with pytest.raises(UsageError, match="nodes 0"):
        split(LABELS, 0, "iid", 0)
    with pytest.raises(UsageError, match=r"label 1 has 1 examples .*3 nodes .*'label:2'"):
        split(np.array([0, 0, 0, 1]), 3, "label:2", 0)


def test_describe_counts_and_is_json():
    labels = np.array([0, 2, 2, 1, 0])
    table = describe(labels, [np.array([0, 1, 2]), np.array([3, 4])])
    assert json.loads(json.dumps(table)) == [[1, 0, 2], [1, 1, 0]]


@FAST
@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.floats(0.01, 0.99), st.integers(0, 99))
def test_hold_out_cuts_every_part_in_two(sizes, fraction, seed):
    ends = np.cumsum([0, *sizes])
    order = np.random.default_rng(seed).permutation(ends[-1])
    parts = [order[start:end] for start, end in itertools.pairwise(ends)]
    kept, held = hold_out(parts, fraction, seed)
    for part, train, test in zip(parts, kept, held, strict=True):
        assert len(test) == min(max(round(fraction * len(part)), 1), len(part) - 1)
        np.testing.assert_array_equal(train, part[np.isin(part, train)])
        np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.sort(part))


def test_hold_out_depends_on_seed_and_node():
    parts = [np.arange(50), np.arange(50)]
    first, again, other = (hold_out(parts, 0.2, seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(first[0], again[0])
    assert not np.array_equal(first[0], other[0])
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_hold_out_fraction_is_checked(fraction):
    with pytest.raises(UsageError, match=f"held-out fraction {fraction}:"):
        hold_out([np.arange(5)], fraction, 0)


def test_hold_out_needs_two_examples():
    with pytest.raises(UsageError, match="node 1 holds 1 example"):
        hold_out([np.arange(5), np.arange(1)], 0.5, 0)
