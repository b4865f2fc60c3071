"""Gradient tracking reaches the common optimum at a constant rate, where SGP stays beside it."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError

NODES, EXAMPLES = 5, 12


def regression():
    """Nodes whose own optima lie far apart; one batch is all of a node's data."""
    rng = torch.Generator().manual_seed(1)
    sets = []
    for _ in range(NODES):
        x = torch.randn(EXAMPLES, 3, generator=rng, dtype=torch.float64)
        centre = 5 * torch.randn(3, 1, generator=rng, dtype=torch.float64)
        sets.append(TensorDataset(x, x @ centre))
    return sets


def optimum(sets):
    x, y = (torch.cat(part) for part in zip(*(s.tensors for s in sets), strict=True))
    return torch.linalg.lstsq(x, y).solution[:, 0]


def train(kind, topology, epochs=600):
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False).double()
    loss = nn.functional.mse_loss
    algorithm = kind(model, lr_shared=0.05, batch_size=EXAMPLES, loss=loss)
    algorithm.partition.initial = lambda: (model.weight.detach().flatten().clone(), torch.empty(0).double())
    return dpps.Run(algorithm, regression(), topology=topology, seed=0).fit(epochs=epochs)


@pytest.mark.parametrize("topology", [dpps.Ring(NODES), dpps.Exponential(NODES), dpps.DOut(NODES, 2)])
def test_every_node_ends_at_the_common_optimum(topology):
    best = optimum(regression())
    run = train(dpps.GradientTracking, topology)
    apart = (run.algorithm.shared_parameters(run.state.shared.y) - best).norm(dim=1)
    assert float(apart.max()) < 1e-6
    beside = (train(dpps.SGP, topology).state.shared.y - best).norm(dim=1)
    assert float(beside.max()) > 0.05


def test_the_trackers_add_up_to_the_gradients():
    run = train(dpps.GradientTracking, dpps.DOut(NODES, 2), epochs=7)
    z = run.state.shared.s[:, run.algorithm.partition.shared_size :]
    torch.testing.assert_close(z.sum(0), run.state.kept["gradient"].sum(0))


def test_it_is_offered_without_noise_and_with_everything_shared():
    sets = regression()
    with pytest.raises(UsageError, match=r"GradientTracking.*record"):
        dpps.Run(
            dpps.GradientTracking(nn.Linear(3, 1)),
            sets,
            topology=dpps.Ring(NODES),
            privacy=dpps.Record(epsilon=1),
        )
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    run = dpps.Run(dpps.GradientTracking(model, ["0"], batch_size=4), sets, topology=dpps.Ring(NODES))
    with pytest.raises(UsageError, match='shared="all", local_steps=1'):
        run.start(epochs=1)
