"""The hospital week: members as hosts of their own (network namespaces), real processes, real failures.

    python tests/system/hospital_week.py            # five members, MNIST in small, about a minute and a half
    python tests/system/hospital_week.py --pairs    # the same with noise that cancels; the lost member is expelled, its noise taken back
    python tests/system/hospital_week.py --full     # eight members, MNIST, scattering and a linear model, epsilon 3, 104 rounds
    python tests/system/hospital_week.py --gain softmax     # eight members, independent noise, then noise that cancels
    python tests/system/hospital_week.py --gain scattering  # the same with the features and the data of --full, epsilon 0.5

One member is cut off for a tenth of the run and comes back, one is killed and started again from its folder, one is killed for good
at the middle, two never hear each other, and five packets in a hundred are lost. The run must complete for all who are there; their models
must agree, and be as good as those of an undisturbed run; every ledger must say what its member released, no round may have been
sent with two contents, and the mass of all members and of what is on its way must be the number of members. What passes the
switch is searched for the bytes of rows. With noise that cancels, every message that crossed the network is compared with the
noise of every pair in every round, which the members' keys give (`pair_noise.py`).

Failures happen at rounds, not at times: where one is due, members wait for it (`GATES`), showing signs of life as ever.
So the order of events does not depend on how fast the machine is.

Needs the right to make network namespaces; without it the test fails in CI, unless $DPPS_MULTIHOST is "skip".
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lan import Lan, permitted
from pair_noise import Message, Observer
from safetensors.numpy import load_file
from torch import Tensor

from dpps.cli import main as dpps
from dpps.errors import UsageError
from dpps.peers import (
    AVERAGING,
    LEARNING,
    FrameError,
    Identity,
    Outbox,
    Participation,
    Status,
    decode,
    read_status,
    server_name,
)
from dpps.privacy import LedgerFile
from dpps.runs import RoundLog, Run

PORT = 7443
PROGRAM = __file__
GATES = (0.15, 0.25, 0.35, 0.45, 0.5, 0.6)
"""Parts of the run after which members wait until what happens there has happened."""
KILLED = (3, 4)
HANGS = 3600.0
"""Seconds after which something is said to hang; nothing else depends on it."""


@dataclass(frozen=True)
class Week:
    """What is run, and how much worse it may be than an undisturbed run (points)."""

    members: int
    options: str
    soft: float
    hard: float
    delay: float
    worse: float
    trust: str = ""
    """With noise that cancels, its options; then the member that is lost is expelled."""

    @property
    def words(self) -> list[str]:
        """Of `dpps train`."""
        return f"--nodes {self.members} {self.options} {self.trust}".split()


SMALL = Week(
    5,
    "--data mnist-mini --model linear --shared all --epsilon 8 --batch-size 200 --epochs 6 --declared-sizes 2000 --topology exp",
    soft=6.0,
    hard=30.0,
    delay=0.1,
    worse=4.0,
)
PAIRS = replace(
    SMALL,
    options="--data mnist-mini --model linear --shared all --epsilon 0.3 --batch-size 200 --epochs 6 --declared-sizes 2000 "
    "--topology exp --momentum 0",
    worse=10.0,
    trust="--trust pairs --colluders 0 --absentees 1",
)
FULL = Week(
    8,
    "--data mnist --features scattering --model linear --shared all --epsilon 3 --batch-size 900 --epochs 13 --clip 0.1 "
    "--lr-shared 20 --lr-local 20 --declared-sizes 7500 --topology exp",
    soft=6.0,
    hard=30.0,
    delay=0.02,
    worse=0.5,
)
REPEATS = 3
"""Runs of each kind whose accuracies `--gain` averages: when messages arrive differs from run to run."""
PASSED_ON = -1
"""In notes, the phase of rows that are passed on after a message (`--mixes`), which hold no noise of their own."""
GAINS = {
    "softmax": replace(
        FULL,
        options="--data mnist-mini --model linear --shared all --epsilon 0.3 --momentum 0 --declared-sizes 1250 --topology exp",
        worse=10.0,
    ),
    "scattering": replace(
        FULL,
        options="--data mnist --features scattering --model linear --shared all --epsilon 0.5 --momentum 0 --declared-sizes 7500 "
        "--topology exp --mixes 2",
        worse=5.0,
    ),
}
"""Rates and batches by the rule."""


def member(file: str, own: str, out: str, record: str) -> None:
    """One member's process: `dpps federation join`, with a note of every row that it releases, and of every one that arrives."""
    parent = os.getppid()

    def wait_at_gates(run: Run, _: RoundLog) -> None:
        for gate, part in enumerate(GATES):
            if run.state.round >= part * run.plan.count:
                while not gate_file(Path(out).parent, gate).exists():
                    if os.getppid() != parent:
                        raise SystemExit("whoever opens the gates is gone")
                    time.sleep(0.02)

    with (
        Participation(
            file, own, out, data_dir=os.environ.get("DPPS_DATA"), callbacks=[wait_at_gates]
        ) as participation,
        open(record, "a") as notes,
        open(f"{record}-own", "a") as released,
    ):
        participation.prepare()
        receive, fabric = participation.channel.receive, participation.member.fabric
        keep, mixes = (
            fabric.keep,
            participation.run.mixes,
        )  # a message, then rows that are passed on, are numbered together
        if participation.member.pairs is not None:
            note_messages(participation, f"{record}-made-{os.getpid()}")

        def kept(phase: int) -> None:
            keep(phase)
            if phase == LEARNING and fabric.pushed % mixes == 0:
                digest = fabric._digests[phase, fabric.pushed]
                released.write(json.dumps([fabric.pushed // mixes, digest]) + "\n")
                released.flush()

        def noted(seconds: float) -> tuple[str, bytes] | None:
            found = receive(seconds)
            if found is not None:
                try:
                    frame = decode(found[1], fabric.membership.run, fabric.nodes, fabric._rows.size)
                except FrameError:
                    return found
                if frame.share is not None:
                    claim, head = frame.share.claim, frame.share.row[:64].hex()
                    phase, round_ = claim.phase, claim.round
                    if phase == LEARNING:
                        phase, round_ = (
                            (phase if round_ % mixes == 0 else PASSED_ON - round_ % mixes),
                            round_ // mixes,
                        )
                    notes.write(json.dumps([found[0], phase, round_, claim.digest, head]) + "\n")
                    notes.flush()
            return found

        participation.channel.receive = noted  # type: ignore[method-assign]
        fabric.keep = kept
        run = participation.fit()
        told = {"accuracy": run.accuracy, "agreement": participation.member.agreement, "rounds": len(run.log)}
        (Path(out) / "told.json").write_text(json.dumps(told))


def note_messages(participation: Participation, place: str) -> None:
    """Write down what every message adds to its row, before anything of it is on disk or leaves."""
    where, run, made = participation.member, participation.run, open(place, "wb")  # noqa: SIM115 - as long as the process
    give, settle = where.fabric._give, where._settle

    def note(round_: int, digest: str, row: Tensor, base: Tensor) -> None:
        np.save(made, np.array([str(round_), digest]))
        np.save(made, (row.double() - base.double()).cpu().numpy())
        made.flush()

    def given(phase: int, round_: int, row: Tensor, *rest: Any) -> None:
        if phase == LEARNING and round_ % run.mixes == 0:
            digest = hashlib.sha256(where.fabric._rows.encode(row)).hexdigest()
            note(round_ // run.mixes, digest, row, run.state.shared.s[0])
        give(phase, round_, row, *rest)

    def settled(whose: Run) -> None:
        before = run.state.shared.s[0].clone()
        settle(whose)
        if not torch.equal(before, run.state.shared.s[0]):
            note(run.plan.count, "", run.state.shared.s[0], before)

    where.fabric._give, where._settle = given, settled  # type: ignore[method-assign]


def gate_file(folder: Path, gate: int) -> Path:
    """It exists when the gate is open."""
    return folder / f"gate-{gate}"


class Hospitals:
    """All members, as processes on hosts."""

    def __init__(self, week: Week, lan: Lan, folder: Path) -> None:
        self.week, self.lan, self.folder = week, lan, folder
        self.processes: dict[int, subprocess.Popen[Any]] = {}
        requests = []
        for k in range(week.members):
            address = f"{lan.address(k)}:{PORT}"
            words = ["--name", f"hospital-{k}", "--listen", address, "--out", str(folder / f"member-{k}")]
            _done(dpps(["federation", "key", *words]))
            requests += ["--member", str(folder / f"member-{k}" / "member.csr")]
        plan = StringIO()
        with redirect_stdout(plan):
            _done(dpps(["train", *week.words, "--print-config"]))
        (folder / "plan.toml").write_text(plan.getvalue())
        deadlines = [
            "--soft-deadline",
            str(week.soft),
            "--hard-deadline",
            str(week.hard),
            "--min-members",
            "3",
        ]
        _done(
            dpps(
                [
                    "federation",
                    "create",
                    str(folder / "plan.toml"),
                    *requests,
                    *deadlines,
                    "--out",
                    str(folder / "f"),
                ]
            )
        )

    def start(self, k: int) -> None:
        files = [self.folder / "f" / "federation.toml", self.folder / f"member-{k}", self.out(k)]
        command = [sys.executable, PROGRAM, "member", *map(str, files), str(self.folder / f"record-{k}")]
        log = open(self.folder / f"log-{k}", "a")  # noqa: SIM115 - as long as the process
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DPPS_STATE": str(self.folder / "state")}
        self.processes[k] = self.lan.start(k, command, stdout=log, stderr=log, env=environment)

    def kill(self, k: int) -> None:
        self.processes[k].send_signal(signal.SIGKILL)
        self.processes[k].wait()

    def out(self, k: int) -> Path:
        return self.folder / f"run-{k}"

    def status(self, k: int) -> Status | None:
        try:
            return read_status(self.out(k))
        except UsageError:
            return None

    def await_gate(self, gate: int, k: int = 0) -> None:
        """Until the process that member k has now waits at a gate."""
        end, process = time.monotonic() + HANGS, self.processes[k]
        while True:
            told = self.status(k)
            if (
                told is not None
                and told.process == process.pid
                and told.round >= GATES[gate] * told.rounds > 0
            ):
                return
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit(f"member {k} got no farther than {told}\n{self.log(k)}")
            time.sleep(0.1)

    def open_gate(self, gate: int) -> None:
        gate_file(self.folder, gate).touch()

    def log(self, k: int) -> str:
        return (self.folder / f"log-{k}").read_text()[-2000:]


def disturb(hospitals: Hospitals) -> set[int]:
    """The week's failures; who is gone at the end."""
    lan = hospitals.lan
    hospitals.await_gate(0)
    lan.cut = {2}
    print("hospital-2 is cut off", flush=True)
    hospitals.open_gate(0)
    hospitals.await_gate(1)
    lan.cut = set()
    hospitals.await_gate(1, 2)
    print("hospital-2 is back", flush=True)
    hospitals.open_gate(1)
    hospitals.await_gate(2)
    hospitals.kill(KILLED[0])
    print("hospital-3 is killed and started again", flush=True)
    hospitals.open_gate(2)
    hospitals.start(3)
    hospitals.await_gate(3)
    hospitals.await_gate(3, 3)
    print("hospital-3 is back", flush=True)
    hospitals.open_gate(3)
    hospitals.await_gate(4)
    hospitals.kill(KILLED[1])
    print("hospital-4 is killed for good", flush=True)
    hospitals.open_gate(4)
    hospitals.await_gate(5)
    if hospitals.week.trust:
        _done(dpps(["federation", "expel", str(hospitals.folder / "f" / "federation.toml"), "hospital-4"]))
        print("hospital-4 is expelled", flush=True)
    hospitals.open_gate(5)
    return {4}


def check(hospitals: Hospitals, gone: set[int], packets: "Packets") -> float:
    """Everything that must hold at the end; the mean accuracy of those who are there."""
    n, names = hospitals.week.members, [f"hospital-{k}" for k in range(hospitals.week.members)]
    there = [k for k in range(n) if k not in gone]
    told = {k: json.loads((hospitals.out(k) / "told.json").read_text()) for k in there}
    models = [load_file(hospitals.out(k) / "models" / f"node-{k}.safetensors") for k in there]
    for name, first in models[0].items():
        for model in models[1:]:
            far = float(((model[name] - first) ** 2).sum() ** 0.5 / ((first**2).sum() ** 0.5 + 1e-12))
            assert far < 1e-4, f"{name} differs by {far}"
    arrived: dict[tuple[str, int, int], set[str]] = {}
    heads: set[bytes] = set()
    for k in range(n):
        for line in (hospitals.folder / f"record-{k}").read_text().splitlines():
            sender, phase, round_, digest, head = json.loads(line)
            arrived.setdefault((sender, phase, round_), set()).add(digest)
            heads.add(bytes.fromhex(head))
    assert all(len(digests) == 1 for digests in arrived.values()), "a round was sent with two contents"
    for k, name in enumerate(names):
        charged = Counter(r for r, _ in LedgerFile.read(hospitals.out(k) / "ledger.jsonl").history)
        lines = (hospitals.folder / f"record-{k}-own").read_text().splitlines()
        notes = [json.loads(line) for line in lines]
        released = dict[int, str](notes)
        left = {r: d for (sender, phase, r), d in arrived.items() if sender == name and phase == LEARNING}
        assert set(charged.values()) <= {1}, f"{name} paid a round twice"
        assert set(released) <= set(charged), f"{name} released what it has not paid for"
        # whoever is killed may have put a round on disk and not noted it yet
        assert len(charged) - len(released) <= (k in KILLED), f"{name} paid for what it has not released"
        assert set(left) <= set(charged), f"{name} sent what it has not paid for"
        assert all(digests == {released.get(r, *digests)} for r, digests in left.items()), (
            f"{name} sent other rows than it has released"
        )
        print(f"{name}: {len(charged)} rounds charged, {len(left)} arrived somewhere, {told.get(k, 'gone')}")
    dialled = [server_name(Identity.open(hospitals.folder / f"member-{k}").fingerprint) for k in range(n)]
    assert any(packets.hold(name.encode()) for name in dialled), (
        "the switch was not searched: what TLS sends first is missing"
    )
    # a row of zeros is nobody's secret, and not rare
    secret = [head[:32] for head in heads if len(set(head)) > 16]
    assert not packets.any_of(secret), "a row passed the switch in the clear"
    if hospitals.week.trust:
        check_noise(
            hospitals, gone, {(names.index(n), r): d for (n, p, r), d in arrived.items() if p == LEARNING}
        )
    total = mass([hospitals.out(k) for k in range(n)], shared=bool(hospitals.week.trust))
    assert abs(total - n) < 1e-9, f"the mass is {total}"
    print(
        f"mass {total!r} of {n}; {packets.count} packets, {len(secret)} starts of rows searched for in them"
    )
    return float(sum(each["accuracy"] for each in told.values()) / len(told))


def check_noise(hospitals: Hospitals, gone: set[int], crossed: dict[tuple[int, int], set[str]]) -> None:
    """Compare every message with the keys: `crossed` has the digests of those that arrived somewhere, by member and round."""
    folder, n = hospitals.folder, hospitals.week.members
    messages, last = [], {}
    for k in range(n):
        lines = (folder / f"record-{k}-own").read_text().splitlines()
        kept: dict[int, set[str]] = {r: {digest} for r, digest in map(json.loads, lines)}
        mine = [made for place in sorted(folder.glob(f"record-{k}-made-*")) for made in made_in(place)]
        assert all(
            digest in {d for r, d, _ in mine if r == round_}
            for (member, round_), digests in crossed.items()
            for digest in digests
            if member == k
        ), f"hospital-{k} sent a row that it has not made"
        # what was made and neither kept nor sent by a process that was killed does not exist
        real = [(r, x) for r, d, x in mine if not d or d in kept.get(r, set()) | crossed.get((k, r), set())]
        messages += [Message(k, r, added) for r, added in real]
        last[k] = max(r for r, _ in real)
    rounds = 1 + max(r for _, r in crossed)
    members = [folder / f"member-{k}" for k in range(n)]
    observer = Observer.of_federation(
        folder / "f" / "federation.toml", members, hospitals.out(0) / "ledger.jsonl"
    )
    found, lost = observer.find(messages, rounds), {k: last[k] for k in gone}
    assert not (wrong := found.wrong(lost)), wrong
    assert not (standing := found.standing(rounds, lost)), f"does not cancel: {standing}"
    there = [k for k in range(n) if k not in lost]
    for i, j, r in ((i, j, r) for i in there for j in there for r in range(rounds) if i != j):
        assert (i, j, r) in found.places, f"noise of round {r} that {i} shares with {j} is in no message"
    # what is left is the update, and the independent noise of as many rounds as the message has pair noise of
    carried = found.carried()
    for (k, r), rest in found.rest.items():
        assert rest >= 0.9 * carried.get((k, r), 0) * observer.own**2, (
            f"hospital-{k}, round {r}: no noise of its own"
        )
    # noise of one message under another one as well would be found
    twice = [*messages, Message(0, rounds + 1, messages[3].added + messages[0].added)]
    assert observer.find(twice, rounds).wrong(lost)
    back = sum(len(places) > 1 for places in found.places.values())
    most = max(carried.values())
    print(
        f"{len(messages)} messages hold the noise of {len(found.places)} halves of pairs, each once; {back} of them were taken back; "
        f"one message made up for {most - 1} missed rounds"
    )


def made_in(place: Path) -> list[tuple[int, str, np.ndarray]]:
    """What `note_messages` wrote; what a killed process had half written is left out."""
    found = []
    with place.open("rb") as file:
        while True:
            try:
                round_, digest = np.load(file)
                found.append((int(round_), str(digest), np.load(file)))
            except (EOFError, ValueError):
                return found


def mass(folders: list[Path], shared: bool) -> float:
    """What all members hold and what is on its way, by what is on their disks; `shared`: whether they share noise."""
    metas = []
    for folder in folders:
        found = Outbox(folder / "outbox").read()
        assert found is not None
        metas.append(found[1]["fabric"])
    # noise that is shared cancels in sums, so these are what is averaged at the end; otherwise the average has a mass of its own
    phases = (LEARNING, AVERAGING) if shared else (LEARNING,)
    total = sum(meta["mass"][str(phase)] for meta in metas for phase in phases)
    for k, meta in enumerate(metas):
        letters = {(phase, r): a for phase, r, a, _ in meta["letters"]}
        for to, outlet in meta["outlets"].items():
            counted = metas[int(to)]["inlets"][str(k)]["counted"]
            total += sum(
                weight * letters[phase, r]
                for number, weight, phase, r in outlet["waiting"]
                if number > counted and phase in phases
            )
    return float(total)


class Packets:
    """What passes the switch, to be searched."""

    def __init__(self) -> None:
        self.count = 0
        self._content = bytearray()

    def __call__(self, packet: bytes) -> None:
        self.count += 1
        if len(self._content) < 1 << 30:
            self._content += packet

    def hold(self, words: bytes) -> bool:
        """Whether these bytes passed."""
        return words in self._content

    def any_of(self, starts: list[bytes]) -> bool:
        """Whether any of these passed, at whatever place. Their first two bytes sort most places out."""
        content = bytes(self._content)  # hosts still send
        first = np.zeros(1 << 16, dtype=bool)
        first[[int.from_bytes(start[:2], "little") for start in starts]] = True
        known = {start[:8] for start in starts}
        for shift in range(2):
            pairs = np.frombuffer(content, "<u2", (len(content) - shift) // 2, shift)
            for k in np.flatnonzero(first[pairs]).tolist():
                place = 2 * k + shift
                if content[place : place + 8] in known and any(content.startswith(s, place) for s in starts):
                    return True
        return False


def undisturbed(week: Week) -> float:
    """The accuracy of the same run in simulation, without failures."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--seed", "1", "--out", f"{folder}/run", "--quiet"]
        with redirect_stdout(StringIO()):
            _done(dpps(["train", *week.words, *words]))
        return float(json.loads((Path(folder) / "run" / "summary.json").read_text())["test_accuracy"])


def _done(code: int) -> None:
    if code:
        raise SystemExit(code)


def gain(name: str) -> None:
    """How much of what pairs gain is left: from independent noise in the week to pairs without failures."""
    week, both = GAINS[name], replace(GAINS[name], trust=PAIRS.trust)
    independent = float(np.mean([run(week)[0] for _ in range(REPEATS)]))
    found = [run(both) for _ in range(REPEATS)]
    pairs, best = float(np.mean([accuracy for accuracy, _ in found])), found[0][1]
    part = (pairs - independent) / (best - independent)
    print(
        f"{name}: independent {independent:.2f} %, pairs {pairs:.2f} %, without failures {best:.2f} %: {part:.0%} of the way"
    )
    assert part >= 0.5, "less than half of the way"


def run(week: Week) -> tuple[float, float]:
    """The accuracy of the week, and that without failures."""
    baseline = undisturbed(week)  # first: what is computed of the data is there when members start
    begun, packets = time.monotonic(), Packets()
    with tempfile.TemporaryDirectory() as folder, Lan(week.members) as lan:
        lan.delay, lan.loss, lan.tap = week.delay, 0.05, packets
        lan.blocked = {frozenset((0, 1))}
        hospitals = Hospitals(week, lan, Path(folder))
        for k in range(week.members):
            hospitals.start(k)
        gone = disturb(hospitals)
        for k, process in hospitals.processes.items():
            if k not in gone and process.wait(timeout=HANGS) != 0:
                raise SystemExit(f"hospital-{k} failed\n{hospitals.log(k)}")
        lasted = time.monotonic() - begun
        accuracy = check(hospitals, gone, packets)
    print(f"accuracy {accuracy:.2f} %, undisturbed {baseline:.2f} %; {lasted:.0f} seconds")
    assert accuracy >= baseline - week.worse, f"more than {week.worse} points worse"
    return accuracy, baseline


if __name__ == "__main__":
    if sys.argv[1:2] == ["member"]:
        member(*sys.argv[2:])
    elif permitted():
        if "--gain" in sys.argv:
            gain(sys.argv[-1])
        else:
            run(FULL if "--full" in sys.argv else PAIRS if "--pairs" in sys.argv else SMALL)
    elif "CI" in os.environ and os.environ.get("DPPS_MULTIHOST") != "skip":
        raise SystemExit(
            "the hospital week needs network namespaces (root, iproute2); DPPS_MULTIHOST=skip leaves it out"
        )
    else:
        print("SKIPPED: the hospital week needs network namespaces (root, iproute2)")
