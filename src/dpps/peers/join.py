"""A member's part in a run between organisations, from opening its folder to letting go of its connections."""

import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from dpps.disk import private_folder, write_private, writing
from dpps.errors import DppsError, RunError, UsageError
from dpps.peers import status as states
from dpps.peers.channel import Channel
from dpps.peers.federation import Federation
from dpps.peers.frames import largest
from dpps.peers.identity import Identity, verify
from dpps.peers.known import accept, check_run, note_run, remember
from dpps.peers.member import Member
from dpps.peers.membership import Membership
from dpps.peers.plan import config_for
from dpps.peers.status import Peer, Status, now, write_status
from dpps.peers.view import LEFT
from dpps.privacy.charges import planned_charges
from dpps.runs.callbacks import Callback, RoundLog
from dpps.runs.options import OWN_DATA
from dpps.runs.run import Run

log = logging.getLogger(__name__)

BEAT = 1.0
"""Seconds between two writings of the status."""
SHARE = 0.05
"""Part of the time that may be spent on computing the epsilon that is shown meanwhile."""


def join(
    federation: str | Path,
    member: str | Path,
    out: str | Path,
    *,
    node_data: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Run:
    """Take part in a run until it is finished; after a crash the same call goes on with it.

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


def membership_of(federation: Federation, identity: Identity) -> Membership:
    """The contract as the protocol of one member needs it."""
    keys = {member.name: member.key for member in federation.members}
    own = federation.check_for(identity)
    return Membership(
        run=federation.fixed_digest,
        names=federation.names,
        own=federation.row(own.name),
        sign=identity.sign,
        verify=lambda name, signature, message: verify(keys[name], signature, message),
        active=federation.active,
        neighbours=federation.neighbours(own.name),
        min_members=federation.rules.min_members,
        soft=federation.rules.soft_deadline,
        hard=federation.rules.hard_deadline,
        start=federation.rules.start_deadline,
        gossip_clip=federation.rules.gossip_clip,
    )


class Participation:
    """A run that one member takes part in. Everything that can be refused at home is refused before anybody is connected to.

    Args:
        federation: the signed contract, federation.toml. It is looked at again while the run goes on:
            a later epoch is taken over.
        member: the folder of this member's key.
        out: folder of the run, with its ledger and outbox.
        node_data: folder with this member's examples.
        data_dir: where a data set that the plan names is looked for.
        convener: fingerprint of the convener, as read out on the telephone.
        metrics: names of metrics taken at the end, for the member's own eyes.
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
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.out, self._file = Path(out), Path(federation)
        self.identity = Identity.open(Path(member))
        contract = accept(self.identity, self._file, convener)
        check_run(self.identity, contract, self.out)
        own = contract.plan["data"] == OWN_DATA
        if own != (node_data is not None):
            raise UsageError(
                "the plan is for data of the members' own: give --node-data DIR"
                if own
                else f"the plan learns from {contract.plan['data']}: leave --node-data out"
            )
        self.channel = Channel(contract, self.identity, self._take_over)
        self.member = Member(membership_of(contract, self.identity), self.channel)
        config = config_for(
            contract,
            self._schema(contract),
            out=self.out,
            node_data=None if node_data is None else Path(node_data),
            data_dir=None if data_dir is None else Path(data_dir),
            metrics=metrics,
            quiet=True,
        ).resolve()
        assert config.epochs is not None
        self.epochs = config.epochs
        self.run = Run.from_options(config, callbacks=(self._after_round, *callbacks), deployment=self.member)
        self.status = Status(
            self.channel.own.name,
            contract.id,
            contract.epoch,
            unit=config.unit,
            promised=config.epsilon,
            delta=config.delta if config.noisy else None,
            links=sorted(contract.pairs),
            since=now(),
        )
        self._over, self._thread = threading.Event(), threading.current_thread()
        self._watcher = threading.Thread(target=self._watch, name="dpps status", daemon=True)
        self._writing = threading.Lock()
        self._expelled, self._connected = "", False
        self._next_epsilon, self._stamp = 0.0, self._stamped()

    def _schema(self, contract: Federation) -> Path | None:
        if not contract.schema:
            return None
        with writing(self.out):
            private_folder(self.out)
        write_private(self.out / "schema.toml", contract.schema.encode())
        return self.out / "schema.toml"

    # The run

    def prepare(self) -> "Participation":
        """Make the run ready; nobody is connected to."""
        if not self.run.started:
            self.run.start(self.epochs)
            self.status.rounds, self.status.round = self.run.plan.count, self.run.state.round
        return self

    @property
    def planned_epsilon(self) -> float | None:
        """Of all rounds of the plan together, after `prepare`; None without noise."""
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
        note_run(self.identity, self.channel.federation, self.out)
        self.channel.start(self.run.description.model, largest(row.numel() * row.element_size()))
        self._watcher.start()
        return self

    def fit(self) -> Run:
        """To the end: finished, or left.

        Raises:
            KeyboardInterrupt: stopped on request; all that counts is on disk, and the same command goes on.
            RunError: it failed, or this member was expelled.
        """
        self._thread = threading.current_thread()  # before the start: others may bring a later epoch at once
        self.start()
        try:
            self.run.fit(self.epochs)
            self.tell_epsilon()
            if self.run.stopped:
                self._interrupted()
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

    def _interrupted(self) -> NoReturn:
        """`Run.stop` was called, in a thread that cannot be interrupted."""
        raise KeyboardInterrupt

    def close(self) -> None:
        """Let go of all connections; nothing is written any more when this returns."""
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
        self._tell_epsilon()
        self._renew()

    def _tell_epsilon(self) -> None:
        """What was spent so far. Accountants take a while, so not in every round."""
        if time.monotonic() >= self._next_epsilon:
            self.tell_epsilon()

    def tell_epsilon(self) -> None:
        """Put what was spent up to now into the status."""
        if self.run.unit is None or self.status.epsilon_round == self.run.state.round > 0:
            return
        begun = time.monotonic()
        self.status.epsilon = self.run.privacy.epsilon_spent
        self.status.epsilon_round = self.run.state.round
        taken = time.monotonic() - begun
        self._next_epsilon = begun + taken / SHARE

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
        status, run = self.status, self.run
        status.epoch = self.channel.federation.epoch
        status.round = run.state.round
        if status.state == states.RUNNING and status.round >= status.rounds:
            status.state = states.ENDING
        if self.member.staying:
            status.state = states.STAYING
        traffic = self.channel.traffic
        status.members = []
        for told in self.member.fabric.status():
            passed = traffic.get(told["name"])
            sent, received = (passed.sent, passed.received) if passed else (0, 0)
            told["round"] = min(told["round"], status.rounds)  # the average at the end counts on
            status.members.append(Peer(**told, sent=sent, received=received))
        status.bytes_sent = sum(each.sent for each in traffic.values())
        fabric, names = self.member.fabric, self.member.membership.names
        status.refusals = [
            *self.channel.refusals,
            *(f"refused {names[n]}: it sent {why}" for n, why in fabric.refused.items()),
            *(f"{names[n]} refuses this member: it was sent {why}" for n, why in fabric.refused_by.items()),
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

    def _stamped(self) -> tuple[int, int]:
        try:
            found = self._file.stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size

    def _look_at_file(self) -> None:
        """A later epoch may have been put where the contract is."""
        stamp = self._stamped()
        if stamp in (self._stamp, (0, 0)):
            return
        self._stamp = stamp
        try:
            self.channel.adopt(Federation.read(self._file))
        except UsageError as error:
            self.channel.tell(f"the new {self._file} is not taken over: {error}")

    def _take_over(self, following: Federation) -> None:
        membership = replace(self.member.membership, active=following.active)
        self.member.adopt(membership)
        try:
            remember(self.identity, following)
        except RunError as error:  # it holds all the same, in this process
            self.channel.tell(str(error))
        if self.channel.own.name not in following.active:
            self._expelled = f"{self.channel.own.name} was expelled from the federation in epoch {following.epoch}; its ledger is safe in {self.out}"
            self._interrupt()

    def _interrupt(self) -> None:
        """End the run wherever it waits: all that counts is on disk before it is sent."""
        if self._over.is_set():
            return  # there is nothing left to end
        if self._thread is threading.main_thread() and self._thread.ident is not None:
            signal.pthread_kill(self._thread.ident, signal.SIGINT)
        else:
            self.run.stop()
