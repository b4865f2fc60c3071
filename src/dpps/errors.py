"""What can go wrong, in two kinds: the request was wrong, or the run failed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Real

MOST_NAMES = 15
"""That a message lists."""


class DppsError(Exception):
    """Base of every error this package raises on purpose; its message is one line a user can act on."""


class UsageError(DppsError, ValueError):
    """The request is wrong (exit code 2): names the value, what is allowed and the remedy."""


class MismatchError(UsageError):
    """A file does not suit its schema. Whoever may change the schema has two remedies, the second of which is `declare`; everybody
    else has one, and reads `of_file`."""

    def __init__(self, words: str, declare: str = "") -> None:
        super().__init__(f"{words}, or {declare}" if declare else words)
        self.of_file = words


class RunError(DppsError, RuntimeError):
    """The run failed (exit code 1): says what happened and what is safe on disk."""


class PeerError(RunError):
    """Something another process did. Its words hold nothing of this process's data, so they may be told to all."""


def unknown(kind: str, value: object, allowed: Iterable[str]) -> UsageError:
    """The error for a name that does not exist, with the nearest one that does."""
    names = list(allowed)
    near = get_close_matches(str(value), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], f"... ({len(names)} in all)"]
    return UsageError(f"unknown {kind} {value!r}: choose one of {', '.join(shown)}{hint}")


def is_number(value: object) -> bool:
    """Whether what a user gave can be compared with numbers."""
    return isinstance(value, Real)


def quoted(names: Sequence[str]) -> str:
    """Names of a user's own, each in quotes, for they may hold commas; of many the first."""
    more = f", ... ({len(names)} in all)" if len(names) > MOST_NAMES else ""
    return ", ".join(repr(name) for name in names[:MOST_NAMES]) + more


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """An import that fails becomes one line that names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise UsageError(f"the package {error.name} is not installed: pip install 'dpps[{extra}]'") from error
