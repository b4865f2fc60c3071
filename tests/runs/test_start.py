"""What a run refuses when it is made and when it starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.errors import RunError, UsageError
from dpps.learning import PartPSP
from dpps.noise import SecureNoise, Seeded
from dpps.privacy import LedgerFile, Record
from dpps.runs import TRACKED, Run, RunFolder, Simulation
from dpps.sensitivity import Oracle, Sensitivity
from dpps.topology import Ring
from dpps.transport import Stacked

# What a run is given by mistake is told in one line when it is made, with the value and what is allowed


DATA = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]


def algorithm(**options) -> dpps.PartPSP:
    return dpps.PartPSP(nn.Linear(3, 2), batch_size=4, **options)


def make(**options) -> dpps.Run:
    given = {"algorithm": algorithm(), "data": DATA, "topology": dpps.Ring(3), "seed": 0, **options}
    return dpps.Run(given.pop("algorithm"), given.pop("data"), **given)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"algorithm": nn.Sequential(nn.Linear(3, 2))}, "algorithm.*Sequential"),
        ({"algorithm": dpps.PartPSP}, "algorithm.*PartPSP"),
        ({"deployment": "here"}, "deployment.*'here'.*dpps.Simulation"),
        ({"noise": 3}, "noise.*3"),
        ({"watch": 3}, "watch.*3"),
        ({"watch": {"paper": 3}}, "watch.*'paper'.*3"),
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
        ({"seed": 1.5}, "seed.*1.5"),
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


# What a run refuses when it starts, before anything is written


def _run(data=DATA, **options) -> dpps.Run:
    rates = {"lr_shared": options.pop("lr_shared", 0.1)}
    return dpps.Run(
        dpps.PartPSP(nn.Linear(3, 2), batch_size=4, **rates), data, topology=dpps.Ring(3), **options
    )


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: _run(DATA[:2]), "2 data sets.*3 nodes"),
        (lambda: _run([*DATA[:2], (torch.empty(0, 3), torch.empty(0))]), "node 2 "),
        (lambda: _run(privacy=dpps.Record(epsilon=3), lr_shared=0.0), "lr_shared.*0"),
    ],
)
def test_a_request_that_cannot_work_leaves_no_folder(tmp_path: Path, run, said: str) -> None:
    made = run()
    made.folder = made.deployment.folder(tmp_path / "run")
    with pytest.raises(UsageError, match=said):
        made.start(1)
    assert not (tmp_path / "run").exists()


def test_a_ledger_is_written_where_there_is_a_folder_and_a_promise(tmp_path: Path) -> None:
    unit = dpps.Record(noise_multiplier=2.0)
    with _run(privacy=unit, folder=tmp_path / "private").start(1) as run:
        assert isinstance(run.ledger, LedgerFile)
        header = LedgerFile.read_header(tmp_path / "private" / "ledger.jsonl")
        assert header["contract"]["noise"] == 2.0
    with _run(privacy=unit).start(1) as run:
        assert not isinstance(run.ledger, LedgerFile)
    with _run(folder=tmp_path / "plain").start(1) as run:
        assert not isinstance(run.ledger, LedgerFile)


def test_where_messages_really_leave_nobody_brings_noise_of_another_kind() -> None:
    """With noise from a seed, say, nothing would be private, and the statement would call it a simulation."""

    class Away(dpps.Simulation):
        durable = True

    with pytest.raises(UsageError, match=r"noise.*Seeded.*deployment=Simulation\(\)"):
        _run(privacy=dpps.Record(epsilon=3), noise=dpps.Seeded(1), deployment=Away())
    assert isinstance(_run(noise=dpps.Seeded(1))._noise, dpps.Seeded)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, True),
        ({"spare_rounds": 3}, False),
        ({"secure_noise": False}, False),  # a simulation: nothing that was sent has to be paid for
        ({"privacy": dpps.Record(noise_multiplier=2.0)}, False),  # no target to keep within
    ],
)
def test_a_run_that_a_crash_would_end_for_good_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict, told: bool
) -> None:
    given = {"privacy": dpps.Record(epsilon=3), "secure_noise": True} | options
    with _run(folder=tmp_path / "run", **given).start(1):
        assert ("--spare-rounds" in caplog.text) == told


# All nodes here: seeded noise unless asked for, and a run that cannot be paid to its end is not taken up


def test_a_simulation_is_seeded_and_in_one_tensor_unless_told_otherwise() -> None:
    where = Simulation()
    assert isinstance(where.noise(False, 7), Seeded)
    assert isinstance(where.noise(True, 7), SecureNoise)
    assert isinstance(where.connect(SimpleNamespace(topology=Ring(3))), Stacked)
    assert where.rows(3) == range(3)
    assert Simulation(Stacked(2)).rows(5) == range(2)
    assert where.decide_resume(None, True, False) == (True, False)
    assert (where.processes, where.durable, where.header()) == (1, False, {})


def _resumed(folder: Path, *, affords: bool, rounds: int = 0) -> SimpleNamespace:
    place = RunFolder(folder)
    if rounds:
        place.write_summary({"rounds": rounds})
    return SimpleNamespace(
        resumed=True,
        folder=place,
        plan=SimpleNamespace(count=8),
        restore=lambda: 3,
        affords_rest=lambda found: affords,
    )


def test_a_resumed_run_must_be_unfinished_and_paid_for(tmp_path: Path) -> None:
    Simulation().resume(SimpleNamespace(resumed=False))
    Simulation().resume(_resumed(tmp_path, affords=True))
    with pytest.raises(RunError, match=r"round 3 .* 5 rounds .*--spare-rounds"):
        Simulation().resume(_resumed(tmp_path, affords=False))
    with pytest.raises(UsageError, match="8 of 8"):
        Simulation().resume(_resumed(tmp_path, affords=True, rounds=8))


@pytest.mark.parametrize(("track", "watch"), [(True, {}), (False, {"real": Oracle()}), (False, {})])
def test_the_statement_names_sensitivities_that_were_computed_of_rows_without_noise(
    track: bool, watch: dict[str, Sensitivity]
) -> None:
    data = [TensorDataset(torch.randn(20, 4), torch.randint(0, 2, (20,))) for _ in range(3)]
    run = Run(
        PartPSP(nn.Linear(4, 2), "all", batch_size=5),
        data,
        topology=Ring(3),
        privacy=Record(noise_multiplier=2.0),
        track_real=track,
        watch=watch,
    ).fit(epochs=1)
    assert (TRACKED in run.privacy.statement) == bool(track or watch)
