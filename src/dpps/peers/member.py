"""One organisation's part in a run: `Run(..., deployment=Member(...))` does the rest as everywhere else.

A member is in one of four states, which its frames tell the others: HERE while it learns and averages; NEAR when it averages and
sees no difference to its neighbours any more; then DONE, when the average is on its disk; or LEFT, when it has handed its mass over.

- Before a round it waits until enough members are here, and goes where the others are: rounds that it missed are skipped, not repeated.
- The round itself is the protocol's: charge in memory, noise, `Peers.push`. Before a frame leaves, `_keep` puts charge, message and
  the state after the round on disk, in one write that is there completely or not at all (:mod:`dpps.peers.store`).
- At the end it averages, becomes DONE, and stays a while to hand the average to those who come back late.
- A new start goes on from the outbox: what was on disk is sent again as it was, what was not has never left.
"""

import json
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from dpps.disk import check_folder, locked, private, private_folder, write_private, writing
from dpps.errors import DppsError, MismatchError, RunError, UsageError, quoted
from dpps.noise.pairs import MemberNoise, MemberPairs
from dpps.noise.source import NoiseSource, SecureNoise, Seeded
from dpps.peers import status as states
from dpps.peers.connections import Channel, check_port
from dpps.peers.contract import Federation, Membership, config_for, questions_for
from dpps.peers.gossip import ENOUGH, Peers, averaging_rounds
from dpps.peers.identity import Identity, read_out
from dpps.peers.links import ACTIVE, DONE, LEFT, Terms
from dpps.peers.messages import LEARNING, Post, largest
from dpps.peers.status import Status, now, write_status
from dpps.peers.store import LOCK, OUTBOX, Outbox, OutboxLedger
from dpps.privacy.accountant import label
from dpps.privacy.partners import Pairs
from dpps.privacy.promise import planned_charges
from dpps.runs.callbacks import RoundLog
from dpps.runs.data_ledger import checksum
from dpps.runs.deployment import Deployment
from dpps.runs.folder import RunFolder
from dpps.runs.options import OWN_DATA
from dpps.runs.run import Callback, Run
from dpps.runs.summary import Summary
from dpps.runs.torch_distributed import SEEDED
from dpps.statistics.release import Release
from dpps.transport.base import TAIL

log = logging.getLogger(__name__)

OBSERVER = (
    "Seen by: the members that this one sends to, and all others, to whom parts of it travel on; the promise "
    "holds against all of them "
    "together, and against whoever reads the wire."
)
_RESERVATIONS, _DATA, _ROUNDS = "reservations.json", "data", "rounds.jsonl"  # beside the outbox
_BEAT = 0.5  # seconds between looks at what has arrived
SCHEMA = "schema.toml"
"""In the run's folder: what the contract says of the members' data."""
CONVENER, KNOWN, RUN = "convener", "federations", ".run"
"""In the member's folder: whose contracts are trusted, the newest revision of each, and where its run is."""
BEAT = 1.0
"""Seconds between two writings of the status."""
SHARE = 0.05
"""Part of the time that may be spent on computing the epsilon that is shown meanwhile."""


