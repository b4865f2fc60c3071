"""summary.json: what came out of a run, with nothing that JSON does not have."""

import json

import torch
from torch import nn

import dpps
from dpps.runs import Summary

DATA = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]


def test_means_and_counts_are_those_of_the_log() -> None:
    algorithm = dpps.PartPSP(nn.Linear(3, 2), ["weight"], batch_size=4)
    unit = dpps.NodeSwap(budget=1.0, sensitivity=dpps.Paper(0.78, 0.55))
    run = dpps.Run(
        algorithm, DATA, topology=dpps.Ring(3), privacy=unit, track_real=True, seed=0, test=DATA[0]
    )
    found = Summary.of(run.fit(2)).to_json()
    assert found["rounds"] == len(run.log) == 4
    assert (found["shared_parameters"], found["local_parameters"]) == (6, 2)
    assert found["real_sensitivity_max"] == max(log.real for log in run.log)
    above = sum(log.real > log.estimated for log in run.log)
    assert found["rounds_real_above_estimated"] == above
    assert found["bytes_sent_per_node"] == sum(log.bytes for log in run.log)
    assert len(found["accuracy_by_epoch"]) == 2
    json.dumps(found, allow_nan=False)
