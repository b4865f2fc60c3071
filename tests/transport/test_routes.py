"""Routes: what processes send and add up gives the rows that one process with all of them computes."""

import numpy as np
import pytest
import torch

from dpps.errors import UsageError
from dpps.topology import DOut, Exponential, Ring, Topology
from dpps.transport import Route, blocks, combine


def test_blocks_are_contiguous_and_as_equal_as_can_be() -> None:
    assert blocks(7, 3) == [range(2), range(2, 4), range(4, 7)]
    assert blocks(4, 4) == [range(k, k + 1) for k in range(4)]
    with pytest.raises(UsageError, match=r"5 processes .*4 nodes"):
        blocks(4, 5)


@pytest.mark.parametrize("topology", [Ring(7), Exponential(7), DOut(7, 3)], ids=str)
@pytest.mark.parametrize("processes", [2, 3, 7])
def test_every_process_computes_its_rows_of_the_whole(topology: Topology, processes: int) -> None:
    weights, x = topology.weights(1), torch.randn(7, 4, dtype=torch.float64)
    parts, device = blocks(7, processes), torch.device("cpu")
    routes = [Route.of(weights, parts, rank, device) for rank in range(processes)]
    for rank, (route, own) in enumerate(zip(routes, parts, strict=True)):
        table = torch.full((len(route.needed), 4), torch.nan, dtype=torch.float64)
        table[route.own_places] = x[own.start : own.stop][route.own_rows]
        for peer, places in route.incoming.items():
            theirs = parts[peer]
            table[places] = x[theirs.start : theirs.stop][routes[peer].outgoing[rank]]
        rows = torch.empty(len(own), 4, dtype=torch.float64)
        rows[route.inner_rows] = combine(x[own.start : own.stop], *route.inner)
        rows[route.outer_rows] = combine(table, *route.outer)
        expected = torch.from_numpy(np.asarray(weights.dense())) @ x
        torch.testing.assert_close(rows, expected[own.start : own.stop])