class Heart(threading.Thread):
    """Shows signs of life and takes in frames while the member itself computes."""

    def __init__(self, fabric: Peers) -> None:
        super().__init__(name="dpps heart", daemon=True)
        self._fabric, self._stopped = fabric, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopped.wait(min(_BEAT, self._fabric.rules.soft_deadline / 3)):
                self._fabric.look()
        except BaseException as error:  # noqa: BLE001 - `check` raises it where the run is
            self._error = error

    def check(self) -> None:
        """Raise here what went wrong there."""
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let it end, and wait until it has."""
        self._stopped.set()
        self.join()


class Member(Deployment):
    """One member of a federation, with one node and its data.

    The run's folder holds the outbox beside the ledger: a process that was killed goes on from there with the same command.

    Args:
        membership: the contract, as this member needs it.
        post: carries frames to the other members.
        clock: seconds, of any origin.
        seeded_noise: take noise and sampling from the seed, as in a simulation. For tests: nothing is
            private then.
        heart: show signs of life and take in frames while this member computes, in a thread of its own.
    """

    durable = True
    ledger = OutboxLedger
    repeats_rounds = False  # the outbox holds what was paid for
    _run: Run
    _outbox: Outbox

    def __init__(
        self,
        membership: Membership,
        post: Post,
        *,
        clock: Callable[[], float] = time.monotonic,
        seeded_noise: bool = False,
        heart: bool = True,
    ) -> None:
        self.membership, self.post, self.clock, self.seeded_noise = membership, post, clock, seeded_noise
        self.rules, self.log_prefix = membership.rules, f"{membership.name}: "
        self.processes, self.members = len(membership.names), membership.names
        self.fabric = Peers(membership, post, clock)
        self.agreement: float | None = None
        """How far the neighbours were from the average when they last told, relative to its norm; None before the end."""
        self._leave_asked = threading.Event()
        self._heart, self._shows_life = Heart(self.fabric), heart
        self._exits = ExitStack()
        self._met = self._few_left = False
        self._waits_since: float | None = None
        self.staying = False
        """Whether all is done and written, and this member is only there for those who come back late."""
        self._logged = 0
        self._shared: MemberNoise | None = None

    def adopt(self, membership: Membership) -> None:
        """The contract of a later revision."""
        self.membership = membership
        self.fabric.adopt(membership)

    def _tell(self, words: str) -> None:
        log.warning("%s%s", self.log_prefix, words)

    # What a run asks at its start

    def rows(self, nodes: int) -> range:
        return range(self.membership.own, self.membership.own + 1)

    def decide_resume(self, folder: RunFolder | None, resume: bool, overwrite: bool) -> tuple[bool, bool]:
        """The same command starts a run and goes on with it; what has left cannot be started over."""
        if folder is None:
            raise UsageError("a member's run needs a folder (--out): ledger and outbox are kept there")
        if overwrite:
            raise UsageError(
                "--overwrite: what this member has sent cannot be taken back, so its run is not replaced; leave the option "
                "out, and the run goes on"
            )
        return folder.settings.exists(), False

    def noise(self, secure: bool, seed: int) -> NoiseSource:
        if self.seeded_noise:
            return Seeded(seed)
        keys = self.membership.pair_keys
        self._shared = None if keys is None else MemberNoise(keys, self.membership.own)
        return SecureNoise() if self._shared is None else self._shared

    def connect(self, run: Run) -> Peers:
        if run.topology.nodes != len(self.membership.names):
            raise UsageError(
                f"the topology has {run.topology.nodes} nodes and the federation {len(self.membership.names)} members: make them equal"
            )
        if run.unit is not None and isinstance(trust := run.unit.trust, Pairs):
            if self._shared is None:
                raise UsageError(
                    "trust=Pairs between organisations needs the members' pair keys, and noise that nobody else knows: make the "
                    "federation with dpps federation create, or trust nobody"
                )
            if self.processes < 3:
                raise UsageError(
                    f"trust=Pairs with {self.processes} members: a third one must be there to hide behind; trust nobody"
                )
            self.fabric.share_noise(trust.coalition(self.processes), trust.absentees)
        if not run.algorithm.sends_updates:
            raise UsageError(
                f"{type(run.algorithm).__name__} sends more than an update of its parameters, which a member "
                "that was away cannot make up for: use PartPSP"
            )
        run.topology.check_connected()
        self.fabric.counts_late = self.fabric.counts_late or not run.skips_rounds
        assert run.folder is not None
        self._run, self._outbox = run, Outbox(run.folder.path / OUTBOX)
        place = self._place(_DATA)
        # what was spent of other files is in another ledger
        if place.exists() and place.read_text() != _checksums(run):
            raise UsageError(
                f"--node-data {', '.join(run.description.sources)} holds other data than this member's run in {run.folder.path} began "
                "with: give the folder it began with (it may have been moved), its files unchanged"
            )
        self.fabric.keep, self.fabric.keep_reservations = self._keep, self._keep_reservations
        return self.fabric

    def _place(self, name: str) -> Path:
        """A file beside the outbox."""
        return self._outbox.folder / name

    def _keep_reservations(self) -> None:
        assert self.fabric.reservations is not None
        write_private(self._place(_RESERVATIONS), json.dumps(self.fabric.reservations.to_json()).encode())

    def header(self) -> dict[str, Any]:
        return {"federation": self.membership.run, "member": self.membership.name}

    def resume(self, run: Run) -> None:
        """Go on from the outbox; at the first start, begin one."""
        self._outbox.lock()  # a run without noise has no ledger, which would be locked
        self._exits.callback(self._outbox.unlock)
        self.fabric.agree(_terms(run))
        if self.pairs is not None:  # what noise every round has: a missed one is made up for later
            rates = [rate for rate, count in run.plan.rounds for _ in range(count)]
            levels = {rate: run.protocol.level(run.state.shared, rate) for rate in set(rates)}
            self.pairs.levels, self.pairs.planned = lambda round_: levels[rates[round_]], len(rates)
        found = self._outbox.read()
        if found is None:
            if run.resumed and run.ledger.messages:
                raise RunError(
                    f"the outbox in {self._outbox.folder.parent} is gone and its ledger is not: restore it, or leave this run"
                )
            self.fabric.begin(1)
        else:
            self._resume(run, *found)
        state, takes_part = run.state.shared, self.fabric.state in ACTIVE
        if takes_part:
            self.fabric.hold(LEARNING, state.s[0], float(state.a[0]))
        # how often it was started is on disk before anybody hears of it
        self._write(run, run.state.round, state.clock)
        if not self._place(_DATA).exists():
            write_private(self._place(_DATA), _checksums(run).encode())
        if takes_part:
            self._take(run)
            if float(run.state.shared.a[0]) > 0:
                self.fabric.follow(run.state.shared.y[0])
        if self._shows_life:
            self._heart.start()

    @property
    def pairs(self) -> MemberPairs | None:
        """The noise that this member shares; None: none."""
        return None if self._shared is None else self._shared.pairs

    def _resume(self, run: Run, tensors: dict[str, Any], meta: dict[str, Any]) -> None:
        if isinstance(run.ledger, OutboxLedger):
            run.ledger.recover(*meta["ledger"])
        fabric, state = meta["fabric"], meta["fabric"]["state"]
        waiting = [tuple(sent[2:]) for outlet in fabric["outlets"].values() for sent in outlet["waiting"]]
        if state == LEFT and (LEARNING, fabric["pushed"]) not in waiting:
            raise UsageError(
                "this member has left the federation: there is nothing to go on with, and nothing was sent"
            )
        try:
            run.nodes.load(run.state, tensors, meta, meta["round"])
        except (KeyError, RuntimeError) as error:
            raise RunError(f"the outbox is of another model: {error}") from error
        self.fabric.load(tensors, fabric)
        if self.pairs is not None:
            self.pairs.rounds.load(meta["pairs"])
        if self.fabric.reservations is not None and (noted := self._place(_RESERVATIONS)).exists():
            self.fabric.reservations.load(json.loads(noted.read_text()))
        run.accuracy_by_epoch, run.seconds = meta["accuracy_by_epoch"], meta["seconds"]
        run.ended_by_callback = meta.get("ended_by_callback", False)
        run.log = _read_log(self._place(_ROUNDS))
        self._logged = len(run.log)
        if state in ACTIVE:
            self._take(run)

    def _take(self, run: Run) -> None:
        """The row that is held goes into the run's hands."""
        row, a = self.fabric.take(LEARNING)
        state = run.state.shared
        state.s, state.a = row[None], state.a.new_tensor([a])

    # The disk

    def _keep(self, phase: int) -> None:
        """Before anything of a push leaves: the state as it is when nothing of this round has arrived yet."""
        self._heart.check()
        state, more = self._run.state.shared, 1 if phase == LEARNING and self.fabric.state != LEFT else 0
        self._write(self._run, state.round + more, state.clock + more)

    def _write(self, run: Run, round_: int, clock: int) -> None:
        ledger = run.ledger if isinstance(run.ledger, OutboxLedger) else None
        meta = {
            **run.nodes.meta(run.state),
            "round": round_,
            "clock": clock,
            "ledger": None if ledger is None else ledger.tail(),
            "fabric": self.fabric.meta(),
            "accuracy_by_epoch": run.accuracy_by_epoch,
            "seconds": run.seconds,
            "ended_by_callback": run.ended_by_callback,
            "pairs": None if self.pairs is None else self.pairs.rounds.to_json(),
        }
        self._outbox.write(run.nodes.tensors(run.state) | self.fabric.tensors(), meta)
        if ledger is not None:
            ledger.kept()

    # Rounds

    def leave(self) -> None:
        """Take no further part: before the next round all mass is handed to a neighbour, for good."""
        self._leave_asked.set()

    def before_round(self, run: Run) -> bool:
        """Wait until enough members are here; go where the others are. Where members share noise, also until enough of them have noted
        that the round may be released."""
        while self._goes_on(run):
            if run.state.round >= run.plan.count or self._ready(run):
                return True
        return False

    def _ready(self, run: Run) -> bool:
        """Whether the next round may be released; otherwise something was done that helps."""
        if self.pairs is None:
            return True
        if not self.fabric.cleared(run.state.round):
            self.fabric.reserve(run.state.round)
            self.fabric.wait(self.rules.soft_deadline / 3)
            now, reservations = self.clock(), self.fabric.reservations
            self._waits_since = now if self._waits_since is None else self._waits_since
            if now - self._waits_since >= self.rules.hard_deadline and reservations is not None:
                self._waits_since = now
                self._tell(
                    f"waits: {reservations.quorum} other members must have noted that it may release round {run.state.round}, so that "
                    "noise shared with it can be taken back if it is lost"
                )
            return False
        self._waits_since = None
        for row, last in self.fabric.lost().items():
            if self.pairs.rounds.lose(row, last):
                name = self.membership.names[row]
                self._tell(
                    f"no longer shares noise with {name}, and takes back that of the rounds after {last}"
                )
        return True

    def _goes_on(self, run: Run) -> bool:
        """Wait until enough members are here; go where the others are. False: this member takes no further part."""
        self._write_log(run)
        if self.fabric.state == LEFT:  # it had left when it was stopped, and its mass was not safe yet
            return self._gone(run, self.fabric.hand_on())
        self._assemble()
        if run.stop_asked:
            run.stopped = True
            return False
        if self._leave_asked.is_set():
            state = run.state.shared
            first = run.state.round * run.mixes
            return self._gone(run, self.fabric.hand_over(state.s[0], float(state.a[0]), first))
        others = run.state.round
        if self.fabric.over():
            others = run.plan.count
        elif run.skips_rounds:
            others = self.fabric.behind(run.state.round, run.mixes)
        if others > run.state.round:
            target = min(others, run.plan.count)
            self._tell(
                f"continues with round {target}, where the others are; the {target - run.state.round} rounds in between were neither "
                "sent nor charged"
            )
            run.nodes.skip_to(run.state, target, run.rounds_per_epoch)
        return True

    def _gone(self, run: Run, unsure: list[str]) -> bool:
        """It has left: it takes no further part."""
        self._tell(f"has left after {run.state.round} rounds and handed over")
        if unsure:
            self._tell(
                f"{', '.join(unsure)} has not said yet that what it was given is on its disk: give the same command once more, to be sure"
            )
        return False

    def _assemble(self, averaging: bool = False) -> None:
        """Wait until as many members are here as `_wanted` says, and those have answered who can know of earlier starts.
        In the average, when a neighbour has finished, too few may be left: they are waited for as long as the hard deadline, once."""
        fabric, begun, soft, hard = (
            self.fabric,
            self.clock(),
            self.rules.soft_deadline,
            self.rules.hard_deadline,
        )
        tell_at = begun + soft
        self._heart.check()
        while True:
            fabric.wait(0.0)
            now = self.clock()
            waited = now - begun
            wanted = self._wanted(waited)
            # an older copy would put the noise that members share under a second message: there nobody's answer is done without
            answers = not self._met and (fabric.shares_noise or waited < soft)
            doubt = not self._met and waited < hard and fabric.doubtful()
            too_late = fabric.over() and (not answers or fabric.answered())
            if averaging and fabric.ending() and waited >= hard:
                self._few_left = True
            there = fabric.assembled(wanted, answers) or too_late or self._few_left
            if self._leave_asked.is_set() or self._run.stop_asked or (there and not doubt):
                self._met = True
                return
            if now >= tell_at:
                tell_at = now + hard
                self._tell(self._why_waiting(fabric.here, wanted))
            fabric.wait(soft / 3)

    def _wanted(self, waited: float) -> int:
        """How many members must be here. For the first round all of them are waited for, until the start deadline; in a new start
        also all, for what they know of earlier ones, until the hard deadline. Later the fewest that the contract allows."""
        rules, fabric = self.rules, self.fabric
        patience = rules.hard_deadline if fabric.begun() else rules.start_deadline
        everybody = 0 if self._met or waited >= patience else len(fabric.view.taking_part())
        return max(rules.min_members, everybody)

    def _why_waiting(self, here: list[str], wanted: int) -> str:
        if self.fabric.doubtful():
            return "waits for all neighbours to answer: one says that this member has sent more than is on its disk"
        if self.fabric.over(doubted=True):
            return (
                "waits: only one member says that the run has ended, which is not enough; ask another one that has finished to give its dpps "
                "join once more, or the convener to expel those who are gone for good"
            )
        if len(here) >= wanted:
            return f"waits: none of its neighbours answers ({', '.join(sorted(self.membership.partners))})"
        present, known = self.membership.active, self.fabric.view.known
        told = f"{len(here)} of {len(present)} are here ({', '.join(here)}), {wanted} are needed"
        if len(here) == 1 and self.fabric.start_number > 1 and self.fabric.pushed >= 0:
            told += (
                f"; this member has spent {self._spent()} so far. If the others have finished, ask one of them to give its dpps "
                "join once more: it then hands the final model over to this one"
            )
        both = zip(self.membership.names, known, strict=True)
        left = [name for name, each in both if each.state == LEFT and name in present]
        if len(present) - len(left) < self.rules.min_members:
            told += f"; {', '.join(left)} left for good, so too few can come: Ctrl-C ends this member's run"
        return f"waits for other members: {told}"

    def _spent(self) -> str:
        """What its messages have cost, in words."""
        spent = None if self._run.unit is None else self._run.privacy
        if spent is None or spent.epsilon is None:
            return "no epsilon, as nothing was promised for its messages,"
        return f"{label(spent.epsilon)} at delta {spent.delta:g}"

    # The log of earlier starts, which may lose its last lines in a crash

    def _write_log(self, run: Run) -> None:
        path = self._place(_ROUNDS)
        with writing(path), open(path, "a", opener=private) as file:
            file.writelines(json.dumps(each.to_json()) + "\n" for each in run.log[self._logged :])
        self._logged = len(run.log)

    # The end

    def after_last_round(self, run: Run) -> None:
        """Average with all who are here, without noise: rows are made of what was released."""
        if self.fabric.state == DONE:
            return
        self._settle(run)
        state = run.state.shared
        self.fabric.hold(LEARNING, state.s[0], float(state.a[0]))
        if not float(state.a[0]):  # a new start: all that this member had is in the average already
            state.s, state.a = self.fabric.estimate()[None], torch.ones_like(state.a)
        row = run.nodes.shared_rows(run.state)[0]
        self._write_log(run)
        first, fewest = run.plan.count * run.mixes, averaging_rounds(run.topology)
        mean, self.agreement = self.fabric.average(
            row, first, fewest, before=lambda: self._assemble(averaging=True)
        )
        if self.agreement is None:
            raise RunError(
                f"the others have finished, and none of them has handed the final model over to this member, which has spent "
                f"{self._spent()}: ask one of them to give its dpps federation join once more, and meanwhile give this command again"
            )
        if self.fabric.late:
            self._tell("came back when the others had finished, and got their final model")
        run.nodes.set_mean(run.state, mean)
        run.forget_evaluation()
        self.fabric.finish()

    def _settle(self, run: Run) -> None:
        """Before the average, what is still missing for noise to cancel; it goes out with the first message of the average.

        That is the noise of rounds that were missed and not made up for, and what an optimizer would still make of everything
        released: when it has, noise counts alike for both partners, whenever each of them has added it.
        """
        if self.pairs is None or not run.skips_rounds or self.fabric.pushed >= run.plan.count * run.mixes:
            return
        last, state = run.plan.count - 1, run.state.shared
        until = self.clock() + self.rules.hard_deadline
        while self._waits_for_word(last) and self.clock() < until:
            if self.fabric.over():  # too late: the others have their average
                return
            self.fabric.reserve(last)
            self.fabric.wait(self.rules.soft_deadline / 3)
        noise = None
        if self.fabric.cleared(last):
            for row, after in self.fabric.lost().items():
                self.pairs.rounds.lose(row, after)
            noise = self.pairs.last_message(run.protocol.mechanism, last, state.s.shape[1])
        state.s = state.s + run.nodes.still_to_come(run.state, noise)

    def _waits_for_word(self, last: int) -> bool:
        """Whether others have still to say what an expelled member can have released, or that the noise which is missing may go out."""
        assert self.pairs is not None
        rounds, fabric = self.pairs.rounds, self.fabric
        unknown = len(fabric.lost()) < min(len(fabric.membership.expelled_in), rounds.absentees)
        return unknown or (rounds.owes(last) and not fabric.cleared(last))

    def after_results(self, run: Run) -> None:
        """Be there for neighbours that are not done; Ctrl-C ends that, as all is done here."""
        self.staying = True
        if missing := self.fabric.unfinished():
            self._tell(
                f"has finished and written its results; it stays for up to {self.rules.hard_deadline:g} s, so that members that come "
                f"back get the final model ({', '.join(missing)}); Ctrl-C ends that"
            )
        try:
            self.fabric.stay(run.shared, ended=lambda: run.stop_asked)
        except KeyboardInterrupt:
            log.info("%sstays no longer", self.log_prefix)

    def close(self) -> None:
        """Stop showing signs of life, and let other processes have the folder."""
        if self._heart.is_alive():
            self._heart.stop()  # it writes to the folder: if Ctrl-C comes in between, the folder stays locked
        self._exits.close()

    @property
    def preface(self) -> str:
        return SEEDED if self.seeded_noise else ""

    def remarks(self, run: Run) -> list[str]:
        return [OBSERVER]

    def summary(self, own: Summary, run: Run) -> Summary | None:
        """Of this member's node; nobody collects those of all."""
        return None


