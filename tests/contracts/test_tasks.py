"""Every registered task, and one made up here, keeps the contract of a task: a new one is tested by being registered."""

import csv
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.learning.preflight import refuse_inseparable
from dpps.models import linear
from dpps.tasks import METRICS, TASKS, Task, compare, measure, parse_target
from tests.support.tasks import INPUTS, Count, made_up

SIZES = (80, 30, 12)

pytestmark = pytest.mark.parametrize("name", [*TASKS.names(), "count"])


@pytest.fixture
def task(name: str, monkeypatch: pytest.MonkeyPatch) -> Task:
    """As its example declares it; the one made up here is registered for a test."""
    entries = {known: TASKS[known] for known in TASKS.names()}
    monkeypatch.setattr(TASKS, "_entries", entries | {"count": Count})
    return parse_target({"kind": TASKS[name].kind, **TASKS[name].example}, "schema.toml")


def trained(task: Task, nodes: list[tuple[torch.Tensor, torch.Tensor]]) -> nn.Module:
    """Without privacy, on all nodes' examples together."""
    torch.manual_seed(0)
    model = task.head(linear(INPUTS, task.outputs))
    x, targets = (torch.cat(part) for part in zip(*nodes, strict=True))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(300):
        optimizer.zero_grad()
        task.loss(model(x), targets).mean().backward()
        optimizer.step()
    return model.eval()


def test_its_declaration_is_read_as_it_is_written(task: Task) -> None:
    written = {"kind": task.kind, **task.declaration()}
    assert parse_target(written, "schema.toml") == task
    with pytest.raises(UsageError):
        parse_target({**written, "nonsense": 1}, "schema.toml")
    for key in task.declaration():
        with pytest.raises(UsageError):
            parse_target({**written, key: {}}, "schema.toml")


def test_columns_become_targets_one_example_at_a_time(task: Task) -> None:
    names = [column.name for column in task.columns]
    assert names
    assert len(set(names)) == len(names)
    ((x, targets),) = made_up(task, [30])
    assert len(targets) == len(x)
    assert bool(torch.isfinite(targets.double()).all())
    columns = [torch.arange(4).numpy() % max(2, len(column.values)) for column in task.columns]
    alone = [task.targets([column[k : k + 1] for column in columns]) for k in range(4)]
    assert torch.equal(task.targets(columns), torch.cat(alone))


def test_the_start_is_the_same_for_everybody_and_public(task: Task) -> None:
    one, other = (task.head(linear(INPUTS, task.outputs)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    outputs = one(torch.randn(6, INPUTS))
    assert torch.equal(outputs, outputs[:1].expand_as(outputs))


def test_the_loss_treats_examples_one_by_one(task: Task) -> None:
    ((x, targets),) = made_up(task, [12])
    model = task.head(linear(INPUTS, task.outputs))
    refuse_inseparable(task.loss, model, x[0], targets[0])
    with torch.no_grad():
        outputs = model(x)
    alone = [float(task.loss(outputs[k : k + 1], targets[k : k + 1]).mean()) for k in range(12)]
    assert float(task.loss(outputs, targets).mean()) == pytest.approx(sum(alone) / 12, rel=1e-4)


def test_no_other_constant_has_a_smaller_loss(task: Task) -> None:
    ((_, targets),) = made_up(task, [4000])
    best = task.constant(targets)

    def loss(outputs: torch.Tensor) -> float:
        return float(task.loss(outputs.expand(len(targets), -1), targets).mean())

    for k in range(len(best)):
        for step in (-0.2, 0.2):
            assert loss(best) < loss(best + step * torch.eye(len(best))[k])


def test_metrics_have_standard_errors_and_a_trained_model_beats_the_constant(task: Task) -> None:
    train, test = made_up(task, SIZES), made_up(task, SIZES, seed=1)
    model = trained(task, train)
    with torch.no_grad():
        learned = [(model(x), targets) for x, targets in test]
    same = task.constant(torch.cat([targets for _, targets in train]))
    constant = [(same.expand(len(targets), -1), targets) for _, targets in test]
    assert task.headline is task.metric(task.metrics[0])
    for name in task.metrics:
        metric = task.metric(name)
        found = measure(task, metric, learned)
        assert found.pooled.examples == sum(SIZES)
        assert [each and each.examples for each in found.by_node] == list(SIZES)
        known = [each.value for each in found.by_node if each is not None]
        assert found.mean.value == pytest.approx(sum(known) / len(known))
        if name != "calibration":
            assert found.pooled.margin is not None
            assert 0 < found.pooled.margin < math.inf
    joined = compare(task, task.headline, constant, learned)
    assert joined.pooled.shown
    assert (joined.pooled.value > 0) == task.headline.higher
    assert joined.pooled.value == pytest.approx(
        measure(task, task.headline, learned).pooled.value
        - measure(task, task.headline, constant).pooled.value
    )
    nothing = compare(task, task.headline, learned, learned).pooled
    assert nothing.value == 0
    assert not nothing.shown


def test_metrics_of_other_tasks_are_refused(task: Task) -> None:
    for name in METRICS.names():
        if METRICS[name].about == task.about or name in task.metrics:
            assert task.metric(name).name == name
        else:
            with pytest.raises(UsageError):
                task.metric(name)


def test_predictions_are_columns_of_a_file(task: Task, tmp_path) -> None:
    ((x, _),) = made_up(task, [7])
    columns = task.predictions(task.head(linear(INPUTS, task.outputs))(x).detach())
    assert {len(values) for values in columns.values()} == {7}
    with open(tmp_path / "predictions.csv", "w", newline="") as file:
        csv.writer(file).writerows([list(columns), *zip(*columns.values(), strict=True)])
    for values in columns.values():
        assert all(isinstance(value, str) or math.isfinite(value) for value in values)


def test_it_is_learned_privately(task: Task) -> None:
    nodes = made_up(task, (60, 60, 60, 60))
    model = task.head(linear(INPUTS, task.outputs))
    algorithm = dpps.PartPSP(model, "all", lr_shared=0.5, batch_size=30, loss=task.loss)
    unit = dpps.Record(noise_multiplier=0.01, clip=1.0)
    run = dpps.Run(algorithm, [TensorDataset(*node) for node in nodes], topology="exp", privacy=unit, seed=0)
    run.fit(15)
    ((x, targets),) = made_up(task, [300], seed=2)
    with torch.no_grad():
        learned, start = run.models()[0](x), task.head(linear(INPUTS, task.outputs))(x)
    assert float(task.loss(learned, targets).mean()) < float(task.loss(start, targets).mean())
    assert not run.nodes.clipping or run.clipped is not None
    assert replace(algorithm, batch_size=10).loss == algorithm.loss
