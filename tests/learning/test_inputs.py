"""What users hand over: what can be understood works, and what cannot is told in one line with value and remedy."""

import logging
from collections import OrderedDict
from typing import Any

import networkx
import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import dpps
from dpps.data import FeatureSet
from dpps.errors import RunError, UsageError
from dpps.learning import ModelLoss, as_unit, check_examples
from tests.support.learning import make_run, tiny, toy_data

NODES = 3


def examples(n=30, features=6, classes=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=g)
    labels[:classes] = torch.arange(classes)
    return torch.randn(n, features, generator=g), labels


def model():
    torch.manual_seed(0)
    return dpps.models.MLP((6, 4, 3))


def fit(data, *, privacy=None, test=None, held_out=(), **options):
    rates = {name: options.pop(name) for name in ("lr_shared", "lr_local", "loss") if name in options}
    algorithm = dpps.PartPSP(options.pop("model", model()), ["layer1"], batch_size=10, **rates)
    options = {"topology": "ring", "seed": 0} | options
    return dpps.Run(algorithm, data, privacy=privacy, test=test, held_out=held_out, **options).fit(epochs=1)


# What just works


FORMS = {
    "pair": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "float64": lambda x, y: (x.double(), y),
    "float labels": lambda x, y: (x, y.float()),
    "int32 labels": lambda x, y: (x, y.int()),
    "DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=10),
    "list of examples": lambda x, y: list(zip(x, y, strict=True)),
    "frame and series": lambda x, y: (pandas.DataFrame(x.numpy()), pandas.Series(y.numpy())),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_the_same_examples_trains_to_the_same_model(form):
    sets = [examples(seed=k) for k in range(NODES)]
    expected = fit([TensorDataset(*each) for each in sets], test=sets[0], held_out=sets)
    found = fit([form(*each) for each in sets], test=form(*sets[0]), held_out=[form(*each) for each in sets])
    torch.testing.assert_close(found.shared, expected.shared)
    assert found.accuracy == expected.accuracy
    assert found.own_accuracy_by_node == expected.own_accuracy_by_node


@pytest.mark.parametrize(("name", "topology"), [("exp", dpps.Exponential(3)), ("2-out", dpps.DOut(3, 2))])
def test_topologies_by_name(name, topology):
    data = [examples(seed=k) for k in range(NODES)]
    by_name, by_object = (fit(data, topology=t) for t in (name, topology))
    assert torch.equal(by_name.shared, by_object.shared)
    assert repr(by_name.topology) == repr(topology)


def test_declared_sizes_go_with_a_topology_by_name():
    run = fit([examples(seed=k) for k in range(NODES)], topology="exp", declared_sizes=20)
    assert tuple(run.plan.declared_sizes) == (20, 20, 20)


@pytest.mark.parametrize("name", ["record", "contribution", "node-swap", "none"])
def test_units_by_name_with_the_defaults_of_the_command_line(name):
    from dpps.runs import Options

    assert as_unit(name) == Options(unit=name).resolve().privacy() or name == "node-swap"
    run = fit([examples(seed=k) for k in range(NODES)], privacy=name)
    assert run.privacy.unit == name


def test_node_swap_by_name_is_that_of_the_command_line_but_for_the_bounds_delta():
    assert as_unit("node-swap").budget == 5.0
    assert dpps.Contribution(epsilon=8).clip == 30.0
    assert dpps.Contribution(epsilon=8, mechanism="gaussian").clip == 1.0


def test_precision_follows_the_model():
    data = [examples(seed=k) for k in range(NODES)]
    assert fit(data, model=model().double()).state.local.dtype == torch.float64


def test_regression_with_its_own_loss_takes_float_targets():
    data = [(torch.randn(30, 6), torch.randn(30, 3)) for _ in range(NODES)]
    assert np.isfinite(fit(data, loss=F.mse_loss).log[-1].loss)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(6, 3)

    def forward(self, values, mask):
        return self.layer1(values * mask)


def test_inputs_that_are_dictionaries_or_tuples_and_losses_that_call_the_model_are_tried():
    named = [({"values": x, "mask": torch.ones(6)}, y) for x, y in zip(*examples(), strict=True)]
    placed = [((inputs["values"], inputs["mask"]), y) for inputs, y in named]
    for data in (named, placed):
        check_examples([data], ["node 0"], TwoInputs(), F.cross_entropy)
        with pytest.raises(UsageError, match=r"node 0: .*\(6,\).*float32.*\(6,\)"):
            check_examples([data], ["node 0"], model(), F.cross_entropy)
    own = ModelLoss(lambda net, batch: F.cross_entropy(net(*batch[0]), batch[1]))
    check_examples([placed], ["node 0"], TwoInputs(), own)


@pytest.mark.parametrize("label", ["label", "labels"])
def test_dictionaries_with_their_label_inside_are_examples_like_others(label):
    sets = [examples(seed=k) for k in range(NODES)]
    torch.manual_seed(0)
    net = TwoInputs()
    named = [
        [{"values": x, "mask": [1.0] * 6, label: y} for x, y in zip(*each, strict=True)] for each in sets
    ]
    pairs = [[({"values": x, "mask": torch.ones(6)}, y) for x, y in zip(*each, strict=True)] for each in sets]
    found, expected = (
        make_run(shared="all", model=net, data=data, test=data[0]).fit(1) for data in (named, pairs)
    )
    torch.testing.assert_close(found.shared, expected.shared)
    assert found.accuracy == expected.accuracy


# What is told


class Stream(IterableDataset):
    def __iter__(self):
        return iter([examples()])


def three(x, y):
    return [(x, y)] * NODES


X, Y = examples()
WRONG = {
    "topology": (lambda: fit(three(X, Y), topology="exq"), "topology 'exq'.*'exp'"),
    "privacy": (lambda: fit(three(X, Y), privacy="recrod"), "unit 'recrod'.*'record'"),
    "privacy class": (
        lambda: fit(three(X, Y), privacy=dpps.Record),
        r"dpps\.Record\(epsilon=3\)",
    ),
    "one pair": (lambda: fit((X, Y)), r"\(inputs, targets\).*dpps.data.split"),
    "one loader": (lambda: fit(DataLoader(TensorDataset(X, Y))), "DataLoader"),
    "no data": (lambda: fit(7), "data.*7"),
    "stream": (lambda: fit([Stream()] * NODES), "node 0 .*Stream.*map-style"),
    "lengths": (lambda: fit(three(X, Y[:-1])), r"\(30, 6\).*\(29,\)"),
    "labels above": (
        lambda: fit(three(X, Y + 5)),
        "node 0: .*5 to 7.*3 outputs.*8 classes",
    ),
    "labels below": (
        lambda: fit(three(X, Y - 1)),
        "node 0: .*-1 to 1.* 0, 1",
    ),
    "labels of one node": (lambda: fit([(X, Y), (X, Y), (X, Y + 1)]), "node 2: .*1 to 3"),
    "fractions": (lambda: fit(three(X, Y + 0.5)), "labels.*node 0.*mse_loss"),
    "features": (
        lambda: fit(three(X[:, :5], Y)),
        r"node 0: .*\(5,\)",
    ),
    "features of one node": (
        lambda: fit([(X, Y), (X[:, :5], Y), (X, Y)]),
        r"data set 1 .*\(5,\).*data set 0 .*\(6,\)",
    ),
    "a graph": (
        lambda: fit(three(X, Y), topology=networkx.cycle_graph(3)),
        r"topology.*Graph.*3 nodes.*dpps\.from_networkx\(graph\)",
    ),
    "bytes": (lambda: fit(three(X.byte(), Y)), "type uint8"),
    "test labels": (lambda: fit(three(X, Y), test=(X, Y + 5)), "test set: .*5 to 7"),
    "test features": (lambda: fit(three(X, Y), test=(X[:, :5], Y)), r"test set: .*\(5,\)"),
    "held-out": (lambda: fit(three(X, Y), held_out=[(X, Y)]), "held_out.*1.*3 nodes"),
    "one held-out pair": (
        lambda: fit(three(X, Y), held_out=(X, Y)),
        r"held-out set 0 .*Tensor.*\(inputs, targets\)",
    ),
    "a dictionary without label": (
        lambda: fit([[{"x": X[0], "y": 1}]] * NODES),
        "'x', 'y'.*'labels'.*'label'",
    ),
    "a text": (lambda: fit([[{"text": "ill", "label": 1}]] * NODES), "'text'.*tokenizer"),
    "one dictionary": (lambda: fit([{"x": X, "label": Y}] * NODES), "node 0 .*dict.*map-style"),
    "three tensors": (lambda: fit([TensorDataset(X, X, Y)] * NODES), "TensorDataset.*3"),
    "texts in an array": (
        lambda: fit([(np.array([["a"]] * 30), Y.numpy())] * NODES),
        "<U1.*table_dataset",
    ),
    "broadcast": (
        lambda: fit(
            three(X, Y.float()), model=nn.Sequential(OrderedDict(layer1=nn.Linear(6, 1))), loss=F.mse_loss
        ),
        r"targets.view\(-1, 1\)",
    ),
    "no gradient": (
        lambda: fit(three(X, Y), loss=lambda outputs, targets: outputs.detach().mean()),
        "loss.*gradient",
    ),
    "epsilon": (lambda: dpps.Record(epsilon="3"), "epsilon.*'3'"),
    "delta": (lambda: dpps.Record(epsilon=3, delta="1e-5"), "delta.*'1e-5'"),
    "metric": (lambda: fit(three(X, Y), metrics=[3]), "metric.*3"),
    "metric's arguments": (
        lambda: fit(three(X, Y), test=(X, Y), metrics=[lambda outputs: 1.0]),
        r"metric <lambda>: .*\(outputs, targets\)",
    ),
    "metric's value": (
        lambda: fit(three(X, Y), held_out=three(X, Y), metrics=[lambda outputs, targets: outputs]),
        "metric <lambda>.*Tensor",
    ),
    "metric of numbers": (
        lambda: fit(three(X, Y), test=(X, Y), metrics=["rmse"]),
        "'rmse'",
    ),
    "seed": (lambda: fit(three(X, Y), seed=-1), "seed.*-1"),
    "whole numbers": (
        lambda: fit(three(X.long(), Y)),
        r"int64.*inputs.float\(\)",
    ),
    "target": (lambda: fit(three(X, Y.float()), loss=F.nll_loss), "loss.*float32"),
    "labels in a column": (
        lambda: fit(three(X, Y[:, None])),
        r"loss.*targets.squeeze\(1\)",
    ),
    "disconnected": (
        lambda: fit([(X, Y)] * 4, topology=dpps.Static(np.kron(np.eye(2), np.full((2, 2), 0.5)))),
        "Static.*nodes 0 and 2",
    ),
    "a disconnected graph": (
        lambda: fit([(X, Y)] * 4, topology=dpps.from_networkx(networkx.Graph([(0, 1), (2, 3)]))),
        r" 2 .*nodes 0 and 2",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_with_its_remedy(case):
    call, message = WRONG[case]
    with pytest.raises(UsageError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match=r"device.*'cuda'.*cpu"):
        fit(three(X, Y), device="cuda")
    with pytest.raises(UsageError, match=r"device.*'gpu'"):
        fit(three(X, Y), device="gpu")


def test_nan_in_the_inputs_is_named_and_not_blamed_on_the_rates():
    broken = X.clone()
    broken[17] = float("nan")
    with pytest.raises(RunError, match=r"example 17 of node 2.*NaN"):
        fit([(X, Y), (X, Y), (broken, Y)])


def test_nan_is_told_where_an_example_counts_as_zero(caplog):
    """Where nobody knows the noise nothing stops because of it, so that nobody would notice."""
    broken = X.clone()
    broken[17] = float("inf")
    with caplog.at_level(logging.WARNING):
        fit([(X, Y), (X, Y), (broken, Y)], privacy=dpps.Record(noise_multiplier=1.0), secure_noise=True)
    assert len([m for m in caplog.messages if "example 17 of node 2 " in m]) == 1


def test_unscaled_inputs_are_told_once(caplog):
    numbered = X.clone()
    numbered[:, 2] = torch.arange(100_000, 100_030)
    with caplog.at_level(logging.WARNING):
        fit([(X, Y), (numbered, Y), (X, Y)], lr_shared=1e-9, lr_local=1e-9)
    assert [m for m in caplog.messages if "1e+05 (node 1, column 2 " in m]
    caplog.clear()
    fit(three(X, Y))
    assert not caplog.messages


def test_trying_an_example_changes_nothing():
    """Neither the mode of the model, nor its buffers, nor torch's random numbers."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)

        def forward(self, x):
            torch.rand(1)
            return self.norm(self.layer(x))

    noisy = Noisy().train()
    noisy.norm.eval()
    torch.manual_seed(0)
    before = torch.get_rng_state(), noisy.norm.running_mean.clone()
    check_examples([TensorDataset(X, Y)], ["node 0"], noisy, F.cross_entropy)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(noisy.norm.running_mean, before[1])
    assert (noisy.training, noisy.layer.training, noisy.norm.training) == (True, True, False)


# Settings of a DataLoader, and features in half precision

EXAMPLES: TensorDataset = toy_data(1)[0]
RECORD = dpps.Record(noise_multiplier=1.0)


def _run(loader: Any, privacy: Any = None, batch_size: int | None = 10, **options: Any) -> dpps.Run:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=batch_size)
    return dpps.Run(algorithm, [loader] * 3, topology="ring", privacy=privacy, seed=0, **options)


def joined(batch: Any) -> Any:
    return torch.utils.data.default_collate(batch)


def prepare(worker: int) -> None:
    raise AssertionError("a run has no workers")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("batch_size=32", {"batch_size": 32}),
        ("batch_size=None", {"batch_size": None}),
        ("shuffle=True", {"shuffle": True}),
        ("WeightedRandomSampler", {"sampler": WeightedRandomSampler([1.0] * 40, 40)}),
        ("drop_last=True", {"drop_last": True}),
        ("collate_fn=joined", {"collate_fn": joined}),
        ("worker_init_fn=prepare", {"num_workers": 2, "worker_init_fn": prepare}),
        ("generator=", {"generator": torch.Generator()}),
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


FAST = {"num_workers": 2, "pin_memory": True, "prefetch_factor": 4, "timeout": 9, "persistent_workers": True}


def test_settings_about_speed_are_named_in_one_warning(caplog):
    loader, plain = DataLoader(EXAMPLES, **FAST), DataLoader(EXAMPLES)
    found = _run(loader).fit(1)  # three nodes with the same settings
    (record,) = caplog.records
    line = record.getMessage()
    assert all(f"{name}={value}" in line for name, value in FAST.items())
    assert "in_order" not in line
    assert torch.equal(found.shared, _run(plain).fit(1).shared)
    caplog.clear()
    _run(plain, test=DataLoader(EXAMPLES, batch_size=7, num_workers=2)).start(1)
    (record,) = caplog.records
    assert "num_workers=2" in record.getMessage()
    assert "test" in record.getMessage()
    assert "prefetch_factor" not in record.getMessage()


def test_a_test_set_is_evaluated_whole_in_whatever_batches():
    loader = DataLoader(EXAMPLES, batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(3))
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
