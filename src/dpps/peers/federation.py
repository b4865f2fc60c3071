"""The contract of a run between organisations: one file, signed by the convener, numbered by epoch.

Everything that a run rests on is in it, so nothing is negotiated at the start or after a crash. The second line of the file has the
signature of all bytes below it, and the key: nothing below is looked at before the signature was verified.
A later epoch may expel members or renew certificates; the rest stays.
"""

import base64
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dpps.errors import UsageError, unknown
from dpps.peers.identity import (
    Identity,
    Key,
    check_address,
    check_name,
    encoded_point,
    fingerprint,
    key_of_point,
    verify,
)
from dpps.peers.values import base64_of, certificate_in, number_in, plain_table, text_in, toml_lines, whole_in
from dpps.topology import Topology, parse
from dpps.version import __version__

FORMAT = 2
_SIGNED = b"dpps federation 2\n"
_TITLE = (
    "# The contract of a run between organisations (dpps federation create). Any change breaks the signature."
)
_HEAD = re.compile(rb"# [^\n]{1,200}\n# signature ([A-Za-z0-9+/=]{1,200}) by ([A-Za-z0-9+/=]{88})\n")
LARGEST_FILE = 1 << 20
"""Bytes of a federation file that are read at most."""


@dataclass(frozen=True)
class Contact:
    """One member, as the others know it."""

    name: str
    address: str
    """HOST:PORT at which it is dialled; empty when it only dials out."""
    certificate: x509.Certificate
    expelled: bool = False

    @property
    def key(self) -> ec.EllipticCurvePublicKey:
        """Its public key: what it signs acknowledgements with, and what TLS is pinned to."""
        found = self.certificate.public_key()
        assert isinstance(found, ec.EllipticCurvePublicKey)  # refused otherwise when the file was read
        return found

    @property
    def fingerprint(self) -> str:
        """Of its public key."""
        return fingerprint(self.key)

    @property
    def pem(self) -> bytes:
        """Its certificate, for TLS."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def to_table(self) -> dict[str, Any]:
        """For the file."""
        return {
            "name": self.name,
            "address": self.address,
            "fingerprint": self.fingerprint,
            "expelled": self.expelled,
            "certificate": base64_of(self.certificate),
        }


@dataclass(frozen=True)
class Rules:
    """How the members deal with those who are late or gone.

    Attributes:
        min_members: the run goes on while so many are there.
        soft_deadline: seconds that a round waits for a neighbour.
        hard_deadline: seconds after which a silent neighbour is taken to be away.
        start_deadline: seconds that the first round waits for members who have not come yet.
        gossip_clip: how far (L2) a neighbour's row may pull at most, against members that send nonsense; 0: no limit.
    """

    min_members: int = 2
    soft_deadline: float = 30.0
    hard_deadline: float = 300.0
    start_deadline: float = 3600.0
    gossip_clip: float = 0.0

    def check(self, members: int) -> None:
        """Refuse what cannot be kept."""
        if not 2 <= self.min_members <= members:
            raise UsageError(
                f"--min-members is {self.min_members}: it must be 2 to the number of members, {members}"
            )
        if not 0 < self.soft_deadline <= self.hard_deadline < float("inf"):
            raise UsageError(
                f"--soft-deadline is {self.soft_deadline} and --hard-deadline {self.hard_deadline}: both are seconds, the first "
                "above 0 and at most the second"
            )
        if not 0 <= self.start_deadline < float("inf"):
            raise UsageError(f"--start-deadline is {self.start_deadline}: it is seconds, 0 or more")
        if not 0 <= self.gossip_clip < float("inf"):
            raise UsageError(f"--gossip-clip is {self.gossip_clip}: it must be 0 (no limit) or more")

    def to_table(self) -> dict[str, Any]:
        """For the file."""
        return {name.replace("_", "-"): getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Federation:
    """The contract. Row k of the network belongs to member k, also when others are expelled."""

    id: str
    epoch: int
    version: str
    """Of dpps: all members run the same."""
    plan: Mapping[str, Any]
    """The options of `dpps train`, without paths."""
    schema: str
    """What the members' tables mean, as `dpps data describe` writes it; empty where the plan needs none."""
    members: tuple[Contact, ...]
    rules: Rules
    convener: x509.Certificate
    signature: bytes = field(default=b"", repr=False)

    # Files

    @classmethod
    def parse(cls, content: bytes, where: str = "the federation file", convener: str = "") -> "Federation":
        """What a file says, its signature checked first.

        Args:
            content: the file.
            where: what messages call it.
            convener: fingerprint of the only key that may have signed it; without it any may.

        Raises:
            UsageError: it is too large, not such a file, or not as the convener signed it.
        """
        signature, body = _verified(content, where, convener)
        try:
            table = tomllib.loads(body.decode())
        except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{where} is not TOML: {error}") from error
        if table.get("format") != FORMAT:
            raise UsageError(
                f"{where} has format {table.get('format')!r} and this version reads {FORMAT}: is it a federation file?"
            )
        try:
            found = cls(
                id=text_in(table["id"]),
                epoch=whole_in(table["epoch"]),
                version=text_in(table["dpps"]),
                plan=plain_table(table["plan"]),
                schema=text_in(table["schema"]),
                members=tuple(_contact(each) for each in table["members"]),
                rules=Rules(**{k.replace("-", "_"): number_in(v) for k, v in table["rules"].items()}),
                convener=certificate_in(table["convener"]),
                signature=signature,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{where} is damaged ({error}): ask the convener for it again") from error
        if found._body() != body:
            other = "" if found.version == __version__ else f" (it is of dpps {found.version})"
            raise UsageError(
                f"{where} says what a federation file does not say{other}: ask the convener for it again"
            )
        found._check_certificates(where)
        found.rules.check(len(found.members))
        return found

    @classmethod
    def read(cls, path: Path) -> "Federation":
        """The file at a path."""
        try:
            with path.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        return cls.parse(content, str(path))

    def to_table(self) -> dict[str, Any]:
        """What it says."""
        return {
            "format": FORMAT,
            "id": self.id,
            "epoch": self.epoch,
            "dpps": self.version,
            "schema": self.schema,
            "convener": base64_of(self.convener),
            "plan": dict(self.plan),
            "rules": self.rules.to_table(),
            "members": [member.to_table() for member in self.members],
        }

    def to_toml(self) -> str:
        """The file."""
        signature, key = (
            base64.b64encode(each).decode() for each in (self.signature, encoded_point(self._key))
        )
        return f"{_TITLE}\n# signature {signature} by {key}\n{self._body().decode()}"

    def _body(self) -> bytes:
        """What is signed."""
        table = self.to_table()
        lines = toml_lines({k: v for k, v in table.items() if not isinstance(v, dict | list)})
        for name in ("plan", "rules"):
            lines += ["", f"[{name}]", *toml_lines(table[name])]
        for member in table["members"]:
            lines += ["", "[[members]]", *toml_lines(member)]
        return ("\n".join(lines) + "\n").encode()

    @cached_property
    def digest(self) -> str:
        """Stands for the content of this epoch."""
        return hashlib.sha256(self._body()).hexdigest()

    @cached_property
    def fixed_digest(self) -> str:
        """Stands for what no epoch changes: plan, schema, rules, and who has which row."""
        table = self.to_table()
        names = [(m.name, m.fingerprint) for m in self.members]
        fixed = [table[k] for k in ("id", "dpps", "plan", "schema", "rules")]
        return hashlib.sha256(json.dumps([fixed, names], sort_keys=True).encode()).hexdigest()

    def signed(self, key: Key) -> "Federation":
        """The same, with the convener's signature."""
        if key.fingerprint != self.convener_fingerprint:
            raise UsageError(
                "this key is not the convener's of the federation: use the key beside its first file"
            )
        return replace(self, signature=key.sign(_SIGNED + self._body()))

    def _check_certificates(self, where: str) -> None:
        if not verify(self._key, self.signature, _SIGNED + self._body()):
            raise UsageError(f"{where} is signed by another key than its convener's: ask for the file again")
        for member in self.members:
            try:
                member.certificate.verify_directly_issued_by(self.convener)
            except (ValueError, TypeError, InvalidSignature) as error:
                raise UsageError(
                    f"{where}: the certificate of {member.name} is not the convener's: ask for the file again"
                ) from error

    # Who is in it

    @property
    def convener_fingerprint(self) -> str:
        """Of the convener's public key."""
        return fingerprint(self._key)

    @property
    def _key(self) -> ec.EllipticCurvePublicKey:
        key = self.convener.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)  # refused otherwise when the file was read
        return key

    @property
    def convener_pem(self) -> bytes:
        """The convener's certificate, for TLS."""
        return self.convener.public_bytes(serialization.Encoding.PEM)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all members, in the order of rows; also of those expelled."""
        return tuple(member.name for member in self.members)

    @property
    def active(self) -> frozenset[str]:
        """Names of the members that are not expelled."""
        return frozenset(member.name for member in self.members if not member.expelled)

    def row(self, name: str) -> int:
        """The row of the network that belongs to a member."""
        if name not in self.names:
            raise unknown("member", name, self.names)
        return self.names.index(name)

    def member(self, name: str) -> Contact:
        """One member."""
        return self.members[self.row(name)]

    def by_fingerprint(self, digits: str) -> Contact | None:
        """The member with this key, also if expelled; None: a stranger."""
        return next((m for m in self.members if m.fingerprint == digits), None)

    def topology(self) -> Topology:
        """Who sends to whom."""
        return parse(str(self.plan["topology"]), len(self.members))

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """The rows that exchange messages, in either direction, the smaller first."""
        topology = self.topology()
        found = set()
        for t in range(topology.examined):
            weights = topology.weights(t)
            links = zip(weights.senders.tolist(), weights.receivers.tolist(), strict=True)
            found |= {(min(i, j), max(i, j)) for i, j in links if i != j}
        return frozenset(found)

    def neighbours(self, name: str) -> frozenset[str]:
        """The members with whom this one exchanges messages, in either direction: the only ones it connects to."""
        row = self.row(name)
        rows = {j if i == row else i for i, j in self.pairs if row in (i, j)}
        return frozenset(self.names[k] for k in rows) & self.active

    # Checks at home, before anybody is connected to

    def check_for(self, identity: Identity) -> Contact:
        """Whether a member may run this contract here and now.

        Raises:
            UsageError: it is not in it, was expelled, its certificate has expired, or this is another version of dpps.
        """
        found = self.by_fingerprint(identity.fingerprint)
        if found is None:
            raise UsageError(
                f"{identity.name} with the key in {identity.folder} is not a member of this federation "
                f"({', '.join(self.names)}): "
                "send the convener its member.csr"
            )
        if found.expelled:
            raise UsageError(
                f"{found.name} was expelled from this federation (epoch {self.epoch}): ask the convener"
            )
        now, until = datetime.now(UTC), found.certificate.not_valid_after_utc
        if now < (since := found.certificate.not_valid_before_utc):
            raise UsageError(
                f"the certificate of {found.name} is valid from {since:%Y-%m-%d} on, and the clock of this machine says "
                f"{now:%Y-%m-%d}: set the clock"
            )
        if now > until:
            raise UsageError(
                f"the certificate of {found.name} was valid until {until:%Y-%m-%d}: ask the convener for a renewal "
                "(dpps federation renew)"
            )
        if self.version != __version__:
            raise UsageError(
                f"the federation runs dpps {self.version} and this is {__version__}: install that version"
            )
        return found

    def check_next(self, following: "Federation", where: str = "the federation file") -> None:
        """Whether another file is a later epoch of this one.

        Raises:
            UsageError: it is of another federation or convener, of an older epoch, or changes what no epoch may.
        """
        if following.convener_fingerprint != self.convener_fingerprint:
            raise UsageError(
                f"{where} is signed by another convener ({following.convener_fingerprint[:16]}, known is "
                f"{self.convener_fingerprint[:16]}): ask the convener on the telephone"
            )
        if following.id != self.id:
            raise UsageError(
                f"{where} is of another federation ({following.id}, known is {self.id}): use a file of this one"
            )
        if following.epoch < self.epoch or (
            following.epoch == self.epoch and following.digest != self.digest
        ):
            raise UsageError(
                f"{where} has epoch {following.epoch} and epoch {self.epoch} is known already: use the newest file"
            )
        if following.fixed_digest != self.fixed_digest:
            raise UsageError(
                f"{where}: epoch {following.epoch} changes more than who is a member and until when: refuse "
                "it, and ask the convener"
            )
        returned = following.active - self.active
        if returned:
            raise UsageError(
                f"{where} takes {', '.join(sorted(returned))} back, who was expelled: make a new federation"
            )


def _verified(content: bytes, where: str, convener: str) -> tuple[bytes, bytes]:
    """The signature of a file and the bytes that it is of.

    Raises:
        UsageError: they were not signed by the key that the file names, or that is another one than `convener`.
    """
    if len(content) > LARGEST_FILE:
        raise UsageError(f"{where} has more than {LARGEST_FILE} bytes: it is no federation file")
    head = _HEAD.match(content)
    if head is None and b"\nformat = 1\n" in content:
        raise UsageError(
            f"{where} is a contract of dpps 0.2: run it with that version, or ask the convener for a new one"
        )
    if head is None:
        raise UsageError(f"{where} is no federation file: dpps federation create writes one")
    try:
        signature, point = (base64.b64decode(each, validate=True) for each in head.groups())
        key = key_of_point(point)
    except ValueError as error:
        raise UsageError(f"{where} is damaged ({error}): ask the convener for it again") from error
    if convener and fingerprint(key) != convener:
        raise UsageError(
            f"{where} is signed by another convener ({fingerprint(key)[:16]}, known is {convener[:16]}): ask "
            "the convener on the telephone"
        )
    body = content[head.end() :]
    if not verify(key, signature, _SIGNED + body):
        raise UsageError(f"{where} was changed after the convener signed it: ask the convener for it again")
    return signature, body


def _contact(table: Any) -> Contact:
    address = text_in(table["address"])
    if address:
        check_address("an address", address)
    name, expelled = check_name(text_in(table["name"])), table["expelled"]
    if type(expelled) is not bool:
        raise TypeError("expelled is neither true nor false")
    return Contact(name, address, certificate_in(table["certificate"]), expelled)
