"""A member that comes back when the others have finished gets their model, or is told what happened and what it has paid."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpps.errors import RunError
from dpps.peers import AVERAGING, DONE, FINAL, LEARNING, Peers, decode
from dpps.peers.messages import PROTOCOL
from dpps.privacy import LedgerFile, label
from tests.support.bare import HARD, WIDTH, membership_of
from tests.support.federation import FEATURES, NAMES, Federation
from tests.support.simulated import Network, SimulatedPost

pytestmark = pytest.mark.usefixtures("no_fsync")

LATE, OTHERS = "m1", ("m0", "m2", "m3")
ROW_BYTES = 4 * 2 * (FEATURES + 1)


class Late(Federation):
    """m1 is killed in the middle; `when_finished` is called once all others are done."""

    def __init__(self, folder: Path, when_finished: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, epochs=5)
        self.sent: list[tuple[str, int]] = []
        self.network = Network({name: self._main(k) for k, name in enumerate(NAMES)}, tap=self._tap)
        self.network.at(0.4, lambda: self.network.kill(LATE))
        done: list[str] = []
        finish = Peers.finish

        def finished(fabric: Peers) -> None:
            finish(fabric)
            done.append(fabric.membership.name)
            if sorted(done) == sorted(OTHERS):
                when_finished()

        patch.setattr(Peers, "finish", finished)

    def _tap(self, sender: str, to: str, data: bytes) -> None:
        share = decode(data, "run", len(NAMES), ROW_BYTES).share
        if share is not None:
            self.sent.append((sender, share.claim.phase))

    def restart(self, *names: str, after: float) -> None:
        for name in names:
            self.network.at(self.network.now + after, lambda name=name: self.network.restart(name))

    def charged(self) -> list[int]:
        return [r for r, _ in LedgerFile.read(self.folder / LATE / "ledger.jsonl").history]

    def check(self) -> None:
        """m1 has what the others have agreed on."""
        models = self.models()
        assert all(torch.allclose(model, models[0], rtol=1e-4, atol=1e-5) for model in models)
        assert (self.folder / LATE / "models" / "node-1.safetensors").exists()
        assert (self.folder / LATE / "summary.json").exists()


def test_the_others_stay_and_hand_the_model_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paid: list[int] = []

    def come_back() -> None:
        paid.extend(federation.charged())
        federation.sent.clear()
        federation.restart(LATE, after=0.3)

    federation = Late(tmp_path, come_back, monkeypatch)
    federation.network.run()
    federation.check()
    assert paid == federation.charged(), "it pays nothing more"
    assert (LATE, LEARNING) not in federation.sent


def test_who_is_told_that_nobody_is_there_gets_the_model_when_one_joins_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before: list[bytes] = []

    def come_back() -> None:
        federation.restart(LATE, after=3 * HARD)
        federation.network.at(federation.network.now + 6 * HARD, once_more)

    def once_more() -> None:
        assert federation.network.running == {LATE}
        spent = label(federation.runs[LATE].privacy.epsilon)
        assert any(LATE in line and spent in line for line in caplog.messages)
        before.append((tmp_path / "m0" / "models" / "node-0.safetensors").read_bytes())
        federation.network.restart("m0")

    federation = Late(tmp_path, come_back, monkeypatch)
    with caplog.at_level(logging.WARNING):
        federation.network.run(until=40 * HARD)
    federation.check()
    assert (tmp_path / "m0" / "models" / "node-0.safetensors").read_bytes() == before[0]


def test_without_the_model_a_latecomer_ends_in_one_line_and_can_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are there and finished, and none hands the model over."""

    def come_back() -> None:
        federation.restart(LATE, after=0.3)

    federation = Late(tmp_path, come_back, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Peers, "_hand_on_average", lambda fabric, mean: None)
        with pytest.raises(RunError) as told:
            federation.network.run()
    assert label(federation.runs[LATE].privacy.epsilon) in str(told.value)
    assert "\n" not in str(told.value)
    assert not (tmp_path / LATE / "summary.json").exists()
    paid = federation.charged()
    again = {name: federation._main(k) for k, name in enumerate(NAMES) if name in (LATE, "m0")}
    Network(again | dict.fromkeys(("m2", "m3"), _nothing)).run()
    federation.check()
    assert federation.charged() == paid


def _nothing(post: Any) -> None:
    """A member that is not started."""


def test_where_all_are_there_to_the_end_nothing_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: set[int] = set()

    def tap(sender: str, to: str, data: bytes) -> None:
        share = decode(data, "run", len(NAMES), ROW_BYTES).share
        phases.update([] if share is None else [share.claim.phase])

    federation = Federation(tmp_path)
    Network({name: federation._main(k) for k, name in enumerate(NAMES)}, tap=tap).run()
    assert phases == {LEARNING, AVERAGING}
    assert FINAL not in phases


def test_an_outbox_of_version_0_2_is_refused_in_one_line() -> None:
    told: list[str] = []

    def main(post: SimulatedPost) -> None:
        fabric = Peers(membership_of(NAMES, 0), post, post.clock)
        fabric.start(torch.zeros(1, WIDTH, dtype=torch.float64), common=True)
        meta = fabric.meta()
        del meta["protocol"]
        with pytest.raises(RunError, match=PROTOCOL) as refused:
            fabric.load(fabric.tensors(), meta)
        told.append(str(refused.value))

    Network({NAMES[0]: main}).run()
    assert len(told) == 1
    assert "\n" not in told[0]


def test_one_that_says_it_has_finished_ends_nobody_elses_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """m1 can reach nobody but m3, which lies: it waits, and goes on when the others are back."""
    send, stood = Peers._send, list[tuple[int, list[int]]]()

    def lying(fabric: Peers, node: int, sent: Any = None) -> None:
        state = fabric.state
        if fabric.membership.name == "m3" and node == NAMES.index(LATE):
            fabric.state = DONE
        try:
            send(fabric, node, sent)
        finally:
            fabric.state = state

    monkeypatch.setattr(Peers, "_send", lying)
    federation = Late(tmp_path, lambda: None, monkeypatch)
    network, end = federation.network, 0.5 + 4 * HARD
    network.at(0.5, lambda: network.restart(LATE))
    for pair in (("m0", "m1"), ("m0", "m2"), ("m0", "m3"), ("m1", "m2"), ("m2", "m3")):
        network.at(0.41, lambda pair=pair: network.cut(*pair))
        network.at(end, lambda pair=pair: network.mend(*pair))

    def look() -> None:
        stood.append((federation.runs[LATE].state.round, federation.charged()))

    network.at(1.0 + HARD, look)
    network.at(end - 0.1, look)
    with caplog.at_level(logging.WARNING):
        network.run(until=60 * HARD)
    assert stood[0] == stood[1]
    assert stood[0][0] < federation.runs[LATE].plan.count
    models = {name: federation.runs[name].shared for name in ("m0", "m1", "m2")}
    assert all(torch.allclose(model, models["m0"], rtol=1e-4, atol=1e-5) for model in models.values())
    where = federation.runs[LATE].deployment
    assert not where.fabric.late
