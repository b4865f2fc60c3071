"""Runs between organisations: the commands of `dpps federation`."""

import json
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import TaskID
from tyro.conf import Positional, UseAppendAction, arg

from dpps.cli.main import (
    DONE,
    FAILED,
    STOPPED,
    log_lines,
    parse_options,
    plain_console,
    plain_table,
    stopped_by_signals,
    wide_console,
)
from dpps.cli.stats import print_found
from dpps.cli.train import results
from dpps.disk import check_folder, private_folder, write_aside, write_private, writing
from dpps.errors import RunError, UsageError
from dpps.logs import only_from
from dpps.peers.contract import Federation, Rules, convene, expel, read_plan, renew
from dpps.peers.identity import REQUEST, Identity, Key, Request, read_out
from dpps.peers.member import Participation, against
from dpps.peers.status import (
    FINISHED,
    LEAVE,
    LEFT,
    OVER,
    LivePage,
    Status,
    bytes_in_words,
    check_page,
    read_status,
)
from dpps.privacy.accountant import label
from dpps.runs.callbacks import RoundLog, rounds_bar
from dpps.runs.run import Run
from dpps.statistics.release import Release

log = logging.getLogger(__name__)

FILE, KEY = "federation.toml", "convener.key"


# Who takes part


@dataclass(frozen=True)
class KeyConfig:
    """Create a member's key, and a request for a certificate from the convener.

    Send DIR/member.csr to the convener, and compare the fingerprint on the telephone. member.key stays where it is.

    Example: dpps federation key --name hospital-b --listen 0.0.0.0:7443 --out me
    """

    name: Annotated[str, arg(metavar="NAME")]
    """Name of the organisation: a-z, 0-9 and hyphens."""
    out: Annotated[Path, arg(metavar="DIR")]
    """New folder for key and request."""
    listen: Annotated[str, arg(metavar="HOST:PORT")] = ""
    """Address to listen at [none: it only dials out].

    A member behind a firewall needs none.
    """
    address: Annotated[str, arg(metavar="HOST:PORT")] = ""
    """Where the others reach it [as --listen].

    Needed behind port forwarding. With --listen 0.0.0.0 the default is this machine's name.
    """


def key(arguments: list[str]) -> int:
    """Make an identity."""
    config = parse_options(KeyConfig, arguments, "dpps federation key")
    check_folder("--out", config.out)
    _print_identity(Identity.make(config.out, config.name, config.listen, config.address))
    return DONE


def _print_identity(identity: Identity) -> None:
    console = plain_console()
    request = identity.folder / REQUEST
    dialled = Request.read(request).address
    console.print(f"member       [bold]{identity.name}[/]")
    console.print(f"listens at   {identity.listen or 'nowhere: it dials out'}", markup=False)
    if dialled != identity.listen:
        console.print(f"dialled at   {dialled}", markup=False)
    console.print(f"fingerprint  [bold]{read_out(identity.fingerprint)}[/]")
    console.print(
        f"Send {request} to the convener, and read the fingerprint out on the telephone.", markup=False
    )


# The convener


@dataclass(frozen=True)
class CreateConfig:
    """Make the contract of a run between organisations, and the members' certificates.

    Compare every fingerprint that it prints with the member on the telephone, then send DIR/federation.toml to all members.
    convener.key stays here: it is needed again to expel a member or to renew certificates, not during the run.

    Example: dpps federation create plan.toml --member a.csr --member b.csr --out f
    """

    plan: Positional[Annotated[Path, arg(metavar="PLAN")]]
    """Plan of the run (--print-config of dpps train or stats)."""
    member: UseAppendAction[Annotated[tuple[Path, ...], arg(metavar="FILE")]]
    """A member's request; once for each member."""
    out: Annotated[Path, arg(metavar="DIR")]
    """New folder for key, certificates and contract."""
    min_members: int = 2
    """The run waits while fewer members are present."""
    soft_deadline: float = 30.0
    """Seconds that a round waits for a neighbour.

    A message that arrives later counts in a later round.
    """
    hard_deadline: float = 300.0
    """Seconds until the others continue without a member.

    A member that comes back takes part again.
    """
    start_deadline: float = 3600.0
    """Seconds that the first round waits for members.

    Then the run begins without them.
    """
    gossip_clip: float = 0.0
    """How far a neighbour's row may pull a member [0: no limit].

    An L2 distance. It limits the harm of members that send nonsense.
    """
    days: int = 365
    """Days for which the certificates are valid."""
    key: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """convener.key of an earlier federation [a new key].

    The members know it already.
    """


