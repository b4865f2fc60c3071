"""A member's part in a run between organisations, from opening its folder to closing its connections."""

import logging
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpps.disk import check_folder, locked, private_folder, write_private, writing
from dpps.errors import DppsError, MismatchError, RunError, UsageError, quoted
from dpps.peers import status as states
from dpps.peers.connections import Channel, check_port
from dpps.peers.contract import Federation, Membership, config_for, questions_for
from dpps.peers.identity import Identity, read_out
from dpps.peers.links import LEFT
from dpps.peers.member import Member
from dpps.peers.messages import largest
from dpps.peers.status import Peer, Status, now, write_status
from dpps.peers.store import LOCK, OUTBOX
from dpps.privacy.partners import Pairs
from dpps.privacy.promise import planned_charges
from dpps.runs.callbacks import RoundLog
from dpps.runs.folder import RunFolder
from dpps.runs.options import OWN_DATA
from dpps.runs.run import Callback, Run
from dpps.statistics.release import Release

log = logging.getLogger(__name__)

SCHEMA = "schema.toml"
"""In the run's folder: what the contract says of the members' data."""
CONVENER, KNOWN, RUN = "convener", "federations", ".run"
"""In the member's folder: whose contracts are trusted, the newest revision of each, and where its run is."""
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
        protected = self.run.unit
        self.status = Status(
            self.channel.own.name,
            contract.id,
            contract.revision,
            unit="none" if protected is None else protected.name,
            promised=None if protected is None else protected.epsilon,
            delta=None if protected is None else protected.delta,
            against=against(contract.plan),
            links=sorted(contract.pairs),
            since=now(),
        )
        self._over, self._thread = threading.Event(), threading.current_thread()
        self._watcher = threading.Thread(target=self._watch, name="federation status", daemon=True)
        self._writing = threading.Lock()
        self._expelled, self._connected = "", False
        self._next_epsilon, self._stamp = 0.0, self._stamped()

    def _make_run(
        self, contract: Federation, callbacks: Sequence[Callback], own_choice: Mapping[str, Any]
    ) -> Run:
        """The run of a plan of `dpps train`, or the release of one of `dpps stats`."""
        for name, usual in (("data_dir", None), ("metrics", None), ("device", "auto")):
            if contract.asks and own_choice[name] != usual:
                raise UsageError(
                    f"--{name.replace('_', '-')} would be ignored: the plan asks questions (dpps stats); leave it out"
                )
        schema = self._write_schema(contract)
        common: dict[str, Any] = {"folder": self.out, "deployment": self.member, "callbacks": callbacks}
        if contract.asks:
            assert schema is not None
            survey, described, unit = questions_for(contract, schema).opened()
            sources, members = [own_choice["node_data"]], len(contract.members)
            return Release.of_tables(survey, described, sources, members, unit, **common)
        return Run.from_options(config_for(contract, schema, quiet=True, **own_choice), **common)

    def _write_schema(self, contract: Federation) -> Path | None:
        if not contract.schema:
            return None
        place = self.out / SCHEMA
        self._new = [path for path in (place, self.out, *self.out.parents) if not path.exists()]
        with writing(self.out):
            private_folder(self.out)
        write_private(place, contract.schema.encode())
        return place

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
        status.revision = self.channel.federation.revision
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
        """A later revision may have been put where the contract is."""
        stamp = self._stamped()
        if stamp in (self._stamp, (0, 0)):
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
            self._interrupt()

    def _interrupt(self) -> None:
        """End the run wherever it waits: all that counts is on disk before it is sent."""
        if self._over.is_set():
            return  # there is nothing left to end
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
    fingerprint of the convener, as read out on the telephone, the one seen first is trusted.

    Raises:
        UsageError: it is not what the convener signed, is of another convener, or not for this member.
    """
    given = Federation.read(path)
    _check_convener(identity, given, convener)
    found = _newest(identity, given, path)
    found.check_for(identity)
    return found


def remember(identity: Identity, federation: Federation, *, compared: bool = False) -> None:
    """Trust the convener of a contract, and keep the contract, so that older revisions of it are refused.

    Args:
        identity: this member.
        federation: as `accept` returned it.
        compared: whether the convener's fingerprint was given.
    """
    place = identity.folder / CONVENER
    if not place.exists() and not compared:
        log.warning(
            "this convener is trusted from now on; compare its fingerprint on the telephone: %s",
            read_out(federation.convener_fingerprint),
        )
    if not place.exists() or place.read_text().strip() != federation.convener_fingerprint:
        write_private(place, f"{federation.convener_fingerprint}\n".encode())
    folder = identity.folder / KNOWN
    with writing(folder):
        private_folder(folder)
    write_private(_place(identity, federation), federation.to_toml().encode())


def check_run(identity: Identity, federation: Federation, out: Path) -> None:
    """Refuse to begin a run of this federation a second time: its ledger would begin at nothing, and what was spent would be spent again.

    Raises:
        UsageError: the run was begun in another folder, the folder holds it no more, or holds another one.
    """
    try:
        held: Status | None = states.read_status(out)
    except UsageError:
        held = None  # there is none; or it cannot be read, which stops nobody: it is for people to look at
    if held is not None:
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
    if (here / OUTBOX).is_dir() and (here == begun or not begun.exists()):  # the same, or moved
        return
    if here == begun or not begun.exists():
        raise UsageError(
            f"{place} says that this member's run of federation {federation.id} was begun in {begun}, and its outbox is not in "
            f"{here}: what was spent is in its ledger; restore that folder, or take no further part"
        )
    raise UsageError(
        f"--out is {here}, and this member's run of federation {federation.id} is in {begun}: another folder would begin with an "
        f"empty ledger; give --out {begun}"
    )


def check_free(out: Path, federation: Federation) -> None:
    """Refuse a folder with files of others, before the first one is written there. What a start leaves that died on the way is not such.

    Raises:
        UsageError: names them.
    """
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
    """Refuse to take part twice at once.

    Raises:
        UsageError: another process takes part in the run in this folder.
    """
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


def _newest(identity: Identity, given: Federation, path: Path) -> Federation:
    place = _place(identity, given)
    if not place.exists():
        return given
    known = Federation.read(place)
    if given.revision < known.revision:
        given.check_next(known, str(place))
        log.warning(
            "%s has revision %d; revision %d is known already and is used",
            path,
            given.revision,
            known.revision,
        )
        return known
    known.check_next(given, str(path))
    return given


def _check_convener(identity: Identity, given: Federation, convener: str) -> None:
    said = re.sub(r"[\s:]", "", convener).lower()
    place, found = identity.folder / CONVENER, given.convener_fingerprint
    if said and said != found:
        raise UsageError(
            f"--convener is {read_out(said)} and the file is signed by {read_out(found)}: ask the convener on the telephone"
        )
    trusted = place.read_text().strip() if place.exists() else ""
    if trusted and trusted != found and not said:
        raise UsageError(
            f"the file is signed by another convener ({read_out(found)}) than the one known to {identity.folder} "
            f"({read_out(trusted)}): ask on the telephone, and give --convener if it is right"
        )
