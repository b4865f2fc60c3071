"""`dpps member`: who an organisation is in a run between organisations."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.errors import unknown
from dpps.peers.identity import REQUEST, Identity, Request, read_out

_USAGE = """usage: dpps member init --name NAME [--listen HOST:PORT] --out DIR
       dpps member show DIR

init makes a key that never leaves DIR, and a request for the convener (DIR/member.csr); it prints a fingerprint to read out on the
telephone. show prints the fingerprint again.

dpps member init --help has the options."""


@dataclass(frozen=True)
class InitConfig:
    """Make the key of a member, and a request for the convener's certificate.

    Send DIR/member.csr to the convener, and compare the fingerprint on the telephone. member.key stays where it is.

    Example: dpps member init --name hospital-b --listen 0.0.0.0:7443 --out me
    """

    name: Annotated[str, arg(metavar="NAME")]
    """Of the organisation, for all to see: small letters, digits and hyphens."""
    out: Annotated[Path, arg(metavar="DIR")]
    """New folder for key and request."""
    listen: Annotated[str, arg(metavar="HOST:PORT")] = ""
    """Address and port to listen at; without it this member only dials out (behind a firewall)."""
    address: Annotated[str, arg(metavar="HOST:PORT")] = ""
    """Where the others reach it, when that differs: behind a port forwarding, or with --listen 0.0.0.0 (default then: this machine's name)."""


@dataclass(frozen=True)
class ShowConfig:
    """Print a member's fingerprint again."""

    folder: Positional[Annotated[Path, arg(metavar="DIR")]]
    """What dpps member init wrote."""


def main(arguments: list[str]) -> int:
    """Make or show an identity."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return DONE
    if arguments[0] == "init":
        config = parse_options(InitConfig, arguments[1:], "dpps member init")
        _say(Identity.make(config.out, config.name, config.listen, config.address))
        return DONE
    if arguments[0] == "show":
        _say(Identity.open(parse_options(ShowConfig, arguments[1:], "dpps member show").folder))
        return DONE
    raise unknown("command of dpps member", arguments[0], ("init", "show"))


def _say(identity: Identity) -> None:
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
