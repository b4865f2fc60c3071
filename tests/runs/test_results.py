"""What comes out of a run: results, summary, log."""

import csv
import json
import math
import stat
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import UsageError
from dpps.protocol import RoundRecord
from dpps.runs import COLUMNS, RoundLog, Summary, TensorBoard, TorchDistributed, bytes_sent
from tests.support import runs
from tests.support.learning import batch_norm_model, tiny, toy_data

# What comes out of a run: metrics of every epoch, a row for every class, targets that are no classes


def examples(count, seed, classes=3):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=random)
    return x, x[:, :classes].argmax(1)


def make(folder=None, **more):
    torch.manual_seed(0)
    algorithm = dpps.PartPSP(nn.Linear(4, 3), shared="all", lr_shared=0.5, batch_size=20)
    options = {
        "topology": "ring",
        "test": examples(90, 9),
        "metrics": ["auroc", "f1"],
        "seed": 0,
        "folder": folder,
    }
    return algorithm, [examples(60, k) for k in range(3)], options | more


def start(folder=None, **more):
    algorithm, data, options = make(folder, **more)
    return dpps.Run(algorithm, data, **options)


def test_metrics_are_taken_after_every_epoch():
    run = start(held_out=[examples(20, 20 + k) for k in range(3)]).fit(epochs=3)
    assert len(run.metrics_by_epoch) == 3
    assert run.metrics_by_epoch[-1] == run.metrics_by_node == run.summary.metrics_by_node
    assert set(run.metrics_by_node) == {"test", "own"}
    first, last = (run.metrics_by_epoch[k]["test"]["auroc"] for k in (0, -1))
    assert sum(last) > sum(first)


def test_a_row_for_every_class_counts_all_nodes():
    run = start().fit(epochs=2)
    rows = run.by_class["test"]
    assert [row["class"] for row in rows] == ["0", "1", "2"]
    assert sum(row["examples"] for row in rows) == 3 * 90
    right = sum(row["recall"] * row["examples"] for row in rows)
    assert 100 * right / (3 * 90) == pytest.approx(run.accuracy)
    assert start(metrics=()).fit(epochs=1).by_class == {}


def test_metrics_survive_a_stop(tmp_path):
    whole = start(tmp_path / "whole").fit(epochs=3)
    stopped = start(tmp_path / "stopped", callbacks=[lambda run, log: run.stop() if log.round == 3 else None])
    stopped.fit(epochs=3)
    assert stopped.stopped
    algorithm, data, options = make()
    options.pop("folder")
    again = dpps.Run.open(tmp_path / "stopped", algorithm, data, **options).fit(epochs=3)
    assert again.metrics_by_epoch == whole.metrics_by_epoch


def test_targets_that_are_numbers_have_metrics_and_no_accuracy():
    torch.manual_seed(0)

    def numbers(count, seed):
        x, _ = examples(count, seed)
        return x, x.sum(1, keepdim=True)

    algorithm = dpps.PartPSP(nn.Linear(4, 1), shared="all", loss=F.mse_loss, lr_shared=0.1, batch_size=20)
    options = {"topology": "ring", "privacy": dpps.Record(epsilon=8, delta=1e-3), "seed": 0}
    options |= {
        "test": numbers(50, 9),
        "held_out": [numbers(10, 20 + k) for k in range(3)],
        "metrics": ["rmse"],
    }
    run = dpps.Run(algorithm, [numbers(60, k) for k in range(3)], **options).fit(epochs=4)
    assert run.accuracy is run.own_accuracy is None
    assert run.accuracy_by_epoch == []
    assert run.by_class == {}
    found = [epoch["test"]["rmse"][0] for epoch in run.metrics_by_epoch]
    assert found[-1] < found[0]
    with pytest.raises(UsageError, match="metrics="):
        run.evaluate()


def test_the_report_shows_metrics_and_classes(tmp_path):
    page = start().fit(epochs=3).report(tmp_path / "page.html").read_text()
    assert "auroc" in page
    assert "precision" in page
    plain = start(metrics=()).fit(epochs=3).report(tmp_path / "plain.html").read_text()
    assert "Metric" not in plain


