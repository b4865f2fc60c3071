"""The common summary of a distributed run has nothing that only one process may know."""

from types import SimpleNamespace
from typing import Any

import torch

import dpps
from dpps.runs import TorchDistributed
from tests.support.learning import tiny, toy_data


class AllAlone:
    """One process that is the whole cluster."""

    sent_bytes = 0
    rows = range(3)
    control = SimpleNamespace(everybody=lambda value: [value])

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_how_many_examples_were_held_out_stays_with_the_process_that_held_them_out() -> None:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    options: dict[str, Any] = {"topology": dpps.Ring(3), "privacy": dpps.Record(noise_multiplier=1.0)}
    run = dpps.Run(algorithm, toy_data(3), held_out=toy_data(3), seed=0, **options).fit(epochs=1)
    own = run.summary
    assert own.held_out_examples
    cluster: Any = SimpleNamespace(rank=0, rendezvous=SimpleNamespace(size=1))
    where = TorchDistributed(cluster)
    where._fabric = AllAlone()  # type: ignore[assignment]
    common = where.summary(own, run)
    assert common is not None
    assert "held_out_examples" not in common.to_json()
    assert common.privacy.epsilon == own.privacy.epsilon
