"""What a run is given by mistake is told in one line when it is made, with the value and what is allowed."""

import logging
import re

import pytest
import torch
from torch import nn

import dpps
from dpps.errors import UsageError
from dpps.learning import WarmUp

DATA = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]


def algorithm(**options) -> dpps.PartPSP:
    return dpps.PartPSP(nn.Linear(3, 2), batch_size=4, **options)


def make(**options) -> dpps.Run:
    given = {"algorithm": algorithm(), "data": DATA, "topology": dpps.Ring(3), "seed": 0, **options}
    return dpps.Run(given.pop("algorithm"), given.pop("data"), **given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"algorithm": nn.Sequential(nn.Linear(3, 2))},
            "algorithm.*Sequential",
        ),
        ({"algorithm": dpps.PartPSP}, "algorithm.*PartPSP"),
        ({"deployment": "here"}, "deployment.*'here'.*dpps.Simulation"),
        ({"noise": 3}, "noise.*3"),
        ({"watch": 3}, "watch.*3"),
        ({"watch": {"paper": 3}}, "watch.*{'paper': 3}"),
        ({"folder": 3}, "folder.*3"),
        ({"engine": "fast"}, "engine.*'fast'.*auto, vectorised, loop"),
        ({"sync_every": 1.5}, "sync_every.*1.5.* 0 "),
        ({"mixes": 1.5}, "mixes.*1.5.* 1 "),
        ({"mixes": True}, "mixes.*True.* 1 "),
        ({"spare_rounds": -1}, "spare_rounds.*-1.* 0 "),
        ({"checkpoint_every": "5"}, "checkpoint_every.*'5'.* 0 "),
        ({"callbacks": 3}, "callback.*3"),
        ({"callbacks": [3]}, "callback.*3"),
        ({"metrics": 3}, "metric.*3"),
        ({"declared_sizes": 40.5}, "declared size.*40.5"),
        ({"declared_sizes": "40"}, "declared size.*'40'"),
        ({"data": []}, "data"),
        ({"device": "gpu"}, "device.*'gpu'.*cpu"),
        ({"seed": -1}, "seed.*-1"),
        ({"held_out": DATA[:2]}, "held_out.*2.*3"),
    ],
)
def test_a_mistake_is_one_line(options, said):
    with pytest.raises(UsageError, match=said.replace("(", r"\(")) as refused:
        make(**options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["test", "held_out"])
def test_nothing_to_test_on_is_refused(name):
    empty = torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
    with pytest.raises(UsageError, match="test set" if name == "test" else "held-out set 0"):
        make(**{name: empty if name == "test" else [empty] * 3}).start(1)


def test_one_function_is_a_callback_and_numbers_of_numpy_are_numbers():
    import numpy as np

    seen, two = [], np.int64(2)
    counts = {"sync_every": two, "mixes": two, "spare_rounds": two, "declared_sizes": np.int64(8)}
    run = make(callbacks=lambda run, log: seen.append(log.round), privacy=dpps.Record(epsilon=3), **counts)
    run.fit(epochs=1)
    assert seen == [0, 1]


@pytest.mark.parametrize(("over", "told"), [(2, False), (3, True), (50, True)])
def test_a_warm_up_that_outlasts_the_run_is_told(over, told, caplog):
    with caplog.at_level(logging.WARNING), make(algorithm=algorithm(schedule=WarmUp(over))).start(1):
        assert bool(re.search(rf"warm-up:{over}\b.*\b2 rounds", caplog.text)) is told
