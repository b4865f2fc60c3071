"""Rounds as TensorBoard scalars."""

import stat
import sys
from pathlib import Path

import pytest

import dpps
from dpps.errors import UsageError
from dpps.runs import TensorBoard
from tests.support.learning import tiny, toy_data


def run(folder: Path) -> dpps.Run:
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10)
    options = {"topology": dpps.Ring(3), "privacy": dpps.Record(noise_multiplier=1.0), "seed": 0}
    return dpps.Run(algorithm, toy_data(3), test=toy_data(1)[0], callbacks=[TensorBoard(folder)], **options)


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