@dataclass(frozen=True)
class ExpelConfig:
    """Write the next revision of a federation without a member.

    Send it to all members. Older revisions are then refused.
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """federation.toml, next to convener.key."""
    name: Positional[Annotated[str, arg(metavar="NAME")]]
    """Member to expel."""


@dataclass(frozen=True)
class RenewConfig:
    """Write the next revision of a federation with new certificates of the same keys."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """federation.toml, next to convener.key."""
    days: int = 365
    """Days for which they are valid."""


@dataclass(frozen=True)
class ShowConfig:
    """Check a federation file and print who is in it; or print a member's name, addresses and fingerprint again.

    Examples:
      dpps federation show f/federation.toml    who takes part, and in what
      dpps federation show me                   what dpps federation key printed
    """

    path: Positional[Annotated[Path, arg(metavar="PATH")]]
    """federation.toml, or the folder that dpps federation key wrote."""
    json: bool = False
    """Print JSON."""


def create(arguments: list[str]) -> int:
    """Sign requests and write the contract."""
    config = parse_options(CreateConfig, arguments, "dpps federation create")
    if (config.out / FILE).exists():
        raise UsageError(f"--out {config.out} already holds a federation: choose another folder")
    check_folder("--out", config.out)
    requests = [Request.read(path) for path in config.member]
    plan, schema = read_plan(config.plan, len(requests))
    rules = Rules(**{field.name: getattr(config, field.name) for field in fields(Rules)})
    rules.check(len(requests))
    key, existing = None if config.key is None else Key.read(config.key), config.out / KEY
    if existing.exists():
        found = Key.read(existing)
        if key is not None and key.fingerprint != found.fingerprint:
            raise UsageError(f"--key {config.key}: {existing} is another key; choose another --out")
        key = found
    key = key or Key.new()
    made = convene(plan, requests, key, rules=rules, schema=schema, days=config.days)
    with writing(config.out):
        private_folder(config.out)
    if not existing.exists():
        write_private(existing, key.pem())
    _write(made, config.out / FILE)
    _print_federation(made, config.out / FILE)
    wide_console().print(
        f"Compare the fingerprints with the members on the telephone, then send {config.out / FILE} to each of them. "
        f"{existing} stays here.",
        markup=False,
    )
    return DONE


def expel_member(arguments: list[str]) -> int:
    """Write the next revision without a member."""
    config = parse_options(ExpelConfig, arguments, "dpps federation expel")
    return _write_next(config.file, lambda found, key: expel(found, config.name, key))


def renew_certificates(arguments: list[str]) -> int:
    """Write the next revision with new certificates."""
    config = parse_options(RenewConfig, arguments, "dpps federation renew")
    return _write_next(config.file, lambda found, key: renew(found, key, config.days))


def show(arguments: list[str]) -> int:
    """Print who is in a federation, or who a member is."""
    config = parse_options(ShowConfig, arguments, "dpps federation show")
    path = config.path
    if path.is_dir() and not (path / FILE).exists():
        identity = Identity.open(path)
        if not config.json:
            _print_identity(identity)
            return DONE
        request = identity.folder / REQUEST
        facts: dict[str, Any] = {
            "member": identity.name,
            "listen": identity.listen,
            "address": Request.read(request).address,
            "fingerprint": identity.fingerprint,
            "request": str(request),
        }
    else:
        path = path / FILE if path.is_dir() else path
        federation = Federation.read(path)
        if not config.json:
            _print_federation(federation, path)
            return DONE
        facts = {
            "federation": federation.id,
            "revision": federation.revision,
            "convener": federation.convener_fingerprint,
            "plan": dict(federation.plan),
            "members": [
                {
                    "member": member.name,
                    "address": member.address,
                    "fingerprint": member.fingerprint,
                    "certificate_until": member.certificate.not_valid_after_utc.isoformat(),
                    "expelled": member.expelled,
                }
                for member in federation.members
            ],
        }
    print(json.dumps(facts))
    return DONE


def _write_next(path: Path, changed: Callable[[Federation, Key], Federation]) -> int:
    federation = changed(Federation.read(path), Key.read(path.parent / KEY))
    _write(federation, path)
    _print_federation(federation, path)
    wide_console().print(
        f"Send {path} to every member: dpps federation join takes the new revision from whoever has it, and refuses older ones.",
        markup=False,
    )
    return DONE


def _write(federation: Federation, path: Path) -> None:
    with writing(path):
        for member in federation.members:
            write_aside(path.parent / f"{member.name}.crt", member.pem)
        write_aside(path, federation.to_toml().encode())


def _print_federation(federation: Federation, path: Path) -> None:
    console, plan = wide_console(), federation.plan
    console.print(f"[bold]{path}[/]  federation {federation.id}, revision {federation.revision}")
    promised = {k: plan[k] for k in ("epsilon", "delta", "noise-multiplier", "budget") if k in plan}
    console.print(f"plan         {_plan_in_words(federation)}", markup=False)
    words = ", ".join(f"{name} {value:g}" for name, value in promised.items())
    shared = f", {told}" if (told := against(plan)) else ""
    console.print(f"privacy      unit {plan['unit']}{': ' if words else ''}{words}{shared}")
    console.print(f"convener     {read_out(federation.convener_fingerprint)}")
    lines = plain_table(("member", "dialled at", "certificate until", "fingerprint"))
    for member in federation.members:
        until = "expelled" if member.expelled else f"{member.certificate.not_valid_after_utc:%Y-%m-%d}"
        lines.add_row(member.name, member.address or "dials out", until, read_out(member.fingerprint))
    console.print(lines)


def _plan_in_words(federation: Federation) -> str:
    plan = federation.plan
    if federation.asks:
        persons = f", by person ({plan['person']})" if "person" in plan else ""
        return f"dpps stats: {', '.join(plan['ask'])}{persons}"
    return f"{plan['algorithm']}, model {plan['model']}, topology {plan['topology']}, {plan['epochs']} epochs"


# A member's part


@dataclass(frozen=True)
class JoinConfig:
    """Take part in a run between organisations. Members start in any order; the run waits for the others.

    After a crash, a power cut or Ctrl-C the same command continues where this member was. Nothing is sent twice with other
    noise, and nothing is paid twice.

    Example:
      dpps federation join f/federation.toml --member me --node-data D --out run
    """

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """The signed contract, federation.toml.

    A later revision may replace it while the run goes on.
    """
    member: Annotated[Path, arg(metavar="DIR")]
    """Folder of this member's key."""
    out: Annotated[Path, arg(metavar="DIR")]
    """Folder for the results."""
    node_data: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder of this member's data.

    It holds train.csv (.tsv, .parquet, .npz), and the same for test if wanted.
    """
    data_dir: Annotated[Path | None, arg(metavar="DIR", help_behavior_hint="")] = None
    """Folder of a data set that the plan names."""
    convener: Annotated[str, arg(metavar="FINGERPRINT", help_behavior_hint="")] = ""
    """Fingerprint of the convener [the first one seen].

    As read out on the telephone.
    """
    metrics: Annotated[str | None, arg(metavar="NAME,NAME,..", help_behavior_hint="")] = None
    """Also measure auroc, f1, ... at the end.

    As in dpps train, for this member's own eyes.
    """
    device: Annotated[str, arg(metavar="{auto,cpu,cuda,cuda:N}")] = "auto"
    """Where model, data and noise live.

    auto uses CUDA if it is available, otherwise the CPU.
    """
    page: Annotated[str, arg(metavar="HOST:PORT", help_behavior_hint="")] = ""
    """Show a live page, for example at 127.0.0.1:8080.

    The whole URL, with a random part, is printed.
    """
    log_json: bool = False
    """Log JSON lines to standard error."""
    quiet: bool = False
    """No progress display."""


def join(arguments: list[str]) -> int:
    """Take part."""
    config = parse_options(JoinConfig, arguments, "dpps federation join")
    if config.page:
        check_page(config.page)
    with ExitStack() as stack:
        if config.log_json:
            stack.enter_context(log_lines(_JsonLines()))
            for name in ("dpps.peers", "dpps.cli"):
                stack.enter_context(only_from(logging.INFO, logging.getLogger(name)))
        return _join(config)


def _join(config: JoinConfig) -> int:
    console = plain_console(quiet=config.log_json)
    shown = Shown(console, quiet=config.quiet or config.log_json)
    try:
        with stopped_by_signals(), ExitStack() as stack:
            participation = stack.enter_context(
                Participation(
                    config.file,
                    config.member,
                    config.out,
                    node_data=config.node_data,
                    data_dir=config.data_dir,
                    convener=config.convener,
                    metrics=config.metrics,
                    device=config.device,
                    callbacks=(shown.after_round,),
                )
            )
            participation.prepare()
            _print_begun(console, participation)
            participation.start()
            if config.page:
                page = stack.enter_context(LivePage(config.page, lambda: participation.status))
                console.print(f"page       {page.url}", markup=False)
                log.info("page %s", page.url, extra={"event": "page", "url": page.url})
            with shown.bar:
                shown.begin(participation)
                participation.fit()
            _print_done(console, participation)
    except KeyboardInterrupt:
        console.print(
            f"stopped; everything is in {config.out}, and the same command goes on with it", markup=False
        )
        log.info("stopped", extra={"event": "stopped"})
        return STOPPED
    return DONE


def _print_begun(console: Console, participation: Participation) -> None:
    status, federation = participation.status, participation.channel.federation
    plan = federation.plan
    console.print(
        f"member     [bold]{status.member}[/] of federation {status.federation}, revision {status.revision}"
    )
    promised = "none: messages without noise" if status.unit == "none" else f"unit {status.unit}"
    if (total := participation.planned_epsilon) is not None:
        promised += f", {label(total)} in total"
    what = f"{len(plan['ask'])} questions" if federation.asks else plan["algorithm"]
    console.print(f"contract   {what}, {promised}, {len(federation.active)} members")
    console.print(
        f"connects   to {', '.join(sorted(federation.neighbours(status.member)))}; listens at {participation.identity.listen or 'no port'}",
        markup=False,
    )


def _print_done(console: Console, participation: Participation) -> None:
    run, status = participation.run, participation.status
    if status.state == LEFT:
        console.print(
            f"left       after round {status.round} of {status.rounds}; its share of the model was handed over"
        )
    elif isinstance(run, Release):
        print_found(run.found)
    else:
        for what, words in results(run.summary):
            console.print(f"{what:<10} {words}")
    if run.unit is not None:
        console.print(f"privacy    [bold]{status.spent}[/], delta {status.delta:g}, {status.protected}")
    console.print(
        f"sent       {bytes_in_words(status.bytes_sent)} to {len(participation.channel.traffic)} neighbours since this start"
    )
    console.print(f"files      {participation.out}", markup=False)


class Shown:
    """Round, who is here, epsilon and bytes sent: a bar on a terminal, otherwise a line now and then."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        self._participation: Participation | None = None
        self.bar = rounds_bar(console, shown=not quiet and console.is_terminal)
        self._task: TaskID | None = None

    def begin(self, participation: Participation) -> None:
        """The run is ready, and waits for the others."""
        self._participation = participation
        status = participation.status
        self._task = self.bar.add_task(
            "", total=status.rounds, completed=status.round, facts="waiting for the other members"
        )
        log.info("waiting for the other members", extra={"event": "waiting", "round": status.round})

    def after_round(self, run: Run, round_: RoundLog) -> None:
        """Move on."""
        if self._participation is None:
            return
        status = self._participation.status
        done, every = round_.round + 1, max(1, run.plan.count // 10)
        line = not self._quiet and not self._console.is_terminal and done % every == 0
        if line:
            self._participation.tell_epsilon()
        facts = {
            name: getattr(status, name)
            for name in ("rounds", "here", "epsilon", "epsilon_round", "bytes_sent")
        }
        log.info("round %d of %d", done, status.rounds, extra={"event": "round", "round": done, **facts})
        epsilon = "" if status.epsilon is None else f", {status.spent}"
        words = f"{len(status.here)} of {len(status.members)} here{epsilon}, sent {bytes_in_words(status.bytes_sent)}"
        if self._task is not None:
            self.bar.update(self._task, completed=done, facts=words)
        if line:
            self._console.print(f"round {done} of {status.rounds}: {words}", markup=False)


class _JsonLines(logging.Formatter):
    """One JSON object a record: time, level, message, and what else it was given."""

    _OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

    def format(self, record: logging.LogRecord) -> str:
        facts = {k: v for k, v in vars(record).items() if k not in self._OWN}
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        about = {"time": at, "level": record.levelname.lower(), "logger": record.name}
        return json.dumps({**about, "message": record.getMessage(), **facts}, default=str)


@dataclass(frozen=True)
class StatusConfig:
    """Show the state of a run: round, who is present, epsilon spent, bytes sent.

    Example: dpps federation status run
    """

    run: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder of the run."""
    json: bool = False
    """Print JSON."""


def status(arguments: list[str]) -> int:
    """Show a run's status."""
    config = parse_options(StatusConfig, arguments, "dpps federation status")
    found = read_status(config.run)
    if config.json:
        print(json.dumps({**found.to_json(), "alive": found.alive}))
    else:
        _print_status(found)
    return DONE


def _print_status(status: Status) -> None:
    console = wide_console()
    state = status.state if status.alive or status.state in OVER else f"not running (it was {status.state})"
    console.print(
        f"member     [bold]{status.member}[/] of federation {status.federation}, revision {status.revision}"
    )
    console.print(
        f"state      [bold]{state}[/], round {status.round} of {status.rounds}, as of {status.updated}"
    )
    if status.message:
        console.print(f"           {status.message}", markup=False)
    if status.unit not in ("", "none"):
        console.print(f"privacy    {status.spent}, delta {status.delta:g}, {status.protected}")
    console.print(f"sent       {bytes_in_words(status.bytes_sent)} since its start at {status.since}")
    lines = plain_table(("member", "state", "round", "heard", "connected", "sent to", "received from"))
    for peer in status.members:
        own = peer.name == status.member
        lines.add_row(
            peer.name + (" (this one)" if own else ""),
            peer.state,
            str(peer.round),
            "" if own else "never" if peer.heard is None else f"{peer.heard:.0f} s ago",
            "" if own else "yes" if peer.connected else "no",
            "" if own else bytes_in_words(peer.sent),
            "" if own else bytes_in_words(peer.received),
        )
    console.print(lines)
    for line in status.refusals:
        console.print(line, markup=False)


@dataclass(frozen=True)
class LeaveConfig:
    """Leave a run for good: this member's share of the model goes to a neighbour, and the others go on without it.

    The dpps federation join of this member must be running. To come back later, do not leave: Ctrl-C, and the same dpps federation join again.

    Example: dpps federation leave run
    """

    run: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder of the run."""
    wait: float = 600.0
    """Seconds to wait until it has left; 0 does not wait."""


def leave(arguments: list[str]) -> int:
    """Ask the running process to leave."""
    config = parse_options(LeaveConfig, arguments, "dpps federation leave")
    console = plain_console()
    status = read_status(config.run)
    if not status.alive:
        over = "it takes no further part already"
        more = "leaving means to hand its share over; start its dpps federation join again, then ask again"
        raise UsageError(
            f"dpps federation leave {config.run}: no process of {status.member} is running there (it is {status.state}), and "
            + (over if status.state in (FINISHED, LEFT) else more)
        )
    write_private(config.run / LEAVE, b"")
    console.print(f"{status.member} was asked to leave after its current round", markup=False)
    until = time.monotonic() + config.wait
    while time.monotonic() < until:
        status = read_status(config.run)
        if not status.alive:
            console.print(
                f"{status.member}: {status.state}, after round {status.round} of {status.rounds}",
                markup=False,
            )
            return DONE if status.state == LEFT else FAILED
        time.sleep(0.2)
    if config.wait == 0:
        return DONE
    raise RunError(
        f"{status.member} has not left within {config.wait:g} seconds (--wait): it does so when its round ends; "
        f"dpps federation status {config.run} shows it"
    )
