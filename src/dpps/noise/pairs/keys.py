"""Secrets that two nodes share: agreed by X25519 between their identity keys, one key for each pair, run and attempt.

The same pair noise must never be under two different messages: their difference would have only the independent noise. So a
pair's key is derived from (secret of the two, run, attempt, both nodes), the attempt being made of fresh random numbers of every
process at every start, and within an attempt noise is addressed by (round, part) and given out once for each round.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dpps.disk import private_folder, write_private
from dpps.errors import RunError, UsageError

_ROUNDS = 1 << 48
_ALIVE: "weakref.WeakSet[PairKeys]" = weakref.WeakSet()
_CLAIMING = threading.Lock()  # of all keys: copies of one share what was given out


class IdentityKey:
    """The X25519 key (32 bytes) of a process, which makes it a partner. Only its public half ever leaves."""

    def __init__(self, key: bytes | None = None) -> None:
        self._private = (
            X25519PrivateKey.generate() if key is None else X25519PrivateKey.from_private_bytes(key)
        )

    @classmethod
    def kept_in(cls, path: Path) -> "IdentityKey":
        """The key in a file that only its owner can read; made when there is none. RunError: it is no key, or others may read it."""
        if not path.exists():
            private_folder(path.parent)
            write_private(path, X25519PrivateKey.generate().private_bytes_raw())
        try:
            data, mode = path.read_bytes(), path.stat().st_mode
        except OSError as error:
            raise RunError(f"the identity key {path} cannot be read: {error.strerror}") from error
        if len(data) != 32:
            raise RunError(
                f"{path} holds {len(data)} bytes and an identity key has 32: restore it, or start a new run"
            )
        if mode & 0o077:
            raise RunError(
                f"others may read the identity key {path}, and with it the noise: chmod 600, and start a new run with a new key"
            )
        return cls(data)

    @property
    def public(self) -> bytes:
        """What the others need to know."""
        return self._private.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )

    def secret_with(self, public: bytes) -> bytes:
        """The secret shared with the owner of a public key."""
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise UsageError(
                f"a partner's public key {public.hex()} is not one ({error}): it must be 32 bytes of an X25519 key"
            ) from error


class PairKeys:
    """The keys of one attempt at one run, for all pairs that have a node here.

    Args:
        identity: of this process.
        publics: by node, the public key of the process that holds it.
        run: which run; equal everywhere.
        attempt: which start of it; equal everywhere and never used before, so made of fresh random numbers of everybody.
    """

    def __init__(self, identity: IdentityKey, publics: Sequence[bytes], run: str, attempt: bytes) -> None:
        if len(attempt) < 16:
            raise UsageError(f"an attempt of {len(attempt)} bytes: 16 or more, from fresh random numbers")
        self._identity, self._publics = identity, publics
        self._context = b"dpps pair noise 1\0" + run.encode() + b"\0" + attempt
        self._keys: dict[tuple[int, int], bytes] = {}
        self._secrets: dict[bytes, bytes] = {}
        self._process, self._next = os.getpid(), 0
        _ALIVE.add(self)
        self.together = False
        """Whether all nodes must be here, because nobody else has these keys."""

    def __deepcopy__(self, _: object = None) -> "PairKeys":
        return self  # a copy with a counter of its own would give out the same rounds again

    __copy__ = __deepcopy__

    @property
    def publics(self) -> list[str]:
        """By node, the public key of its process: what a resumed run compares with its first start."""
        return [key.hex() for key in self._publics]

    @classmethod
    def alone(cls, nodes: int) -> "PairKeys":
        """For a run whose nodes are all in this process; nobody else knows a thing."""
        identity = IdentityKey()
        keys = cls(identity, [identity.public] * nodes, "alone", os.urandom(32))
        keys.together = True
        return keys

    def claim(self, round_: int) -> None:
        """Take the noise of a round, once. RunError: it was taken before, or by the process that this one was forked from."""
        if os.getpid() != self._process:
            raise RunError(
                "pair noise is not shared with a forked process: start the run in the process that makes the keys"
            )
        with _CLAIMING:
            if not self._next <= round_ < _ROUNDS:
                raise RunError(
                    f"the pair noise of round {round_} was given out before and must never be under two messages: nothing was sent; "
                    "resume the run, so that the partners agree on new keys"
                )
            self._next = round_ + 1

    def key(self, i: int, j: int) -> bytes:
        """Of the pair of nodes, 32 bytes; one of them is held here, and the other's holder finds the same."""
        pair = (min(i, j), max(i, j))
        if pair not in self._keys:
            first, second = (self._publics[node] for node in pair)
            mine = self._identity.public
            if mine not in (first, second):
                raise UsageError(
                    f"nodes {pair[0]} and {pair[1]} are both elsewhere: their secret is not known here"
                )
            other = second if first == mine else first
            if other not in self._secrets:
                self._secrets[other] = self._identity.secret_with(other)
            info = self._context + first + second + pair[0].to_bytes(8, "big") + pair[1].to_bytes(8, "big")
            self._keys[pair] = HKDF(hashes.SHA256(), 32, salt=None, info=info).derive(self._secrets[other])
        return self._keys[pair]


def _spend_all() -> None:
    """In a forked process: process numbers are used again, so comparing them does not tell a grandchild from its forebear."""
    for keys in list(_ALIVE):
        keys._process = 0  # no process has this number


os.register_at_fork(after_in_child=_spend_all)


class RoundStream:
    """The bytes of one pair's key in one round: AES-256 in counter mode, addressed by (round, part)."""

    def __init__(self, key: bytes, round_: int) -> None:
        self._key, self._round = key, round_

    def __call__(self, part: int, count: int) -> bytes:
        """The first bytes of a part. Parts are 2^64 blocks apart, rounds 2^80: they never meet."""
        start = (self._round << 80 | part << 64).to_bytes(16, "big")
        return Cipher(algorithms.AES(self._key), modes.CTR(start)).encryptor().update(bytes(count))
