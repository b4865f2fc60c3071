"""Which engine a model gets."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning import Chained, Loop, Partition, Vectorised, choose_engine, refuse_writing


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (nn.Sequential(nn.Linear(6, 3)), Chained),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), Loop),
        (nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 3)), Loop),
        (nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 1, 3), nn.Flatten(), nn.Linear(4, 3)), Loop),
    ],
)
def test_the_engine_is_chosen_by_the_model(model, kind):
    engine = choose_engine(
        Partition(model, ["0"] if isinstance(model[0], nn.Linear) else ["3"]),
        F.cross_entropy,
        range(2),
        (torch.randn(2, 6), torch.zeros(2, dtype=torch.long)),
    )
    assert type(engine) is kind


@pytest.mark.parametrize(("batch", "kind"), [(4, Vectorised), (50_000, Loop)])
def test_a_batch_that_keeps_the_processor_busy_runs_node_by_node(batch, kind):
    model = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    example = torch.randn(2, 6), torch.zeros(2, dtype=torch.long)
    engine = choose_engine(Partition(model, ["0"]), F.cross_entropy, range(2), example, batch=batch)
    assert type(engine) is kind
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_that_vmap_cannot_run_falls_to_the_loop_with_a_note(caplog):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            z = self.layer(x)
            return z if z.sum() > 0 else 2 * z

    with caplog.at_level("INFO"):
        engine = choose_engine(
            Partition(Branching(), "all"),
            F.cross_entropy,
            range(2),
            (torch.randn(2, 6), torch.zeros(2, dtype=torch.long)),
        )
    assert isinstance(engine, Loop)
    assert "torch.vmap" in caplog.text


def test_the_choice_looks_at_nobodys_data(caplog):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3))
    example = torch.full((2, 3), 99), torch.zeros(2, dtype=torch.long)  # beyond the vocabulary
    assert isinstance(choose_engine(Partition(model, "all"), F.cross_entropy, range(2), example), Vectorised)


def test_a_model_that_does_not_run_on_made_up_examples_goes_node_by_node():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            assert bool((x > 1).all())
            return self.layer(x)

    example = torch.full((2, 6), 2.0), torch.zeros(2, dtype=torch.long)
    assert isinstance(choose_engine(Partition(Picky(), "all"), F.cross_entropy, range(2), example), Loop)
    refuse_writing(Partition(Picky(), "all"), F.cross_entropy, example)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "unit", [dpps.Record(noise_multiplier=1.0, delta=1e-3), dpps.Contribution(epsilon=1e4)]
)
def test_parameters_that_would_follow_the_data_without_noise_are_refused(unit, frozen):
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    model[0].weight.requires_grad_(not frozen)
    sets = [TensorDataset(torch.randint(0, 5, (8, 3)), torch.randint(0, 3, (8,))) for _ in range(2)]
    run = dpps.Run(dpps.PartPSP(model, batch_size=4), sets, topology=dpps.Ring(2), privacy=unit, seed=0)
    with pytest.raises(UsageError, match="max_norm=None"):
        run.start(epochs=1)


class MovingMean(nn.Module):
    """Keeps a mean of what it has seen in a parameter, by way of `.data`."""

    def __init__(self):
        super().__init__()
        self.center, self.layer = nn.Parameter(torch.zeros(6)), nn.Linear(6, 3)

    def forward(self, x):
        self.center.data.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x - self.center)


def test_writing_by_way_of_data_is_found_in_the_numbers():
    example = torch.full((2, 6), 2.0), torch.zeros(2, dtype=torch.long)
    with pytest.raises(UsageError, match=r"center: .*max_norm=None"):
        refuse_writing(Partition(MovingMean(), "all"), F.cross_entropy, example)
