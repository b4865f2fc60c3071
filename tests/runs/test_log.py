"""A line of rounds.csv, and the same in a checkpoint."""

import math

import torch

from dpps.protocol import RoundRecord
from dpps.runs import COLUMNS, RoundLog


def test_a_log_survives_a_checkpoint() -> None:
    record = RoundRecord(3, 1.0, 1.5, None, 0.5, math.inf, 800, False, {"paper": 2.0})
    log = RoundLog.of(3, record, torch.tensor([1.0, 2.0]))
    assert log.loss == 1.5
    assert RoundLog.from_json(log.to_json()) == log


def test_what_there_is_none_of_is_empty_and_a_round_without_messages_cost_nothing() -> None:
    row = dict(zip(COLUMNS, RoundLog.of(0, None, torch.tensor([4.0])).row(), strict=True))
    assert row == {
        "round": 0,
        "real": "",
        "estimated": "",
        "used": "",
        "scale": 0.0,
        "epsilon": 0.0,
        "loss": 4.0,
    }
