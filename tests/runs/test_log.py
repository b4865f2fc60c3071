"""A line of rounds.csv, and the same in a checkpoint."""

import math
from dataclasses import replace

import pytest
import torch

import dpps
from dpps.protocol import RoundRecord
from dpps.runs import COLUMNS, RoundLog, bytes_sent
from tests.support.learning import tiny, toy_data

NOT_KEPT = {"accuracy": None, "clipped": None, "update_to_noise": None}
"""What a checkpoint leaves out."""


def test_a_log_survives_a_checkpoint() -> None:
    record = RoundRecord(3, 3, 1.0, 1.5, 0.0, math.inf, False, 0.1, {"paper": 2.0, "real": 0.5})
    log = RoundLog.of(3, record, torch.tensor([1.0, 2.0]), dpps.DPPS(dpps.Ring(3)), torch.zeros(3, 4))
    assert (log.loss, log.real, log.watched) == (1.5, 0.5, {"paper": 2.0})
    assert RoundLog.from_json(log.to_json()) == log


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
    assert row == {
        "round": 0,
        "real": "",
        "estimated": "",
        "used": "",
        "scale": 0.0,
        "epsilon": 0.0,
        "loss": 4.0,
    }


def test_a_round_without_a_pure_epsilon_has_none() -> None:
    """The default unit's Gaussian rounds have no epsilon of their own: nothing is written, and no infinity."""
    unit = dpps.Record(noise_multiplier=1.0)
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    run = dpps.Run(algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0).fit(epochs=1)
    assert [log.epsilon for log in run.log] == [None] * len(run.log)
    assert {dict(zip(COLUMNS, log.row(), strict=True))["epsilon"] for log in run.log} == {""}
    assert all(RoundLog.from_json(log.to_json()) == replace(log, **NOT_KEPT) for log in run.log)


def test_a_laplace_round_has_its_own() -> None:
    unit = dpps.Contribution(clip=1.0, round_epsilon=0.5, delta=0)
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    run = dpps.Run(algorithm, toy_data(3), topology=dpps.Ring(3), privacy=unit, seed=0).fit(epochs=1)
    assert [log.epsilon for log in run.log] == pytest.approx([0.5] * len(run.log))