def test_a_loss_that_calls_the_model_itself():
    def loss(model, batch):
        x, target = batch
        return F.cross_entropy(model(x), target)

    found = []
    for chosen in (F.cross_entropy, dpps.ModelLoss(loss)):
        torch.manual_seed(0)
        algorithm = dpps.PartPSP(nn.Linear(4, 3), shared="all", loss=chosen, batch_size=20)
        data = [examples(60, k) for k in range(3)]
        found.append(dpps.Run(algorithm, data, topology="ring", seed=0).fit(epochs=2).shared)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "unit", [None, dpps.Record(epsilon=8), dpps.Contribution(epsilon=8), dpps.NodeSwap()]
)
def test_a_loss_that_calls_the_model_may_give_a_number_per_example(unit):
    loss = dpps.ModelLoss(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
    x = torch.linspace(-1, 1, 60).reshape(20, 3)
    nodes = [(x, (x[:, 0] > 0).long())] * 2
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    algorithm = dpps.PartPSP(model, shared=["0"], loss=loss, batch_size=10)
    run = dpps.Run(algorithm, nodes, topology=dpps.Ring(2), privacy=unit, test=nodes[0], seed=0).fit(epochs=1)
    assert run.accuracy is not None


# What a run hands out stays as it is while the run goes on


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
    runs.make(algorithm=made, callbacks=[keep]).fit(2)
    assert len(kept) == (8 if local_steps == 1 else 4)
    for mine, theirs in zip(kept, copied, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_what_is_handed_out_does_not_change_the_run():
    def fit(spoil: bool) -> torch.Tensor:
        def callback(run: dpps.Run, _: RoundLog) -> None:
            if spoil:
                run.local.zero_()
                run.shared.zero_()

        return runs.make(callbacks=[callback]).fit(1).shared

    assert torch.equal(fit(spoil=True), fit(spoil=False))


# summary.json: what came out of a run, with nothing that JSON does not have


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


# The common summary of a distributed run has nothing that only one process may know


class AllAlone:
    """One process that is the whole cluster."""

    sent_bytes = 0
    rows = range(3)

    def everybody(self, value: float) -> list[float]:
        return [value]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_how_many_examples_were_held_out_stays_with_the_process_that_held_them_out() -> None:
    run = runs.make(unit=dpps.Record(noise_multiplier=1.0), held_out=toy_data(3)).fit(epochs=1)
    own = run.summary
    assert own.held_out_examples
    cluster: Any = SimpleNamespace(rank=0, rendezvous=SimpleNamespace(size=1))
    where = TorchDistributed(cluster)
    where._fabric = AllAlone()  # type: ignore[assignment]
    common = where.summary(own, run)
    assert common is not None
    assert "held_out_examples" not in common.to_json()
    assert common.privacy.epsilon == own.privacy.epsilon


# A line of rounds.csv, and the same in a checkpoint


NOT_KEPT = {"accuracy": None, "clipped": None, "update_to_noise": None}
"""What a checkpoint leaves out."""


def test_a_log_survives_a_checkpoint() -> None:
    record = RoundRecord(3, 3, 1.0, 1.5, 0.0, math.inf, False, 0.1, {"paper": 2.0, "real": 0.5})
    log = RoundLog.of(3, record, torch.tensor([1.0, 2.0]), dpps.DPPS(dpps.Ring(3)), torch.zeros(3, 4))
    assert (log.loss, log.real, log.watched) == (1.5, 0.5, {"paper": 2.0})
    assert RoundLog.from_json(log.to_json()) == log
    spent = replace(log, epsilon_total=1.5)
    assert RoundLog.from_json(spent.to_json()) == spent
    of_0_2 = [*log.row()[:-1], log.bytes, log.watched]
    assert RoundLog.from_json(of_0_2) == log


def test_a_round_sends_a_row_to_every_peer_and_a_scalar_to_all_in_node_swap() -> None:
    row, rows = 5 * 4 + 8, torch.zeros(6, 5)
    assert bytes_sent(dpps.DPPS(dpps.DOut(6, 3)), 0, rows) == 2 * row
    assert bytes_sent(dpps.DPPS(dpps.DOut(6, 3), mixes=3), 0, rows) == 6 * row
    bounded = dpps.DPPS(dpps.DOut(6, 3), dpps.Laplace(1), dpps.Bounded(clip=0.5), sync_every=2)
    assert [bytes_sent(bounded, clock, rows) for clock in (0, 1)] == [2 * row, 2 * 5 * row // 6]
    swap = dpps.DPPS(dpps.DOut(6, 3), dpps.Laplace(1.0), dpps.Certified(), sync_every=1)
    assert bytes_sent(swap, 0, rows) == 2 * 5 * row // 6 + 8 * 5


def test_what_there_is_none_of_is_empty_and_a_round_without_messages_cost_nothing() -> None:
    log = RoundLog.of(0, None, torch.tensor([4.0]), dpps.DPPS(dpps.Ring(3)), torch.zeros(3, 0))
    row = dict(zip(COLUMNS, log.row(), strict=True))
    known = {"round": 0, "scale": 0.0, "epsilon": 0.0, "loss": 4.0}
    assert row == dict.fromkeys(COLUMNS, "") | known


def test_a_round_without_a_pure_epsilon_has_none() -> None:
    """The default unit's Gaussian rounds have no epsilon of their own: nothing is written, and no infinity."""
    run = runs.make(unit=dpps.Record(noise_multiplier=1.0)).fit(epochs=1)
    assert [log.epsilon for log in run.log] == [None] * len(run.log)
    assert {dict(zip(COLUMNS, log.row(), strict=True))["epsilon"] for log in run.log} == {""}
    assert all(RoundLog.from_json(log.to_json()) == replace(log, **NOT_KEPT) for log in run.log)


def test_a_laplace_round_has_its_own() -> None:
    run = runs.make(unit=dpps.Contribution(clip=1.0, round_epsilon=0.5, delta=0)).fit(epochs=1)
    assert [log.epsilon for log in run.log] == pytest.approx([0.5] * len(run.log))


# Rounds as TensorBoard scalars


def run(folder: Path) -> dpps.Run:
    more = {"test": toy_data(1)[0], "callbacks": [TensorBoard(folder)]}
    return runs.make(unit=dpps.Record(noise_multiplier=1.0), **more)


def test_every_round_has_its_numbers_and_every_epoch_its_accuracy(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    finished = run(tmp_path / "events").fit(epochs=2)
    (file,) = (tmp_path / "events").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    events = event_accumulator.EventAccumulator(str(file)).Reload()
    found = {name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert set(found) == {"loss", "noise/scale", "sensitivity/used", "accuracy"}
    assert found["loss"] == pytest.approx([log.loss for log in finished.log])
    assert found["accuracy"] == pytest.approx(finished.accuracy_by_epoch)


def test_nothing_is_written_before_the_first_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with run(tmp_path / "events").start(epochs=1):
        assert not (tmp_path / "events").exists()


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"--tensorboard.*dpps\[tensorboard\]"):
        TensorBoard(tmp_path)


# What all rounds so far cost, in the log


def _logged(unit, **options):
    data = [TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))) for _ in range(3)]
    algorithm = dpps.PartPSP(torch.nn.Linear(6, 3), batch_size=4, lr_shared=0.1)
    return dpps.Run(algorithm, data, topology="ring", privacy=unit, seed=0, **options).fit(epochs=5)


@pytest.mark.parametrize(
    "unit",
    [
        dpps.Record(noise_multiplier=2.0),
        dpps.Contribution(clip=1.0, round_epsilon=1.0),
        dpps.NodeSwap(budget=5.0, sensitivity=dpps.Paper(0.78, 0.55)),
    ],
)
def test_the_total_so_far_is_what_the_accountant_says(unit) -> None:
    run, every = _logged(unit), 2  # 50 rounds
    filled = [log.round for log in run.log if log.epsilon_total is not None]
    assert filled == [k for k in range(50) if (k + 1) % every == 0]
    totals = [run.log[k].epsilon_total for k in filled]
    assert totals == sorted(totals)
    assert totals[-1] == pytest.approx(run.privacy.epsilon_spent, rel=1e-6)
    kind = run.ledger.charges_by_row()[0][0]
    half = unit.total([replace(kind, count=filled[len(filled) // 2] + 1)]).epsilon
    assert totals[len(filled) // 2] == pytest.approx(half, rel=1e-4)
    assert totals[len(filled) // 2] >= half * (1 - 1e-9)


def test_without_noise_or_of_groups_there_is_no_total_so_far() -> None:
    assert {log.epsilon_total for log in _logged(None).log} == {None}
    grouped = _logged(dpps.Record(noise_multiplier=2.0, records_per_user=2))
    assert {log.epsilon_total for log in grouped.log} == {None}


def test_totals_stand_in_the_file_behind_the_columns_it_had(tmp_path) -> None:
    run = _logged(dpps.Record(noise_multiplier=2.0), secure_noise=True, folder=tmp_path / "run")
    assert run.log[-1].epsilon_total == pytest.approx(run.privacy.epsilon_spent, rel=1e-6)
    lines = list(csv.DictReader((tmp_path / "run" / "rounds.csv").read_text().splitlines()))
    assert list(lines[0])[:7] == ["round", "real", "estimated", "used", "scale", "epsilon", "loss"]
    assert float(lines[-1]["epsilon_total"]) == run.log[-1].epsilon_total
    assert lines[0]["epsilon_total"] == ""


@pytest.mark.parametrize(("progress", "shown"), [(None, False), (False, False), (True, True)])
def test_a_bar_is_shown_on_a_terminal_or_when_asked_for(progress, shown, capfd) -> None:
    runs.make().fit(epochs=1, progress=progress)
    said = capfd.readouterr()
    assert said.out == ""
    assert ("loss" in said.err) == shown
