"""`dpps federation`: what the convener does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table
from tyro.conf import Positional, UseAppendAction, arg

from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import wide_console
from dpps.disk import private_folder, write_aside, write_private, writing
from dpps.errors import UsageError, unknown
from dpps.peers.contract import Federation, Rules, convene, expel, read_plan, renew
from dpps.peers.identity import Key, Request, read_out

FILE, KEY = "federation.toml", "convener.key"
_USAGE = """usage: dpps federation create plan.toml --member a.csr --member b.csr --out DIR
       dpps federation expel DIR/federation.toml NAME
       dpps federation renew DIR/federation.toml
       dpps federation show DIR/federation.toml

create signs the members' requests and writes the contract of the run; plan.toml is what dpps train --print-config writes.
expel writes the next revision without a member, renew the next revision with new certificates: send the new file to all members.

dpps federation create --help has the options."""


@dataclass(frozen=True)
class CreateConfig:
    """Make the contract of a run between organisations, and the members' certificates.

    Compare every fingerprint that it prints with the member on the telephone, then send DIR/federation.toml to all members.
    convener.key stays here: it is needed again to expel a member or to renew certificates, not during the run.

    Example: dpps federation create plan.toml --member a.csr --member b.csr --out f
    """

    plan: Positional[Annotated[Path, arg(metavar="PLAN")]]
    """The options of the run: dpps train ... --print-config > plan.toml"""
    member: UseAppendAction[Annotated[tuple[Path, ...], arg(metavar="FILE")]]
    """A member's request; once for each member, in the order of their rows."""
    out: Annotated[Path, arg(metavar="DIR")]
    """New folder for the convener's key, the certificates and federation.toml."""
    min_members: int = 2
    """The run goes on while so many members are there."""
    soft_deadline: float = 30.0
    """Seconds that a round waits for a neighbour; later its share arrives later."""
    hard_deadline: float = 300.0
    """Seconds after which the others go on without a member until it is back."""
    start_deadline: float = 3600.0
    """Seconds that the first round waits for members who have not come yet; then the run begins without them."""
    gossip_clip: float = 0.0
    """How far (L2) a neighbour's row may pull at most, against members that send nonsense; 0 = no limit."""
    days: int = 365
    """How long the certificates hold."""
    key: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """convener.key of an earlier federation, which the members know already; by default a new one is made."""


@dataclass(frozen=True)
class ExpelConfig:
    """Write the next revision of a federation without a member. All members need the new file; older ones are refused then."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """federation.toml, with convener.key beside it."""
    name: Positional[Annotated[str, arg(metavar="NAME")]]
    """Who is expelled."""


@dataclass(frozen=True)
class RenewConfig:
    """Write the next revision of a federation with new certificates of the same keys."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """federation.toml, with convener.key beside it."""
    days: int = 365
    """How long they hold."""


@dataclass(frozen=True)
class ShowConfig:
    """Check a federation file and print who is in it."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """federation.toml"""


def main(arguments: list[str]) -> int:
    """Do what the convener asks."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return DONE
    commands = {"create": _create, "expel": _expel, "renew": _renew, "show": _show}
    if arguments[0] not in commands:
        raise unknown("command of dpps federation", arguments[0], commands)
    commands[arguments[0]](arguments[1:])
    return DONE


def _create(arguments: list[str]) -> None:
    config = parse_options(CreateConfig, arguments, "dpps federation create")
    if (config.out / FILE).exists():
        raise UsageError(f"--out {config.out} already holds a federation: choose another folder")
    requests = [Request.read(path) for path in config.member]
    plan, schema = read_plan(config.plan, len(requests))
    rules = Rules(
        config.min_members,
        config.soft_deadline,
        config.hard_deadline,
        config.start_deadline,
        config.gossip_clip,
    )
    rules.check(len(requests))
    key, existing = None if config.key is None else Key.read(config.key), config.out / KEY
    with writing(config.out):
        private_folder(config.out)
    if existing.exists():
        found = Key.read(existing)
        if key is not None and key.fingerprint != found.fingerprint:
            raise UsageError(f"--key {config.key}: {existing} is another key; choose another --out")
        key = found
    elif key is not None:
        write_private(existing, key.pem())
    else:
        key = Key.make(existing)
    made = convene(plan, requests, key, rules=rules, schema=schema, days=config.days)
    _write(made, config.out / FILE)
    _tell(made, config.out / FILE)
    wide_console().print(
        f"Compare the fingerprints with the members on the telephone, then send {config.out / FILE} to each of them. "
        f"{existing} stays here.",
        markup=False,
    )


def _expel(arguments: list[str]) -> None:
    config = parse_options(ExpelConfig, arguments, "dpps federation expel")
    found, key = _opened(config.file)
    _write_next(expel(found, config.name, key), config.file)


def _renew(arguments: list[str]) -> None:
    config = parse_options(RenewConfig, arguments, "dpps federation renew")
    found, key = _opened(config.file)
    _write_next(renew(found, key, config.days), config.file)


def _show(arguments: list[str]) -> None:
    path = parse_options(ShowConfig, arguments, "dpps federation show").file
    _tell(Federation.read(path), path)


def _opened(path: Path) -> tuple[Federation, Key]:
    return Federation.read(path), Key.read(path.parent / KEY)


def _write_next(federation: Federation, path: Path) -> None:
    _write(federation, path)
    _tell(federation, path)
    wide_console().print(
        f"Send {path} to every member: dpps join takes the new revision from whoever has it, and refuses older ones.",
        markup=False,
    )


def _write(federation: Federation, path: Path) -> None:
    with writing(path):
        for member in federation.members:
            write_aside(path.parent / f"{member.name}.crt", member.pem)
        write_aside(path, federation.to_toml().encode())


def _tell(federation: Federation, path: Path) -> None:
    console, plan = wide_console(), federation.plan
    console.print(f"[bold]{path}[/]  federation {federation.id}, revision {federation.revision}")
    promised = {k: plan[k] for k in ("epsilon", "delta", "noise-multiplier", "budget") if k in plan}
    console.print(
        f"plan         {plan['algorithm']}, model {plan['model']}, topology {plan['topology']}, {plan['epochs']} epochs"
    )
    words = ", ".join(f"{name} {value:g}" for name, value in promised.items())
    console.print(f"privacy      unit {plan['unit']}{': ' if words else ''}{words}")
    console.print(f"convener     {read_out(federation.convener_fingerprint)}")
    lines = Table(box=None, pad_edge=False)
    for title in ("member", "dialled at", "certificate until", "fingerprint"):
        lines.add_column(title, overflow="fold")
    for member in federation.members:
        until = "expelled" if member.expelled else f"{member.certificate.not_valid_after_utc:%Y-%m-%d}"
        lines.add_row(member.name, member.address or "dials out", until, read_out(member.fingerprint))
    console.print(lines)
