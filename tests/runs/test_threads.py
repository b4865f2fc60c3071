"""Threads are chosen by what pays: asked for, given by the environment, or measured once and kept."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import dpps.runs.threads as threads_module
from dpps.learning import size_of
from dpps.runs import Known, fewest_that_pay, set_threads
from tests.support.learning import started_on_images


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Clock:
    """Time passes where work is done and nowhere else, so that nothing depends on how busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds_by_threads):
        def one() -> None:
            self.now += seconds_by_threads[torch.get_num_threads()]

        return one


@pytest.mark.parametrize(
    ("times", "most", "expected"),
    [
        ({1: 0.02, 2: 0.03}, 2, 1),
        ({1: 0.04, 2: 0.02}, 2, 2),
        ({1: 0.04, 2: 0.02, 3: 0.005}, 3, 3),
        ({1: 0.04, 2: 0.02, 4: 0.02}, 4, 2),
        ({1: 0.02, 2: 0.019, 4: 0.001}, 4, 1),
    ],
)
def test_threads_are_doubled_as_long_as_that_pays(times, most, expected, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(threads_module, "time", clock)
    assert fewest_that_pay(clock.work(times), most) == expected


def test_who_asks_gets_it_and_the_environment_comes_next(monkeypatch):
    run = started_on_images()
    monkeypatch.setattr(threads_module, "rehearsal", None)  # nothing is measured
    torch.set_num_threads(2)
    assert set_threads(run, 3, {"OMP_NUM_THREADS": "1"}) == 3
    torch.set_num_threads(2)
    assert set_threads(run, 0, {"OMP_NUM_THREADS": "2"}) == 2
    assert set_threads(run, 0, {"LOCAL_WORLD_SIZE": "2"}) == 1  # two processes on two cores


def test_a_measurement_is_made_once_and_kept(monkeypatch, tmp_path):
    run, measured = started_on_images(), []
    monkeypatch.setattr(threads_module, "_SHORT", 0.0)
    monkeypatch.setattr(threads_module, "_file", lambda: tmp_path / "cache" / "threads.json")
    monkeypatch.setattr(threads_module, "fewest_that_pay", lambda _, most: measured.append(most) or 2)
    for _ in range(2):
        torch.set_num_threads(2)
        assert set_threads(run, 0, {}) == 2
    assert measured == [2]
    other = started_on_images(model=nn.Sequential(nn.Conv2d(1, 5, 3), nn.Flatten(), nn.Linear(80, 3)))
    assert size_of(other.nodes) != size_of(run.nodes)
    set_threads(other, 0, {})
    assert measured == [2, 2]


def test_a_short_run_takes_one_thread_and_measures_nothing(monkeypatch):
    monkeypatch.setattr(threads_module, "_file", None)
    torch.set_num_threads(2)
    assert set_threads(started_on_images(), 0, {}) == 1


def test_a_broken_file_is_as_none_and_one_that_cannot_be_written_is_no_failure(tmp_path):
    known = Known(tmp_path / "threads.json")
    for text in ("{", "[1]", '{"a": "two"}'):
        known.path.write_text(text)
        assert known.get("a") is None
    known.put("a", 2)
    assert known.get("a") == 2
    with mock.patch.object(Path, "read_text", side_effect=PermissionError):  # written by another user
        assert known.get("a") is None
    (tmp_path / "file").touch()
    Known(tmp_path / "file" / "threads.json").put("a", 2)