def _checksums(run: Run) -> str:
    """Of the files of this member's own data; nothing of a public data set, or of data given in Python."""
    return "".join(f"{checksum(Path(source))}\n" for source in run.description.sources)


def _terms(run: Run) -> Terms:
    """What all members know of each other's rows and shares, from the plan alone."""
    state, optimizer = run.state.shared, run.algorithm.optimizer
    gain = 1.0 if optimizer is None else optimizer.gain
    steps = variance = 0.0
    for rate, count in run.plan.rounds:
        step, deviation = run.protocol.growth(state, rate)
        steps, variance = steps + count * step, variance + count * deviation**2
    assert run.state.round == 0, "all rounds are to come: nothing of an earlier start is loaded yet"
    clocks = [clock * run.mixes + k for clock in run.clocks() for k in range(run.mixes)]
    if isinstance(run.protocol.noise, MemberPairs):  # nothing is scaled by a, and some of it is taken back
        least = ENOUGH * min(float(run.topology.weights(c).matrix.diagonal().min()) for c in set(clocks))
        steps = steps / least if least else math.inf
        variance = variance * (1 / least + 1) ** 2 if least else math.inf
    reach = steps + math.sqrt(variance) * (math.sqrt(state.s.shape[1]) + TAIL)
    most = gain * reach if math.isfinite(reach) and math.isfinite(gain) else math.inf
    return Terms(run.topology, len(clocks), most, clocks.__getitem__, run.mixes)


