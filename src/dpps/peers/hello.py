"""What two members say to each other before any row, and what each of them refuses.

The one who is dialled speaks first, with a fresh random number; the other answers with it, so that a recorded answer is worth
nothing. TLS has already shown who both are.
"""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpps.errors import PeerError, UsageError
from dpps.peers.federation import Federation

LARGEST_HELLO = 3 << 20
"""Bytes of a hello at most: it may hold a federation file."""
_WORD = re.compile(r"[\w .,:/+-]{0,200}")


@dataclass(frozen=True)
class Hello:
    """What one side says of itself.

    Attributes:
        federation: which run.
        epoch: of its contract.
        digest: of its contract.
        facts: what all members must have alike, by name: version, model.
        nonce: a random number; in an answer, that of the other side.
        file: the federation file, for one who has an older epoch.
    """

    federation: str
    epoch: int
    digest: str
    facts: Mapping[str, str]
    nonce: str
    file: str = ""

    @classmethod
    def of(cls, federation: Federation, facts: Mapping[str, str], nonce: str = "") -> "Hello":
        """What a member with this contract says."""
        return cls(
            federation.id, federation.epoch, federation.digest, dict(facts), nonce or secrets.token_hex(16)
        )

    def encoded(self) -> bytes:
        """For the wire."""
        return json.dumps(self.__dict__).encode()

    @classmethod
    def decoded(cls, content: bytes) -> "Hello":
        """What came over the wire.

        Raises:
            PeerError: it is something else.
        """
        if len(content) > LARGEST_HELLO:
            raise PeerError(
                f"its first message has {len(content)} bytes and a hello has at most {LARGEST_HELLO}"
            )
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            raise PeerError("its first message is no hello") from None
        kinds = {"federation": str, "epoch": int, "digest": str, "facts": dict, "nonce": str, "file": str}
        if type(found) is not dict or {k: type(v) for k, v in found.items()} != kinds:
            raise PeerError("its first message is no hello")
        words = [
            *found["facts"],
            *found["facts"].values(),
            *(found[k] for k in ("federation", "digest", "nonce")),
        ]
        if len(words) > 100 or not all(type(w) is str and _WORD.fullmatch(w) for w in words):
            raise PeerError("its first message is no hello")
        return cls(**found)


def refuse_other(own: Hello, theirs: Hello) -> None:
    """Refuse one of another run, another version or another model; epochs are looked at by `newer_file`.

    Raises:
        PeerError: one line that names what differs.
    """
    if theirs.federation != own.federation:
        raise PeerError(f"wrong run: it is of federation {theirs.federation}, here is {own.federation}")
    for name, value in own.facts.items():
        said = theirs.facts.get(name, "nothing")
        if said != value:
            raise PeerError(f"other {name}: it has {said}, here is {value}")
    if theirs.epoch == own.epoch and theirs.digest != own.digest:
        raise PeerError(f"wrong epoch: its file of epoch {theirs.epoch} differs from the one here")


def newer_file(known: Federation, theirs: Hello) -> Federation | None:
    """The later epoch that the other side brings; None when it has the same or an older one.

    Raises:
        PeerError: it says that its epoch is later and shows no file of the convener for it.
    """
    if theirs.epoch <= known.epoch:
        return None
    try:
        file = theirs.file.encode(errors="replace")
        found = Federation.parse(file, "its federation file", known.convener_fingerprint)
        known.check_next(found, "its federation file")
    except UsageError as error:
        raise PeerError(f"wrong epoch: it says {theirs.epoch}, and {error}") from None
    if found.epoch != theirs.epoch:
        raise PeerError(f"wrong epoch: it says {theirs.epoch} and shows the file of {found.epoch}")
    return found


def refuse_replayed(asked: str, answer: Hello) -> None:
    """An answer must hold the number that was asked with."""
    if not secrets.compare_digest(asked.encode(), answer.nonce.encode()):
        raise PeerError("replayed message: its answer is to another question than the one asked here")


def verdict(**words: Any) -> bytes:
    """What the dialled side says at last: welcome, or the newer file."""
    return json.dumps(words).encode()
