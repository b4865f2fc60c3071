"""What can go wrong, in two kinds: the request was wrong, or the run failed."""

from collections.abc import Iterable
from difflib import get_close_matches


class DppsError(Exception):
    """Base of every error this package raises on purpose; its message is one line a user can act on."""


class UsageError(DppsError, ValueError):
    """The request is wrong (exit code 2): names the value, what is allowed and the remedy."""


class RunError(DppsError, RuntimeError):
    """The run failed (exit code 1): says what happened and what is safe on disk."""


class PeerError(RunError):
    """Something another process did. Its words hold nothing of this process's data, so they may be told to all."""


def unknown(kind: str, value: object, allowed: Iterable[str]) -> UsageError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = list(allowed)
    near = get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {value!r}: choose one of {', '.join(names)}{hint}")
