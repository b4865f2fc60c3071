"""The share of clipped examples: counted right, logged, and worth a word near 0 and 1."""

import pytest
import torch

import dpps
from dpps.learning import ClipCount, advice, hopeless


def test_shares_of_batches_of_different_sizes_are_added_up_by_examples():
    count = ClipCount()
    count.add(torch.tensor([2 / 3, 0.0]), torch.tensor([3, 0]))
    count.add(torch.tensor([0.0, 1.0]), torch.tensor([1, 5]))
    assert count.take() == (7, 9)
    assert count.take() == (0, 0)


@pytest.mark.parametrize(
    ("clipped", "words"), [(0, "smaller clip"), (5, None), (95, None), (100, "larger clip")]
)
def test_advice_near_0_and_1(clipped, words):
    told = advice(3.0, clipped, 100)
    assert (told is None) if words is None else all(part in told for part in (words, f"{clipped} %", " 3:"))
    assert told is None or "own eyes" in told, "it is no released number"
    assert advice(3.0, 0, 0) is None


@pytest.mark.parametrize(
    "model",
    [
        dpps.models.MLP((6, 4, 3)),
        torch.nn.Sequential(torch.nn.Conv1d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(8, 3)),
    ],
)
@pytest.mark.parametrize(("clip", "share", "words"), [(1e9, 0.0, "smaller clip"), (1e-9, 1.0, "larger clip")])
def test_a_run_logs_the_share_and_warns(caplog, model, clip, share, words):
    shape = (60, 6) if isinstance(model, dpps.models.MLP) else (60, 1, 6)
    data = [(torch.randn(shape), torch.randint(0, 3, (60,))) for _ in range(3)]
    algorithm = dpps.PartPSP(model, "all", lr_shared=1e-6, batch_size=20)
    unit = dpps.Record(noise_multiplier=1.0, clip=clip)
    run = dpps.Run(algorithm, data, topology="ring", privacy=unit, seed=0).fit(epochs=1)
    assert run.clipped == share
    assert {log.clipped for log in run.log} == {share}
    assert sum(words in message for message in caplog.messages) == 1


def test_without_per_example_clipping_there_is_no_share():
    data = [(torch.randn(60, 6), torch.randint(0, 3, (60,))) for _ in range(3)]
    algorithm = dpps.PartPSP(dpps.models.MLP((6, 4, 3)), "all", batch_size=20)
    assert dpps.Run(algorithm, data, topology="ring").fit(epochs=1).clipped is None


def test_a_run_whose_noise_prevails_even_over_all_rounds_is_told_to_be_hopeless(caplog):
    assert hopeless(0.01, 10, 10) is None  # a tenth: runs like that have learned
    assert "0.04" in hopeless(0.004, 10, 10)
    assert "own eyes" in hopeless(0.004, 10, 10)

    def told(noise):
        caplog.clear()
        model = torch.nn.Linear(5, 3)
        data = [
            torch.utils.data.TensorDataset(torch.randn(20, 5), torch.randint(0, 3, (20,))) for _ in range(3)
        ]
        algorithm = dpps.PartPSP(model, "all", batch_size=20, lr_shared=0.1)
        unit = dpps.Record(noise_multiplier=noise)
        run = dpps.Run(algorithm, data, topology=dpps.Ring(3), privacy=unit, seed=0).fit(1)
        return run, [r.message for r in caplog.records if "hardly learn" in r.message]

    torch.manual_seed(0)
    run, words = told(1e4)
    assert len(words) == 1
    assert run.update_to_noise == run.log[0].update_to_noise == run.summary.update_to_noise < 0.01
    run, words = told(0.01)
    assert not words
    # every example is in the batch: the update is the mean gradient, clipped, and the noise has 18 coordinates
    assert run.update_to_noise == pytest.approx(
        float(run.algorithm.partition.initial()[0].sub(run.shared).norm()) / (0.1 * 0.01 / 20 * 18**0.5),
        rel=0.5,
    )
