"""Settings of a DataLoader are followed, or refused by their names; half-precision features are kept as they are."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset, WeightedRandomSampler

import dpps
from dpps.data import FeatureSet
from dpps.errors import UsageError
from tests.support.learning import tiny, toy_data

EXAMPLES: TensorDataset = toy_data(1)[0]
RECORD = dpps.Record(noise_multiplier=1.0)


def _run(loader: Any, privacy: Any = None, batch_size: int | None = 10, **options: Any) -> dpps.Run:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=batch_size)
    return dpps.Run(algorithm, [loader] * 3, topology="ring", privacy=privacy, seed=0, **options)


def joined(batch: Any) -> Any:
    return torch.utils.data.default_collate(batch)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("batch_size=32", {"batch_size": 32}),
        ("batch_size=None", {"batch_size": None}),
        ("shuffle=True", {"shuffle": True}),
        ("WeightedRandomSampler", {"sampler": WeightedRandomSampler([1.0] * 40, 40)}),
        ("drop_last=True", {"drop_last": True}),
        ("collate_fn=joined", {"collate_fn": joined}),
        ("batch_sampler", {"batch_sampler": [[0, 1], [2, 3]]}),
        (
            "batch_sampler=BatchSampler",
            {"batch_sampler": BatchSampler(SequentialSampler(EXAMPLES), 4, False)},
        ),
    ],
)
def test_a_setting_that_the_run_would_not_follow_is_refused_by_name(name, settings):
    with pytest.raises(UsageError, match=name) as refused:
        _run(DataLoader(EXAMPLES, **settings))
    assert len(str(refused.value).splitlines()) == 1


def test_a_batch_size_that_the_algorithm_leaves_open_is_refused():
    with pytest.raises(UsageError, match="batch_size=32"):
        _run(DataLoader(EXAMPLES, batch_size=32), batch_size=None)


@pytest.mark.parametrize(
    ("settings", "privacy"),
    [
        ({}, None),
        ({"batch_size": 10}, None),
        ({"num_workers": 2, "pin_memory": False}, None),
        ({"batch_size": 10, "shuffle": True}, RECORD),  # which draws at random in any case
    ],
)
def test_what_the_run_does_anyway_is_accepted(settings, privacy):
    found = _run(DataLoader(EXAMPLES, **settings), privacy).fit(1)
    assert torch.equal(found.shared, _run(EXAMPLES, privacy).fit(1).shared)


def test_a_test_set_is_evaluated_whole_in_whatever_batches():
    loader = DataLoader(EXAMPLES, batch_size=32, shuffle=True)
    assert _run(EXAMPLES, test=loader).fit(1).accuracy == _run(EXAMPLES, test=EXAMPLES).fit(1).accuracy
    for name in ("drop_last", "collate_fn"):
        settings: dict[str, Any] = {"drop_last": True, "collate_fn": joined}
        with pytest.raises(UsageError, match=name):
            _run(EXAMPLES, test=DataLoader(EXAMPLES, batch_size=32, **{name: settings[name]})).start(1)


def test_labels_that_start_at_1_are_told_so():
    x, labels = EXAMPLES.tensors
    for data in ({"loader": (x, labels + 1)}, {"loader": EXAMPLES, "test": (x, labels + 1)}):
        with pytest.raises(UsageError, match=r"1 to 3.*labels - 1"):
            _run(**data).start(1)
    with pytest.raises(UsageError, match="8 classes"):
        _run((x, labels + 5)).start(1)


def test_features_stay_in_half_precision_and_train_as_the_same_numbers_do():
    """In half the memory; the model reads float32."""
    sets = [FeatureSet(*data.tensors) for data in toy_data(3)]
    rounded = [TensorDataset(each.features.float(), each.labels) for each in sets]
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    options: dict[str, Any] = {"topology": "ring", "seed": 0}
    kept = dpps.Run(algorithm, sets, test=sets[0], held_out=sets, **options).fit(2)
    plain = dpps.Run(algorithm, rounded, test=rounded[0], held_out=rounded, **options).fit(2)
    assert kept.nodes.data._tensors[0].dtype == torch.float16
    assert torch.equal(kept.shared, plain.shared)
    assert (kept.accuracy, kept.own_accuracy) == (plain.accuracy, plain.own_accuracy)


def test_a_model_in_double_precision_reads_features_as_such():
    sets = [FeatureSet(*data.tensors) for data in toy_data(3)]
    algorithm = dpps.PartPSP(tiny().double(), ["layer1"], batch_size=10)
    assert dpps.Run(algorithm, sets, topology="ring", seed=0).fit(1).shared.dtype == torch.float64
