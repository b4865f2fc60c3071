"""What tells one run from another."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.runs import describe, fingerprint, model_facts


def _algorithm(seed: int = 0, width: int = 3) -> dpps.PartPSP:
    torch.manual_seed(seed)
    return dpps.PartPSP(nn.Linear(4, width), batch_size=5)


def test_what_changes_a_result_changes_the_fingerprint_and_start_weights_do_not() -> None:
    unit, options = dpps.Record(epsilon=3), {"seed": 1}
    one = describe(_algorithm(), dpps.Ring(3), unit, options)
    assert one.fingerprint == describe(_algorithm(seed=1), dpps.Ring(3), unit, options).fingerprint
    others = [
        describe(_algorithm(width=4), dpps.Ring(3), unit, options),
        describe(_algorithm(), dpps.Ring(4), unit, options),
        describe(_algorithm(), dpps.Ring(3), replace(unit, clip=2.0), options),
        describe(_algorithm(), dpps.Ring(3), None, options),
        describe(_algorithm(), dpps.Ring(3), unit, {"seed": 2}),
    ]
    assert len({one.fingerprint, *(other.fingerprint for other in others)}) == 6
    assert one.config["algorithm"] == "partpsp"
    assert one.config["batch-size"] == 5


def test_checksums_of_shape_and_start() -> None:
    first, second = model_facts(_algorithm().model), model_facts(_algorithm(seed=1).model)
    assert first["model"] == second["model"]
    assert first["start weights"] != second["start weights"]
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


class Weighted:
    """A loss of a user's own, without a name for the object."""

    def __call__(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


class Own(dpps.Topology):
    """A topology of a user's own, without a name for the object."""

    def build(self, t: int) -> dpps.topology.Weights:
        return dpps.Ring(self.nodes).weights(0)


@pytest.mark.parametrize(
    "loss",
    [
        Weighted,
        lambda: dpps.ModelLoss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])),
        lambda: partial(Weighted()),
    ],
)
def test_where_objects_lie_in_memory_tells_no_two_runs_apart(loss) -> None:
    """Another process has them elsewhere: a run must be found again there, and must fit the others of torchrun."""
    losses, graphs = [loss(), loss()], [Own(3, 1), Own(3, 1)]
    assert str(losses[0]) != str(losses[1])
    assert str(graphs[0]) != str(graphs[1])
    made = [replace(_algorithm(), loss=each) for each in losses]
    one, other = (describe(a, g, dpps.Record(epsilon=3), {}) for a, g in zip(made, graphs, strict=True))
    assert (one.config, one.fingerprint) == (other.config, other.fingerprint)


def test_two_matrices_are_two_networks() -> None:
    even, other = np.full((3, 3), 1 / 3), np.full((3, 3), 0.25) + 0.25 * np.eye(3)
    one, two = (describe(_algorithm(), dpps.Static(matrix), None, {}) for matrix in (even, other))
    assert one.config == two.config
    assert one.fingerprint != two.fingerprint
