"""What a run hands out stays as it is while the run goes on."""

import pytest
import torch

import dpps
from dpps.runs import RoundLog
from tests.support.learning import batch_norm_model, tiny, toy_data


@pytest.mark.parametrize("model", [tiny, batch_norm_model])
@pytest.mark.parametrize("local_steps", [1, 2])
@pytest.mark.parametrize("algorithm", [dpps.PartPSP, dpps.SGP])
def test_parameters_that_a_callback_keeps_are_those_of_its_round(model, local_steps, algorithm):
    kept, copied = [], []

    def keep(run: dpps.Run, _: RoundLog) -> None:
        kept.append((run.local, run.shared))
        copied.append((run.local.clone(), run.shared.clone()))

    shared = [name for name, _ in model().named_parameters()][:2] if algorithm is dpps.PartPSP else "all"
    made = algorithm(model(), shared, batch_size=10, local_steps=local_steps)
    dpps.Run(made, toy_data(3), topology="ring", seed=0, callbacks=[keep]).fit(2)
    assert len(kept) == (8 if local_steps == 1 else 4)
    for mine, theirs in zip(kept, copied, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_is_handed_out_does_not_change_the_run():
    def fit(spoil: bool) -> torch.Tensor:
        def callback(run: dpps.Run, _: RoundLog) -> None:
            if spoil:
                run.local.zero_()
                run.shared.zero_()

        made = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
        return dpps.Run(made, toy_data(3), topology="ring", seed=0, callbacks=[callback]).fit(1).shared

    assert torch.equal(fit(spoil=True), fit(spoil=False))
