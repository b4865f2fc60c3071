"""The shared secret: who knows it belongs to the run. What processes prove with it, and what they sign with it.

A process that joins shows by an HMAC over everything that was said that it knows the secret. The addresses at which the processes
then connect to each other go through the same meeting point, where a stranger could exchange them; so they are signed, too,
with a key that holds for this start only.
"""

import hashlib
import hmac
import json
import math
import os
import secrets
import string
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from dpps.errors import PeerError, UsageError

SECRET = "DPPS_SECRET"
BITS = 128
_ALPHABETS = (
    string.digits,
    string.hexdigits.lower(),
    string.ascii_lowercase,
    string.ascii_letters + string.digits,
)
_DISTINCT = 8  # of 32 random hexadecimal digits, fewer are different once in 25 million times


def make_secret() -> str:
    """A new secret of 256 random bits, as text."""
    return secrets.token_hex(32)


def read_secret() -> bytes:
    """$DPPS_SECRET; empty when it is not set.

    Raises:
        UsageError: it is too short to keep anybody out.
    """
    text = os.environ.get(SECRET, "")
    check_secret(text)
    return text.encode()


def check_secret(text: str) -> None:
    """Refuse a secret that somebody who recorded one handshake could find by trying; an empty one is none at all."""
    bits = _most_bits(text)
    if text and bits < BITS:
        raise UsageError(
            f"${SECRET} has at most {bits:.0f} bits: it must have {BITS} or more, because a recorded handshake lets anybody try "
            "secrets at leisure; make one with: dpps secret"
        )


def _most_bits(text: str) -> float:
    """What a random text of this length and alphabet would have; words that people choose have less."""
    alphabet = next((len(a) for a in _ALPHABETS if set(text) <= set(a)), len(string.printable))
    return len(text) * math.log2(alphabet) if len(set(text)) >= _DISTINCT else 0.0


class Identity:
    """What one process proves to the others at this start: that it knows the secret and has heard what they have heard.

    Args:
        secret: what all know; without one the proofs show only that all have heard the same.
        said: what every process said at the meeting point, a random number of its own included.
    """

    def __init__(self, secret: bytes, said: list[str]) -> None:
        self._secret = secret
        self.transcript = hashlib.sha256(json.dumps(said).encode()).digest()

    def proof(self, *what: object) -> bytes:
        """An HMAC over the transcript and `what`."""
        return hmac.digest(self._secret, self.transcript + repr(what).encode(), "sha256")

    def proves(self, claimed: bytes, *what: object) -> bool:
        """Whether `claimed` is the proof of `what`, compared in constant time."""
        return hmac.compare_digest(claimed, self.proof(*what))


class SignedStore(Store):
    """A key-value store of which only what members have put down is believed.

    torch.distributed reads the addresses of the peers from it. Whoever reaches the meeting point can write there; what does not
    bear a signature over its key and this start's transcript is refused before torch.distributed sees it.
    """

    def __init__(self, store: Any, identity: Identity) -> None:
        super().__init__()
        self._store, self._identity = store, identity
        self.read: dict[str, bytes] = {}
        """Everything that was read, by key."""
        self.refused: PeerError | None = None
        """What was refused last."""

    def set(self, key: str, value: str | bytes) -> None:
        """Put down a value with its signature."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._identity.proof("store", key, data) + data)

    def get(self, key: str) -> bytes:
        """The value of a key.

        Raises:
            PeerError: somebody without the secret has written it.
        """
        signed = self._store.get(key)
        proof, data = signed[:32], signed[32:]
        if not self._identity.proves(proof, "store", key, data):
            self.refused = PeerError(
                f"the address of rank {key.rpartition('/')[2]} at the meeting point is not from a process of this run: somebody "
                "without the secret has changed it; nothing was sent"
            )
            raise self.refused
        self.read[key] = data
        return bytes(data)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there."""
        _ = self._store.wait(keys, timeout) if timeout else self._store.wait(keys)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return bool(self._store.check(keys))

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` take at most."""
        self._store.set_timeout(timeout)


def digest(read: Mapping[str, bytes]) -> str:
    """Of everything that was read: two processes that connected by the same addresses have the same."""
    found = [(key, value.hex()) for key, value in sorted(read.items())]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
