"""`dpps secret`: a new secret for the processes of a run."""

from dpps.cli import DONE
from dpps.errors import UsageError
from dpps.transport.cluster import SECRET, make_secret

_USAGE = f"""usage: dpps secret

Prints 256 random bits. All processes of a run need the same ones, and nobody else: pass them on by telephone or a
password manager, and set them on every machine with: export {SECRET}=..."""


def main(arguments: list[str]) -> int:
    """Print a new secret."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_USAGE)
    elif arguments:
        raise UsageError(f"dpps secret takes no options and {arguments[0]!r} is one: leave it out")
    else:
        print(make_secret())
    return DONE
