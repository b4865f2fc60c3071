"""What holds for every topology, what all of them refuse, and their names."""

import math
import pickle

import networkx as nx
import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from dpps.errors import UsageError
from dpps.topology import (
    KEPT_ROUNDS,
    Base,
    Complete,
    DOut,
    Exponential,
    OnePeerRandom,
    Ring,
    Sequence,
    Static,
    Topology,
    from_networkx,
    parse,
)
from tests.support.topology import COLUMN_ONLY, FAMILIES, SIZES, assert_sound

# What holds for every family


@pytest.mark.parametrize("nodes", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_doubly_stochastic_with_self_loops_and_connects(family: str, nodes: int) -> None:
    topology = FAMILIES[family](nodes)
    assert topology.nodes == nodes
    assert topology.doubly_stochastic
    for t in range(topology.period or 20):
        assert_sound(topology.weights(t))
    union = sum(topology.weights(t).dense() for t in range(topology.period or 64))
    assert connected_components(csr_array(union), connection="strong", return_labels=False) == 1
    assert topology.validate().doubly_stochastic


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_of_a_phase_are_built_once_and_repeat(family: str) -> None:
    topology = FAMILIES[family](10)
    for t in range(topology.period or 3):
        assert topology.weights(t) is topology.weights(t)
        if topology.period is not None:
            assert topology.weights(t + 7 * topology.period) is topology.weights(t)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pickled_topology_is_the_same(family: str) -> None:
    topology = FAMILIES[family](10)
    copy = pickle.loads(pickle.dumps(topology))
    assert repr(copy) == repr(topology)
    for t in range(5):
        np.testing.assert_array_equal(copy.weights(t).dense(), topology.weights(t).dense())


def test_a_topology_that_never_repeats_keeps_few_rounds() -> None:
    topology = OnePeerRandom(4)
    first = topology.weights(0)
    for t in range(3 * KEPT_ROUNDS):
        topology.weights(t)
    assert len(topology._built) == KEPT_ROUNDS
    again = topology.weights(0)
    assert again is not first
    np.testing.assert_array_equal(again.dense(), first.dense())


@pytest.mark.parametrize(
    "topology",
    [
        DOut(10, 4),
        Exponential(10),
        Ring(5),
        Complete(3),
        Base(10, 2),
        OnePeerRandom(6, 3),
        Sequence([DOut(10, 4), Ring(10)]),
        Exponential(10).with_dropouts(0.1, seed=2),
        Exponential(10).with_dropouts({3: [1, 2]}),
    ],
    ids=repr,
)
def test_repr_makes_the_same_topology(topology: Topology) -> None:
    copy = eval(repr(topology))
    for t in range(5):
        np.testing.assert_array_equal(copy.weights(t).dense(), topology.weights(t).dense())


def test_repr_of_a_long_schedule_is_short() -> None:
    assert (
        repr(Ring(9).with_dropouts({t: [1] for t in range(99)}))
        == "Ring(9).with_dropouts(<schedule of 99 rounds>)"
    )


# Large networks


def test_large_networks_stay_sparse() -> None:
    weights = DOut(100_000, 4).weights(0)
    assert len(weights.values) == 400_000
    assert weights.doubly_stochastic
    assert len(Base(20_000, 1).weights(0).values) <= 40_000
    away = DOut(100_000, 4).with_dropouts(0.1)
    assert away.weights(0).doubly_stochastic
    assert len(away.weights(0).values) < 1_000_000


# Names


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exp", "Exponential(10)"),
        ("4-out", "DOut(10, 4)"),
        ("10-out", "DOut(10, 10)"),
        ("ring", "Ring(10)"),
        ("complete", "Complete(10)"),
        ("base-2", "Base(10, 2)"),
        ("random", "OnePeerRandom(10, 0)"),
    ],
)
def test_parse(text: str, expected: str) -> None:
    assert repr(parse(text, 10)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exq", "topology 'exq': .*exp.*'exp'"),
        ("rnig", "'rnig'.*'ring'"),
        ("4-ou", "'4-ou'.*'K-out'"),
        ("base-", "'base-'.*'base-K'"),
        ("-1-out", "'-1-out'.*'K-out'"),
        ("", "base-K, complete, exp, K-out, random, ring"),
        ("11-out", "d is 11.*1 to 10"),
        ("0-out", "d is 0.*1 to 10"),
        ("base-10", "k is 10.*1 to 9"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(text, 10)


# Bad input


@pytest.mark.parametrize("nodes", [1, 0, -3])
@pytest.mark.parametrize("name", ["exp", "1-out", "ring", "complete", "base-1", "random"])
def test_fewer_than_two_nodes_are_refused(name: str, nodes: int) -> None:
    with pytest.raises(UsageError, match=rf"nodes is {nodes}, .*2 or more"):
        parse(name, nodes)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (lambda: DOut(10, 11), "d is 11, .*1 to 10"),
        (lambda: DOut(10, 0), "d is 0, .*1 to 10"),
        (lambda: DOut(10, 2.5), "d is 2.5, .*1 to 10"),
        (lambda: Exponential("ten"), "nodes is 'ten', .*2 or more"),
        (lambda: Base(10, 0), "k is 0, .*1 to 9"),
        (lambda: Base(10, 10), "k is 10, .*1 to 9"),
        (lambda: OnePeerRandom(10, -1), "seed is -1, .*0 or more"),
        (lambda: Static(np.ones((2, 3))), r"shape \(2, 3\)"),
        (lambda: Static([1.0]), r"shape \(1,\)"),
        (lambda: Static([["a", "b"], ["c", "d"]]), "numbers"),
        (lambda: Static([[1.0]]), "nodes is 1, .*2 or more"),
        (
            lambda: Static([[0.5, 0.4], [0.5, 0.5]]),
            r"matrix: column 1 .*0\.9",
        ),
        (lambda: Static(COLUMN_ONLY.T), r"column 0 .*0\.8.*transpose"),
        (lambda: Static([[0.0, 1.0], [1.0, 0.0]]), "node 0 .*self-loop"),
        (
            lambda: Static([[2.0, 0.5], [-1.0, 0.5]]),
            r"W\[1, 0\] is -1",
        ),
        (lambda: Static([[np.nan, 0.5], [0.5, 0.5]]), r"W\[0, 0\] is nan"),
        (lambda: Sequence([]), "sequence"),
        (lambda: Sequence([Ring(4), Ring(5)]), r"Ring\(5\) has 5 nodes.* 4"),
        (lambda: Sequence([OnePeerRandom(4)]), r"OnePeerRandom\(4, 0\)"),
        (lambda: DOut(5, 1).validate(), r"DOut\(5, 1\) .* 5 "),
        (lambda: Ring(5).weights(-1), "round -1 "),
        (lambda: Ring(5).present(-1), "round -1 "),
        (lambda: Ring(5).with_dropouts(1.0), "dropout probability .*1.0"),
        (lambda: Ring(5).with_dropouts(-0.1), "dropout probability .*-0.1"),
        (lambda: Ring(5).with_dropouts(math.nan), "dropout probability .*nan"),
        (lambda: Ring(5).with_dropouts("often"), "dropout probability .*'often'"),
        (lambda: Ring(5).with_dropouts(0.5, seed=-1), "seed is -1, .*0 or more"),
        (lambda: Ring(5).with_dropouts({2: [5]}), "round 2 is 5, .*0 to 4"),
        (lambda: Ring(5).with_dropouts({2: [-1]}), "round 2 is -1, .*0 to 4"),
        (lambda: Ring(5).with_dropouts({2: 1}), "round 2 .* 1: .*list"),
        (lambda: Ring(5).with_dropouts({-1: [1]}), "round is -1, .*0 or more"),
        (lambda: Ring(3).with_dropouts({7: [0, 1, 2]}), "round 7"),
        (lambda: Ring(5).with_dropouts(0.1).with_dropouts(0.1), "dropouts"),
        (lambda: from_networkx(nx.empty_graph(1)), "nodes is 1, .*2 or more"),
        (lambda: from_networkx([(0, 1)]), "from_networkx .*list.*Graph or DiGraph"),
        (lambda: from_networkx(nx.empty_graph(3)).validate(), "nodes 0 and 1"),
    ],
)
def test_bad_input_is_refused_in_one_line(request_: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        request_()
    assert "\n" not in str(caught.value)
