"""Three members in three threads of one process, by gRPC: joined, stopped, gone on, left, expelled."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpps import report
from dpps.cli import DONE, main
from dpps.errors import RunError, UsageError
from dpps.peers import LEAVE, Channel, Participation, expel, read_plan, read_status
from dpps.peers.member import KNOWN, join
from dpps.peers.messages import largest
from dpps.peers.status import STAYING
from dpps.runs import Options, RoundLog, Run, load
from tests.support.holding.sitecustomize import hold
from tests.support.peers import NAMES, Organisations
from tests.support.processes import PATIENCE, context, free_port, until

A, B, C = NAMES


PATIENT, LEAVING = (60.0, 120.0), (1.0, 120.0)
"""Deadlines: nobody is left behind, however slow the machine. Who leaves waits as long as the first of them for what is on its way."""


@pytest.fixture(params=[PATIENT])
def three(tmp_path: Path, request: pytest.FixtureRequest) -> Organisations:
    return organisations(tmp_path, *request.param)


def organisations(tmp_path: Path, soft: float, hard: float, **more: Any) -> Organisations:
    """Three members with a contract, keys and data."""
    plan = tmp_path / "plan.toml"
    options: dict[str, Any] = {
        "model": "linear",
        "shared": "all",
        "lr_shared": 0.1,
        "momentum": 0.0,
        "clip": 1.0,
        "unit": "contribution",
        "mechanism": "gaussian",
        "noise_multiplier": 1.0,
    } | more
    plan.write_text(
        Options(
            nodes=3, declared_sizes="40", batch_size=10, epochs=3, topology="ring", classes=2, **options
        ).to_toml()
    )
    made = Organisations(tmp_path, (free_port(), free_port()), read_plan(plan, 3)[0], soft=soft, hard=hard)
    (tmp_path / "federation.toml").write_text(made.federation.to_toml())
    for k, name in enumerate(NAMES):
        draw = np.random.default_rng(k)
        x = draw.normal(size=(40, 3)).round(3)
        folder = tmp_path / f"data-{name}"
        folder.mkdir()
        lines = [",".join([*map(str, row), str(int(row.sum() > 0))]) for row in x]
        (folder / "train.csv").write_text("a,b,c,label\n" + "\n".join(lines) + "\n")
    return made


def taking_part(three: Organisations, name: str, out: Path, **more: Any) -> Participation:
    options = {"node_data": three.folder / f"data-{name}"} | more
    return Participation(three.folder / "federation.toml", three.folder / name, out, **options)


class Terminal(threading.Thread):
    """One member, from joining to the end."""

    def __init__(self, three: Organisations, name: str, *callbacks: Callable[[Run, RoundLog], None]) -> None:
        super().__init__(daemon=True)
        self.out, self.error = three.folder / f"run-{name}", None
        self.participation = taking_part(three, name, self.out, callbacks=callbacks)
        self.start()

    error: BaseException | None

    def run(self) -> None:
        try:
            with self.participation as participation:
                participation.fit()
        except BaseException as error:  # noqa: BLE001 - for the test
            self.error = error

    def ended(self) -> "Terminal":
        self.join(PATIENCE)
        assert not self.is_alive()
        return self

    @property
    def state(self) -> str:
        return read_status(self.out).state


class Gate:
    """Holds members after a round, or a later one for those that skip it, until it is opened."""

    def __init__(self, round_: int) -> None:
        self.round, self.reached, self.opened = round_, threading.Event(), threading.Event()

    def __call__(self, run: Run, log: RoundLog) -> None:
        if log.round >= self.round:
            self.reached.set()
            assert self.opened.wait(PATIENCE)


def test_all_finish_with_one_model_and_each_with_its_own_ledger(three: Organisations) -> None:
    terminals = [Terminal(three, name).ended for name in NAMES]
    found = [ended() for ended in terminals]
    assert [each.error for each in found] == [None] * 3
    assert [each.state for each in found] == ["finished"] * 3
    for each in found:
        status = read_status(each.out)
        assert (status.round, status.rounds) == (12, 12)
        assert status.epsilon == each.participation.run.privacy.epsilon
        # what was printed at the start
        assert each.participation.planned_epsilon == pytest.approx(status.epsilon)
        assert status.bytes_sent > 12 * 2 * 16
        assert status.here == list(NAMES)
        assert (each.out / "ledger.jsonl").read_bytes().count(b"\n") == 13
        page, card = (
            report.write([each.out], each.out / "report.html"),
            report.write_card(each.out, each.out / "card.md"),
        )
        for path in (page, card):  # nothing that one member could type repeats it
            assert "dpps federation create" in path.read_text()
            assert "dpps train" not in path.read_text()
            assert all(name in path.read_text() for name in NAMES)
        assert each.participation.run.summary.node_names == [each.participation.status.member]
    rows = [
        torch.cat([p.flatten() for p in each.participation.run.models()[0].parameters()]) for each in found
    ]
    assert torch.allclose(rows[0], rows[1], rtol=1e-3, atol=1e-4)
    assert torch.allclose(rows[0], rows[2], rtol=1e-3, atol=1e-4)
    with pytest.raises(UsageError, match=r"--out is .*again.*--out .*run-hospital-a"):
        join(
            three.folder / "federation.toml", three.folder / A, three.folder / "again", node_data=three.folder
        )
    assert not (three.folder / "again").exists()
    before = (found[0].out / "ledger.jsonl").read_bytes()
    again = Terminal(three, A)  # nobody is late: the others have signed that they have finished
    assert again.ended().error is None
    assert again.state == "finished"
    assert (again.out / "ledger.jsonl").read_bytes() == before


def test_stopped_and_gone_on_with_the_same_command(three: Organisations) -> None:
    gate, later, back = Gate(3), Gate(6), Gate(4)  # the others do not finish meanwhile
    others = [Terminal(three, name, later) for name in (A, C)]
    stopped = Terminal(three, B, gate)
    assert gate.reached.wait(PATIENCE)
    stopped.participation.run.stop()
    gate.opened.set()
    assert isinstance(stopped.ended().error, KeyboardInterrupt)
    assert stopped.state == "stopped"
    again = Terminal(three, B, back)
    assert back.reached.wait(PATIENCE)  # all have heard of it
    back.opened.set()
    later.opened.set()
    assert again.participation.run.resumed
    assert [each.ended().error for each in (*others, again)] == [None] * 3
    charged = (again.out / "ledger.jsonl").read_bytes().count(b"\n") - 1
    assert 4 <= charged <= 12  # what it missed was not sent, and nothing was paid twice


@pytest.mark.parametrize("three", [LEAVING], indirect=True)
def test_leaving_from_another_terminal(three: Organisations) -> None:
    gate, later = Gate(3), Gate(6)
    terminals = {name: Terminal(three, name, gate if name == C else later) for name in NAMES}
    assert gate.reached.wait(PATIENCE)
    leaves = terminals[C].participation.member.fabric
    pushed = leaves.pushed
    (terminals[C].out / LEAVE).touch()
    until(lambda: not (terminals[C].out / LEAVE).exists())
    gate.opened.set()
    until(lambda: leaves.pushed > pushed or not terminals[C].is_alive())  # it has handed over
    later.opened.set()
    assert terminals[C].ended().error is None
    assert [terminals[name].ended().error for name in (A, B)] == [None] * 2
    assert [terminals[name].state for name in NAMES] == ["finished", "finished", "left"]
    told = {peer.name: peer.state for peer in read_status(terminals[A].out).members}
    assert told[C] == "left"


def test_expelled_while_running(three: Organisations) -> None:
    gate, later = Gate(3), Gate(6)
    terminals = {name: Terminal(three, name, gate if name == C else later) for name in NAMES}
    assert gate.reached.wait(PATIENCE)
    following = expel(three.federation, C, three.convener)
    (three.folder / "federation.toml").write_text(following.to_toml())
    until(lambda: all(terminals[name].participation.channel.federation.revision == 2 for name in NAMES))
    gate.opened.set()
    later.opened.set()
    error = terminals[C].ended().error
    assert isinstance(error, (RunError, KeyboardInterrupt))
    assert terminals[C].state == "failed"
    assert "revision 2" in read_status(terminals[C].out).message
    assert [terminals[name].ended().error for name in (A, B)] == [None] * 2
    with pytest.raises(UsageError, match=r"hospital-c .*revision 2"):
        Terminal(three, C)


def test_a_status_and_a_revision_that_cannot_be_written_stop_nobody(three: Organisations) -> None:
    gate, later = Gate(3), Gate(6)
    (three.folder / f"run-{A}").mkdir()
    (three.folder / f"run-{A}" / "status.json").mkdir()  # as a full disk would, for root, too
    terminals = {name: Terminal(three, name, gate if name == C else later) for name in NAMES}
    assert gate.reached.wait(PATIENCE)
    channel = terminals[A].participation.channel
    shutil.rmtree(three.folder / A / KNOWN)
    (three.folder / A / KNOWN).touch()
    (three.folder / "federation.toml").write_text(expel(three.federation, C, three.convener).to_toml())
    until(lambda: all(terminals[name].participation.channel.federation.revision == 2 for name in NAMES))
    gate.opened.set()
    later.opened.set()
    assert [terminals[name].ended().error for name in (A, B)] == [None] * 2
    files = ["status.json", f"{three.federation.id}.toml"]
    assert [file for line in channel.refusals for file in files if file in line] == files
    assert C not in terminals[A].participation.member.membership.active


def test_an_expulsion_after_the_end_interrupts_nobody(three: Organisations) -> None:
    with taking_part(three, C, three.folder / "run") as participation:
        pass
    # in the thread that would be interrupted
    participation._adopt(expel(three.federation, C, three.convener))


def test_data_that_does_not_fit_is_told_at_home(three: Organisations) -> None:
    (three.folder / f"data-{A}" / "train.csv").write_text("a,b,c,label\n1,2,3,7\n")
    with pytest.raises(UsageError, match="label"):
        Terminal(three, A)
    with pytest.raises(UsageError, match="give --node-data"):
        join(three.folder / "federation.toml", three.folder / A, three.folder / "run")


def _joined(folder: Path, name: str, round_: int | None) -> None:
    """`dpps federation join` in a process of its own; with a number it waits before that round."""
    torch.set_num_threads(1)
    if round_ is not None:
        hold(round_, folder / "no-such-gate")
    places = {"member": name, "node-data": f"data-{name}", "out": f"run-{name}"}
    options = [word for option, place in places.items() for word in (f"--{option}", str(folder / place))]
    raise SystemExit(main(["federation", "join", str(folder / "federation.toml"), "--quiet", *options]))


@pytest.mark.parametrize("three", [(1.0, 300.0)], indirect=True)
def test_a_process_that_was_killed_and_comes_back_after_the_end_gets_the_model(three: Organisations) -> None:
    def started(name: str, round_: int | None = None) -> Any:
        process = context.Process(target=_joined, args=(three.folder, name, round_))
        process.start()
        return process

    def state(name: str) -> str:
        file = three.folder / f"run-{name}" / "status.json"
        return read_status(file.parent).state if file.exists() else ""

    ledger = three.folder / f"run-{C}" / "ledger.jsonl"
    others, killed = [started(name) for name in (A, B)], started(C, 4)
    until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") == 5)
    killed.kill()
    killed.join()
    until(lambda: [state(name) for name in (A, B)] == [STAYING] * 2)
    assert all(process.is_alive() for process in others)
    processes = [*others, started(C)]
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [DONE] * 3
    assert ledger.read_bytes().count(b"\n") == 5, "what it missed is not paid for"
    runs = [load(three.folder / f"run-{name}") for name in NAMES]
    rows = [torch.cat([p.flatten() for p in found[k].parameters()]) for k, found in enumerate(runs)]
    assert torch.allclose(rows[2], rows[0], rtol=1e-3, atol=1e-4)
    assert torch.allclose(rows[2], rows[1], rtol=1e-3, atol=1e-4)


def test_frames_and_queues_have_room_for_rows_as_they_are_sent(
    three: Organisations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have four bytes a number, and two of them are on their way at most."""
    asked: list[int] = []
    monkeypatch.setattr(Channel, "start", lambda channel, facts, most: asked.append(most))
    with taking_part(three, C, three.folder / "run") as participation:
        participation.start()
        row = participation.run.state.shared.s[0]
        assert row.element_size() == 4
        assert asked == [largest(4 * row.numel())]
        channel = participation.channel
        channel._limit(10 << 20)
        queue = channel.outgoing()
        assert [queue.put(bytes(10 << 20)) for _ in range(3)] == [True, True, False]


def test_another_members_data_is_refused(three: Organisations) -> None:
    own, other, moved = (three.folder / name for name in (f"data-{A}", f"data-{B}", "moved"))
    with taking_part(three, A, three.folder / "run") as first:
        first.prepare()
    wrong = taking_part(three, A, three.folder / "run", node_data=other)
    with wrong, pytest.raises(UsageError, match=str(other)) as told:
        wrong.prepare()
    assert "\n" not in str(told.value)
    shutil.copytree(own, moved)
    with taking_part(three, A, three.folder / "run", node_data=moved) as again:
        assert again.prepare().run.resumed
