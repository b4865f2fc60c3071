"""What a promise rests on cannot be changed while a run goes on."""

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.privacy import Ledger

CHANGES = {
    "lr_shared": lambda nodes: setattr(nodes.algorithm, "lr_shared", 60.0),
    "batch_size": lambda nodes: setattr(nodes.algorithm, "batch_size", 1),
    "loss": lambda nodes: setattr(nodes, "loss", None),
    "plan": lambda nodes: setattr(nodes, "plan", None),
    "calibration": lambda nodes: setattr(nodes, "calibration", None),
    "clip": lambda nodes: setattr(nodes.updates.per_example, "clip", 100.0),
    "updates' plan": lambda nodes: setattr(nodes.updates, "plan", None),
    "updates' noise": lambda nodes: setattr(nodes.updates, "noise", None),
    "updates' clip": lambda nodes: setattr(nodes.updates, "per_example", None),
    "sampler": lambda nodes: setattr(nodes.updates, "sampler", None),
    "sampler's rates": lambda nodes: setattr(nodes.updates.sampler, "rates", (1.0, 1.0)),
    "mechanism": lambda nodes: setattr(nodes.protocol, "mechanism", dpps.NoNoise()),
    "noise": lambda nodes: setattr(nodes.protocol, "noise", dpps.Seeded(0)),
    "sensitivity": lambda nodes: setattr(nodes.protocol, "sensitivity", dpps.Bounded(clip=1e-9)),
    "removed": lambda nodes: delattr(nodes.protocol, "mechanism"),
    "ledger": lambda nodes: setattr(nodes.protocol, "ledger", Ledger(range(2))),
    "charged rates": lambda nodes: setattr(nodes.protocol, "_rows_by_rate", [(1e-9, "all")]),
    "watch": lambda nodes: setattr(nodes.protocol, "watch", {"real": dpps.Oracle()}),
    "noise_multiplier": lambda nodes: setattr(nodes.calibration.mechanism, "noise_multiplier", 1e-9),
    "sampling": lambda nodes: setattr(nodes.plan, "sampling", (1.0, 1.0)),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_callback_cannot_change_what_was_promised(what):
    data = [TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))] * 2
    run = dpps.Run(
        dpps.PartPSP(nn.Linear(4, 2), "all", batch_size=10),
        data,
        topology=dpps.Ring(2),
        privacy=dpps.Record(epsilon=3.0),
        seed=0,
        callbacks=[lambda run, _: CHANGES[what](run.nodes)],
    )
    with pytest.raises((UsageError, AttributeError), match=r"fixed|cannot assign"):
        run.fit(epochs=1)


def test_nor_a_sensitivity_be_watched_that_would_send_norms():
    protocol = dpps.DPPS(dpps.Ring(3), watch={"real": dpps.Oracle()})
    with pytest.raises(TypeError, match="assignment"):
        protocol.watch["paper"] = dpps.Paper(0.8, 0.6)
