"""Declared sizes are whole numbers from 1 to 1e9, whoever says them."""

import pytest

import dpps
from dpps.learning import LARGEST, announce, for_every_node, parse_sizes
from dpps.transport import Cluster, Distributed
from tests.support import processes


def _announce(cluster: Cluster, size: float) -> str | list[int]:
    """Rank 1 says that its node has `size` examples."""
    fabric = Distributed(2, cluster.join().meet({"version": "test"}))
    try:
        return announce(None, [size if cluster.rank == 1 else 30], fabric, None)  # type: ignore[list-item]
    except dpps.errors.RunError as error:
        return str(error)


@pytest.mark.parametrize("size", [0, 1e15, -1e9, 12.5])
def test_a_size_that_cannot_be_one_is_refused_by_name(size: float) -> None:
    for said in processes.run(2, _announce, size):
        assert "node 1 " in said
        assert f" {size:.15g} " in said
        assert f"1 to {LARGEST}" in said


def test_everybody_hears_the_sizes_of_all() -> None:
    assert processes.run(2, _announce, 17) == [[30, 17]] * 2


def test_the_value_of_the_option() -> None:
    assert parse_sizes("200") == 200
    assert parse_sizes("200,350") == [200, 350]
    assert for_every_node(parse_sizes("200"), 3) == (200, 200, 200)
    with pytest.raises(dpps.errors.UsageError, match=rf"0.*1 to {LARGEST}"):
        for_every_node([1, 0], 2)
    with pytest.raises(dpps.errors.UsageError, match=r"2 declared sizes.*3 nodes"):
        for_every_node([1, 2], 3)