def _read_log(path: Path) -> list[RoundLog]:
    """The rounds of earlier starts. A half-written last line is cut off, so that the next line does not go on with it."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    return [RoundLog.from_json(json.loads(line)) for line in data[:whole].splitlines()]


# Taking part: from opening the folder to closing the connections


def join(
    federation: str | Path,
    member: str | Path,
    out: str | Path,
    *,
    node_data: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Run:
    """Take part in a run until it is finished. After a crash, the same call continues it.

    Args:
        federation: the signed contract, federation.toml.
        member: the folder of this member's key.
        out: folder of the run.
        node_data: folder with this member's examples.
        callbacks: called after every round with the run and the round's log.
        options: as in `Participation`.
    """
    with Participation(
        federation, member, out, node_data=node_data, callbacks=callbacks, **options
    ) as participation:
        return participation.fit()


class Participation:
    """One member's part in a run. Everything is checked before the first connection is made.

    Args:
        federation: the signed contract, federation.toml. It is read again during the run, and a later
            revision is adopted.
        member: the folder of this member's key.
        out: folder of the run, with its ledger and outbox.
        node_data: folder with this member's examples.
        data_dir: where a data set that the plan names is looked for.
        convener: fingerprint of the convener, as confirmed on the telephone.
        metrics: names of metrics to compute at the end. They carry no noise: do not publish them.
        device: where model, data and noise live: "cpu", "cuda", or "auto" for CUDA if there is any.
        callbacks: called after every round with the run and the round's log.
    """

    def __init__(
        self,
        federation: str | Path,
        member: str | Path,
        out: str | Path,
        *,
        node_data: str | Path | None = None,
        data_dir: str | Path | None = None,
        convener: str = "",
        metrics: str | None = None,
        device: str = "auto",
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.out, self._file = Path(out), Path(federation)
        self.identity = Identity.open(Path(member))
        contract = accept(self.identity, self._file, convener)
        self._compared, self._new = bool(convener), list[Path]()
        check_folder("--out", self.out)
        check_free(self.out, contract)
        check_run(self.identity, contract, self.out)
        check_alone(self.out)
        own = contract.plan["data"] == OWN_DATA
        if own != (node_data is not None):
            raise UsageError(
                "the plan is for data of the members' own: give --node-data DIR"
                if own
                else f"the plan learns from {contract.plan['data']}: leave --node-data out"
            )
        if own and data_dir is not None:
            raise UsageError(
                f"--data-dir {data_dir} would be ignored: the plan is for data of the members' own; leave it out"
            )
        self.channel = Channel(contract, self.identity, self._adopt)
        self.member = Member(Membership.of(contract, self.identity), self.channel)
        paths = {"node_data": node_data, "data_dir": data_dir}
        own_choice: dict[str, Any] = {name: path and Path(path) for name, path in paths.items()}
        own_choice |= {"metrics": metrics, "device": device}
        with self._nothing_left_behind():
            self.run = self._make_run(contract, (self._after_round, *callbacks), own_choice)
        self.status = Status(self.channel.own.name, contract.id, contract.revision, unit="none", since=now())
        self.status.against, self.status.links = against(contract.plan), sorted(contract.pairs)
        if (unit := self.run.unit) is not None:
            self.status.unit, self.status.promised, self.status.delta = unit.name, unit.epsilon, unit.delta
        self._over, self._thread = threading.Event(), threading.current_thread()
        self._watcher = threading.Thread(target=self._watch, name="federation status", daemon=True)
        self._writing = threading.Lock()
        self._expelled, self._connected = "", False
        self._next_epsilon, self._stamp = 0.0, self._stamped()

    def _make_run(
        self, contract: Federation, callbacks: Sequence[Callback], own_choice: Mapping[str, Any]
    ) -> Run:
        """The run of a plan of `dpps train`, or the release of one of `dpps stats`."""
        for name, usual in (("metrics", None), ("device", "auto")):
            if contract.asks and own_choice[name] != usual:
                raise UsageError(
                    f"--{name} would be ignored: the plan asks questions (dpps stats); leave it out"
                )
        schema = self.out / SCHEMA
        if contract.schema:
            self._new = [path for path in (schema, self.out, *self.out.parents) if not path.exists()]
            with writing(self.out):
                private_folder(self.out)
            write_private(schema, contract.schema.encode())
        common: dict[str, Any] = {"folder": self.out, "deployment": self.member, "callbacks": callbacks}
        if contract.asks:
            survey, described, unit = questions_for(contract, schema).opened()
            sources = [own_choice["node_data"]]
            return Release.of_tables(survey, described, sources, len(contract.members), unit, **common)
        found = config_for(contract, schema if contract.schema else None, quiet=True, **own_choice)
        return Run.from_options(found, **common)

    @contextmanager
    def _nothing_left_behind(self) -> Iterator[None]:
        """If the request is refused before anything of the run was written, the schema and its new folders go, too. What is said about
        data is what a member can do: the schema stands in the contract."""
        try:
            yield
        except UsageError as error:
            if self._new and len(list(self.out.iterdir())) == 1:
                self._new[0].unlink(missing_ok=True)
                for folder in self._new[1:]:
                    folder.rmdir()
            if not isinstance(error, MismatchError):
                raise
            remedy = "the schema stands in the signed contract, and only a new federation has another"
            raise UsageError(f"{error.of_file}; {remedy}: ask the convener for one if it is wrong") from error

    # The run

    def prepare(self) -> "Participation":
        """Prepare the run without connecting to anyone."""
        if not self.run.started:
            with self._nothing_left_behind():
                if self.identity.listen:
                    check_port(self.identity.listen)
                self.run.start()
            self.status.rounds, self.status.round = self.run.plan.count, self.run.state.round
        return self

    @property
    def planned_epsilon(self) -> float | None:
        """Epsilon of all planned rounds together, after `prepare`. None without noise."""
        run = self.run
        if run.unit is None or run.contract is None:
            return None
        charges = planned_charges(run.contract.calibrate(run.unit), run.plan)
        return run.unit.total(charges).epsilon

    def start(self) -> "Participation":
        """Connect to the neighbours."""
        if self._connected:
            return self
        self.prepare()
        self._connected = True
        row = self.run.state.shared.s[0]
        self._renew()
        remember(self.identity, self.channel.federation, compared=self._compared)
        note_run(self.identity, self.channel.federation, self.out)
        self.channel.start(self.run.description.model, largest(row.numel() * row.element_size()))
        self._watcher.start()
        return self

    def fit(self) -> Run:
        """Run until the member has finished or left.

        Raises:
            KeyboardInterrupt: stopped on request. The state is on disk, and the same command continues.
            RunError: the run failed, or this member was expelled.
        """
        # before the start: others may bring a later revision at once
        self._thread = threading.current_thread()
        self.start()
        try:
            self.run.fit(progress=False)
            self.tell_epsilon()
            if self.run.stopped:  # `Run.stop` was called, in a thread that cannot be interrupted
                raise KeyboardInterrupt  # noqa: TRY301 - ended as Ctrl-C would
            self._end(states.LEFT if self.member.fabric.state == LEFT else states.FINISHED)
        except KeyboardInterrupt:
            if not self._expelled:
                self._end(states.STOPPED)
                raise
            self._end(states.FAILED, self._expelled)
            raise RunError(self._expelled) from None
        except DppsError as error:
            self._end(states.FAILED, str(error))
            raise
        return self.run

    def close(self) -> None:
        """Close all connections. Nothing is written after this returns."""
        self._over.set()
        self.member.close()
        self.channel.close()
        self.run.close()
        if self._watcher.is_alive():
            self._watcher.join()

    def __enter__(self) -> "Participation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What is told

    def _after_round(self, run: Run, log_: RoundLog) -> None:
        self.status.state, self.status.loss = states.RUNNING, log_.loss
        if log_.accuracy is not None:
            self.status.accuracy = log_.accuracy
        self.status.round = run.state.round
        if time.monotonic() >= self._next_epsilon:  # accountants take a while: not in every round
            self.tell_epsilon()
        self._renew()

    def tell_epsilon(self) -> None:
        """Write what was spent so far into the status."""
        begun, round_ = time.monotonic(), self.run.state.round
        if self.run.unit is not None and not self.status.epsilon_round == round_ > 0:
            self.status.epsilon, self.status.epsilon_round = self.run.privacy.epsilon_spent, round_
            self._next_epsilon = begun + (time.monotonic() - begun) / SHARE

    def _renew(self, state: str = "", message: str = "") -> None:
        """Put what is known into the status, and the status on disk."""
        with self._writing:  # two threads do this
            if self.status.state not in states.OVER:
                self._look_around()
            if state:
                self.status.state, self.status.message = state, message
            try:
                write_status(self.out, self.status)
            except RunError as error:  # whether the run can go on is for the outbox to say
                self.channel.tell(str(error))

    def _look_around(self) -> None:
        status, fabric, names = self.status, self.member.fabric, self.member.membership.names
        status.revision, status.round = self.channel.federation.revision, self.run.state.round
        if status.state == states.RUNNING and status.round >= status.rounds:
            status.state = states.ENDING
        if self.member.staying:
            status.state = states.STAYING
        members, traffic = fabric.status(), self.channel.traffic
        for peer in members:
            peer.round = min(peer.round, status.rounds)  # the average at the end counts on
            if passed := traffic.get(peer.name):
                peer.sent, peer.received = passed.sent, passed.received
        status.members, status.bytes_sent = members, sum(each.sent for each in traffic.values())
        status.refusals = [
            *self.channel.refusals,
            *(f"refused {names[n]}: it sent {why}" for n, why in list(fabric.refused.items())),
            *(
                f"{names[n]} refuses this member: it was sent {why}"
                for n, why in list(fabric.refused_by.items())
            ),
        ]

    def _end(self, state: str, message: str = "") -> None:
        self._over.set()
        self._renew(state, message)

    # What others ask for meanwhile

    def _watch(self) -> None:
        while not self._over.wait(BEAT):
            request = self.out / states.LEAVE
            if request.exists():
                request.unlink()
                log.warning("%s leaves on request and hands its mass over", self.status.member)
                self.member.leave()
            self._look_at_file()
            if not self._over.is_set():
                self._renew()

    def _stamped(self) -> tuple[int, int] | None:
        with suppress(OSError):
            found = self._file.stat()
            return found.st_mtime_ns, found.st_size
        return None

    def _look_at_file(self) -> None:
        """A later revision may have been put where the contract is."""
        if (stamp := self._stamped()) in (self._stamp, None):
            return
        self._stamp = stamp
        try:
            self.channel.adopt(Federation.read(self._file))
        except UsageError as error:
            self.channel.tell(f"the new {self._file} is not adopted: {error}")

    def _adopt(self, following: Federation) -> None:
        self.member.adopt(self.member.membership.at(following))
        try:
            remember(self.identity, following)
        except RunError as error:  # it holds all the same, in this process
            self.channel.tell(str(error))
        if self.channel.own.name not in following.active:
            self._expelled = f"{self.channel.own.name} was expelled from the federation in revision {following.revision}; its ledger is safe in {self.out}"
            if self._over.is_set():
                return  # there is nothing left to end
            # end the run wherever it waits: all that counts is on disk before it is sent
            if self._thread is threading.main_thread() and self._thread.ident is not None:
                signal.pthread_kill(self._thread.ident, signal.SIGINT)
            else:
                self.run.stop()


def against(plan: Mapping[str, Any]) -> str:
    """How many members may collude and how many may be lost, where they share noise that cancels; empty where they do not."""
    if plan.get("trust") != Pairs.name:
        return ""
    return f"pairs against {plan.get('colluders', 0)} colluders, {plan.get('absentees', 0)} may be lost"


# What a member remembers of a federation: who its convener is, the newest revision it has seen, and where its run is


def accept(identity: Identity, path: Path, convener: str = "") -> Federation:
    """The contract to run by: that in the file, or a later revision of it that is known already. Nothing is written. Without the
    fingerprint of the convener, as read out on the telephone, the one seen first is trusted. UsageError: it is not what the
    convener signed, is of another convener, or not for this member."""
    found = Federation.read(path)
    said, signed_by = re.sub(r"[\s:]", "", convener).lower(), found.convener_fingerprint
    if said and said != signed_by:
        raise UsageError(
            f"--convener is {read_out(said)} and the file is signed by {read_out(signed_by)}: ask the convener on the telephone"
        )
    if not said and (trusted := _trusted(identity)) not in ("", signed_by):
        raise UsageError(
            f"the file is signed by another convener ({read_out(signed_by)}) than the one known to {identity.folder} "
            f"({read_out(trusted)}): ask on the telephone, and give --convener if it is right"
        )
    if (place := _place(identity, found)).exists():
        known = Federation.read(place)
        if found.revision < known.revision:
            found.check_next(known, str(place))
            log.warning(
                "%s has revision %d; revision %d is known already and is used",
                path,
                found.revision,
                known.revision,
            )
            found = known
        else:
            known.check_next(found, str(path))
    found.check_for(identity)
    return found


def _trusted(identity: Identity) -> str:
    """The fingerprint of the convener whose contracts are trusted; empty: none yet."""
    place = identity.folder / CONVENER
    return place.read_text().strip() if place.exists() else ""


def remember(identity: Identity, federation: Federation, *, compared: bool = False) -> None:
    """Trust the convener of a contract, and keep the contract, so that older revisions of it are refused.

    Args:
        identity: this member.
        federation: as `accept` returned it.
        compared: whether the convener's fingerprint was given.
    """
    trusted, found = _trusted(identity), federation.convener_fingerprint
    if not trusted and not compared:
        log.warning(
            "this convener is trusted from now on; compare its fingerprint on the telephone: %s",
            read_out(found),
        )
    if trusted != found:
        write_private(identity.folder / CONVENER, f"{found}\n".encode())
    folder = identity.folder / KNOWN
    with writing(folder):
        private_folder(folder)
    write_private(_place(identity, federation), federation.to_toml().encode())


def check_run(identity: Identity, federation: Federation, out: Path) -> None:
    """Refuse to begin a run of this federation a second time: its ledger would begin at nothing, and what was spent would be spent
    again. UsageError: the run was begun in another folder, the folder holds it no more, or holds another one."""
    try:
        held = states.read_status(out)
    except UsageError:
        pass  # there is none; or it cannot be read, which stops nobody: it is for people to look at
    else:
        name = federation.check_for(identity).name
        if (held.member, held.federation) != (name, federation.id):
            raise UsageError(
                f"--out {out} holds the run of {held.member} in federation {held.federation}, and this is {name} in federation "
                f"{federation.id}: choose another folder"
            )
    place = _place(identity, federation).with_suffix(RUN)
    if not place.exists():
        return
    here, begun = out.resolve(), Path(place.read_text().strip())
    if here == begun or not begun.exists():  # the same, or moved
        if (here / OUTBOX).is_dir():
            return
        raise UsageError(
            f"{place} says that this member's run of federation {federation.id} was begun in {begun}, and its outbox is not in "
            f"{here}: what was spent is in its ledger; restore that folder, or take no further part"
        )
    raise UsageError(
        f"--out is {here}, and this member's run of federation {federation.id} is in {begun}: another folder would begin with an "
        f"empty ledger; give --out {begun}"
    )


def check_free(out: Path, federation: Federation) -> None:
    """Refuse a folder with files of others, before the first one is written there. What a start leaves that died on the way is not
    such. UsageError: names them."""
    folder, place = RunFolder(out), out / SCHEMA
    if folder.settings.exists():
        return
    folder.check_new()
    same = place.is_file() and place.read_bytes() == federation.schema.encode()
    known = {OUTBOX, states.FILE, states.LEAVE, *([SCHEMA] if same else [])}
    if others := [name for name in folder.others() if name not in known]:
        raise UsageError(
            f"--out {out} holds {quoted(others)}, and no run of dpps federation join: choose another folder"
        )


def check_alone(out: Path) -> None:
    """Refuse to take part twice at once. UsageError: another process takes part in the run in this folder."""
    try:
        with locked(out / OUTBOX / LOCK):
            return
    except RunError as error:
        raise UsageError(
            f"another process takes part in the run in {out} already: dpps federation status {out} shows it; stop that one first"
        ) from error


def note_run(identity: Identity, federation: Federation, out: Path) -> None:
    """Where the run is, whose outbox is on disk: written before anybody is connected to."""
    check_run(identity, federation, out)
    write_private(_place(identity, federation).with_suffix(RUN), f"{out.resolve()}\n".encode())


def _place(identity: Identity, federation: Federation) -> Path:
    if not re.fullmatch(r"[0-9a-f]{16}", federation.id):
        raise UsageError(f"the federation's id is {federation.id!r}: it must be 16 hexadecimal digits")
    return identity.folder / KNOWN / f"{federation.id}.toml"
