"""The contract of a run between organisations: one file, signed by the convener, numbered by revision.

Everything that a run rests on is in it, so nothing is negotiated at the start or after a crash. The second line of the file has the
signature of all bytes below it, and the key: nothing below is parsed before the signature was verified.
A later revision may expel members or renew certificates; the rest stays.
"""

import base64
import hashlib
import json
import logging
import re
import secrets
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dpps.data.schema import read_schema
from dpps.errors import UsageError, unknown
from dpps.learning.algorithms import ALGORITHMS
from dpps.models import shared_prefixes
from dpps.noise.pairs.keys import PairKeys
from dpps.peers.identity import (
    Identity,
    Key,
    Request,
    check_address,
    check_name,
    encoded_point,
    fingerprint,
    issued_by,
    key_of_point,
    verify,
)
from dpps.privacy.partners import Pairs, Trust
from dpps.privacy.units import UNITS, PrivacyOptions
from dpps.registry import is_own
from dpps.runs.options import OWN_DATA, RETIRED, Options, read_config
from dpps.statistics.options import SurveyOptions
from dpps.statistics.release import topology_of
from dpps.topology import Topology, parse
from dpps.version import __version__

log = logging.getLogger(__name__)

FORMAT = 2
ABSENTEES = 1
"""Members that share noise and may be lost for good, where a plan does not say and there are enough of them."""
LARGEST_FILE = 1 << 20
"""Bytes of a federation file that are read at most."""
_SIGNED = b"dpps federation 2\n"
_TITLE = (
    "# The contract of a run between organisations (dpps federation create). Any change breaks the signature."
)
_HEAD = re.compile(rb"# [^\n]{1,200}\n# signature ([A-Za-z0-9+/=]{1,200}) by ([A-Za-z0-9+/=]{88})\n")


@dataclass(frozen=True)
class Contact:
    """One member, as the others know it."""

    name: str
    address: str
    """HOST:PORT at which it is dialled; empty when it only dials out."""
    certificate: x509.Certificate
    expelled: bool = False
    expelled_in: int = 0
    """In which revision, where members share noise; 0: not expelled, or they do not."""
    pair_key: bytes = b""
    """X25519, with which it shares noise; empty where members do not."""

    @property
    def key(self) -> ec.EllipticCurvePublicKey:
        """The public key that its signatures are verified with and TLS is pinned to."""
        return _key_in(self.certificate)

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True)
class Rules:
    """What happens when members are late or away.

    Attributes:
        min_members: the run continues while at least this many members are present.
        soft_deadline: seconds that a round waits for a neighbour.
        hard_deadline: seconds after which a silent neighbour counts as away.
        start_deadline: seconds that the first round waits for missing members.
        gossip_clip: how far (L2) a neighbour's row may pull at most, against members that send nonsense; 0: no limit.
    """

    min_members: int = 2
    soft_deadline: float = 30.0
    hard_deadline: float = 300.0
    start_deadline: float = 3600.0
    gossip_clip: float = 0.0

    def check(self, members: int) -> None:
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


@dataclass(frozen=True)
class Federation:
    """The contract. Row k of the network belongs to member k, also when others are expelled."""

    id: str
    revision: int
    version: str
    """Version of dpps, the same for all members."""
    plan: Mapping[str, Any]
    """The options of `dpps train` or `dpps stats`, without paths."""
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
                id=_of(table["id"], str),
                revision=_of(table["epoch"], int),
                version=_of(table["dpps"], str),
                plan=_plain_table(table["plan"]),
                schema=_of(table["schema"], str),
                members=tuple(_contact(each) for each in table["members"]),
                rules=Rules(**{k.replace("-", "_"): _of(v, int, float) for k, v in table["rules"].items()}),
                convener=_certificate(table["convener"]),
                signature=signature,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{where} is damaged ({error}): ask the convener for it again") from error
        if found.revision < 1 or found._body() != body:
            other = "" if found.version == __version__ else f" (it is of dpps {found.version})"
            raise UsageError(
                f"{where} says what a federation file does not say{other}: ask the convener for it again"
            )
        if not verify(_key_in(found.convener), signature, _SIGNED + body):
            raise UsageError(f"{where} is signed by another key than its convener's: ask for the file again")
        for member in found.members:
            if not issued_by(member.certificate, found.convener):
                raise UsageError(
                    f"{where}: the certificate of {member.name} is not the convener's: ask for the file again"
                )
        found.rules.check(len(found.members))
        return found

    @classmethod
    def read(cls, path: Path) -> "Federation":
        try:
            with path.open("rb") as file:
                content = file.read(LARGEST_FILE + 1)
        except OSError as error:
            raise UsageError(
                f"{path} cannot be read ({error.strerror}): name the file federation.toml, which dpps federation create writes"
            ) from error
        return cls.parse(content, str(path))

    def to_toml(self) -> str:
        signature, key = (
            base64.b64encode(each).decode()
            for each in (self.signature, encoded_point(_key_in(self.convener)))
        )
        return f"{_TITLE}\n# signature {signature} by {key}\n{self._body().decode()}"

    def _table(self) -> dict[str, Any]:
        """What the file says. Format 2 calls the revision "epoch"."""
        return {
            "format": FORMAT,
            "id": self.id,
            "epoch": self.revision,
            "dpps": self.version,
            "schema": self.schema,
            "convener": _base64(self.convener),
            "plan": dict(self.plan),
            "rules": {name.replace("_", "-"): value for name, value in vars(self.rules).items()},
            "members": [
                {
                    "name": member.name,
                    "address": member.address,
                    "fingerprint": member.fingerprint,
                    "expelled": member.expelled,
                    **({"expelled-in": member.expelled_in} if member.expelled_in else {}),
                    **({"pair-key": member.pair_key.hex()} if member.pair_key else {}),
                    "certificate": _base64(member.certificate),
                }
                for member in self.members
            ],
        }

    def _body(self) -> bytes:
        table = self._table()
        lines = _toml_lines({k: v for k, v in table.items() if not isinstance(v, dict | list)})
        for name in ("plan", "rules"):
            lines += ["", f"[{name}]", *_toml_lines(table[name])]
        for member in table["members"]:
            lines += ["", "[[members]]", *_toml_lines(member)]
        return ("\n".join(lines) + "\n").encode()

    @cached_property
    def digest(self) -> str:
        """Stands for the content of this revision."""
        return hashlib.sha256(self._body()).hexdigest()

    @cached_property
    def fixed_digest(self) -> str:
        """Stands for what no revision changes: plan, schema, rules, and who has which row and which keys."""
        table = self._table()
        names = [(m.name, m.fingerprint, *([m.pair_key.hex()] if m.pair_key else [])) for m in self.members]
        fixed = [table[k] for k in ("id", "dpps", "plan", "schema", "rules")]
        return hashlib.sha256(json.dumps([fixed, names], sort_keys=True).encode()).hexdigest()

    def signed(self, key: Key) -> "Federation":
        """The same, with the convener's signature."""
        if key.fingerprint != self.convener_fingerprint:
            raise UsageError(
                "this is not the key of the federation's convener: use the convener.key next to its first file"
            )
        return replace(self, signature=key.sign(_SIGNED + self._body()))

    # Who is in it

    @property
    def convener_fingerprint(self) -> str:
        return fingerprint(_key_in(self.convener))

    @property
    def convener_pem(self) -> bytes:
        return self.convener.public_bytes(serialization.Encoding.PEM)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all members, in the order of rows; also of those expelled."""
        return tuple(member.name for member in self.members)

    @property
    def shares_noise(self) -> bool:
        """Whether members share noise that cancels (`--trust pairs`)."""
        return bool(self.plan.get("trust") == Pairs.name)

    @property
    def asks(self) -> bool:
        """Whether the plan is one of questions (`dpps stats`), not of training."""
        return "ask" in self.plan

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
        return self.members[self.row(name)]

    def by_fingerprint(self, digits: str) -> Contact | None:
        """The member with this key, also if expelled; None: a stranger."""
        return next((m for m in self.members if m.fingerprint == digits), None)

    def topology(self) -> Topology:
        return parse(str(self.plan["topology"]), len(self.members))

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """The rows that exchange messages, in either direction, the smaller first."""
        return linked(self.topology())

    def neighbours(self, name: str) -> frozenset[str]:
        """The members with whom this one exchanges messages, in either direction: the only ones it connects to."""
        row = self.row(name)
        rows = {j if i == row else i for i, j in self.pairs if row in (i, j)}
        return frozenset(self.names[k] for k in rows) & self.active

    # Checks at home, before anybody is connected to

    def check_for(self, identity: Identity) -> Contact:
        """Whether a member may run this contract here and now. UsageError: it is not in it, was expelled, its certificate has
        expired, or this is another version of dpps."""
        found = self.by_fingerprint(identity.fingerprint)
        if found is None:
            raise UsageError(
                f"{identity.name} with the key in {identity.folder} is not a member of this federation "
                f"({', '.join(self.names)}): send the convener its member.csr"
            )
        if found.expelled:
            raise UsageError(
                f"{found.name} was expelled from this federation (revision {self.revision}): ask the convener"
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
        """Whether another file is a later revision of this one. UsageError: it is of another federation or convener, of an older
        revision, or changes what no revision may."""
        if following.convener_fingerprint != self.convener_fingerprint:
            raise _other_convener(where, following.convener_fingerprint, self.convener_fingerprint)
        if following.id != self.id:
            raise UsageError(
                f"{where} is of another federation ({following.id}, known is {self.id}): use a file of this one"
            )
        same = following.revision == self.revision
        if following.revision < self.revision or (same and following.digest != self.digest):
            raise UsageError(
                f"{where} has revision {following.revision} and revision {self.revision} is known already: "
                "use the newest file"
            )
        if following.fixed_digest != self.fixed_digest:
            raise UsageError(
                f"{where}: revision {following.revision} changes more than who is a member and until when: refuse "
                "it, and ask the convener"
            )
        both = zip(self.members, following.members, strict=True)
        if any(old.expelled and old.expelled_in != new.expelled_in for old, new in both):
            raise UsageError(
                f"{where} changes in which revision a member was expelled: refuse it, and ask the convener"
            )
        if returned := following.active - self.active:
            raise UsageError(
                f"{where} takes {', '.join(sorted(returned))} back, who was expelled: make a new federation"
            )


def linked(topology: Topology) -> frozenset[tuple[int, int]]:
    """The pairs of nodes that exchange messages, in either direction, the smaller first."""
    weights = map(topology.weights, range(topology.examined))
    links = chain.from_iterable(zip(w.senders.tolist(), w.receivers.tolist(), strict=True) for w in weights)
    return frozenset((min(i, j), max(i, j)) for i, j in links if i != j)


@dataclass(frozen=True)
class Membership:
    """The contract, as one member's half of the protocol needs it.

    Attributes:
        run: what tells this run from any other; frames of another one are refused.
        names: of all members, node k of the topology being the k-th.
        own: which of them this is.
        sign: this member's signature under a message.
        verify: whether a member (by name) has signed: (name, signature, message).
        active: names of those who are not expelled.
        neighbours: names of those whom this member exchanges messages with.
        rules: deadlines, and how many members must be present.
        revision: of the contract.
        expelled_in: by row of an expelled member, in which revision; where members share noise.
        pair_keys: what this member shares noise with the others from; None: it does not.
    """

    run: str
    names: tuple[str, ...]
    own: int
    sign: Callable[[bytes], bytes]
    verify: Callable[[str, bytes, bytes], bool]
    active: frozenset[str]
    neighbours: frozenset[str]
    rules: Rules
    revision: int = 1
    expelled_in: Mapping[int, int] = field(default_factory=dict)
    pair_keys: PairKeys | None = field(default=None, repr=False)

    @classmethod
    def of(cls, federation: Federation, identity: Identity) -> "Membership":
        keys = {member.name: member.key for member in federation.members}
        own = federation.check_for(identity)
        made = cls(
            run=federation.fixed_digest,
            names=federation.names,
            own=federation.row(own.name),
            sign=identity.key.sign,
            verify=lambda name, signature, message: verify(keys[name], signature, message),
            active=federation.active,
            neighbours=federation.neighbours(own.name),
            rules=federation.rules,
            pair_keys=_pair_keys(federation, identity, own) if federation.shares_noise else None,
        )
        return made.at(federation)

    def at(self, following: Federation) -> "Membership":
        """The same by a later revision."""
        gone = {row: each.expelled_in for row, each in enumerate(following.members) if each.expelled_in}
        return replace(self, active=following.active, revision=following.revision, expelled_in=gone)

    @property
    def name(self) -> str:
        return self.names[self.own]

    @property
    def partners(self) -> frozenset[str]:
        """Names of those whom this member talks to."""
        return self.active & self.neighbours - {self.name}


def _pair_keys(federation: Federation, identity: Identity, own: Contact) -> PairKeys:
    """The keys of all pairs that this member is one of; a federation has one attempt, as each message is made once, durably."""
    key = identity.pair_key()
    if key.public != own.pair_key:
        raise UsageError(
            f"the pair key in {identity.folder} is another one than {own.name} has in the federation file: restore it"
        )
    publics = [member.pair_key for member in federation.members]
    return PairKeys(key, publics, federation.fixed_digest, b"between organisations")


# What the convener does


def convene(
    plan: Mapping[str, Any],
    requests: Sequence[Request],
    key: Key,
    *,
    rules: Rules | None = None,
    schema: str = "",
    days: int = 365,
) -> Federation:
    """Create and sign a new federation.

    Args:
        plan: as `read_plan` has it.
        requests: of the members, in the order of their rows.
        key: of the convener.
        rules: deadlines, and how many members must be present.
        schema: what the members' tables mean.
        days: how many days the certificates are valid.
    """
    for what, found in (
        ("name", [r.name for r in requests]),
        ("key", [fingerprint(r.key) for r in requests]),
    ):
        if len(set(found)) < len(found):
            twice = next(each for each in found if found.count(each) > 1)
            raise UsageError(
                f"two requests (--member) have the {what} {twice}: every member needs one of its own; give each request once"
            )
    _check_days(days)
    rules = rules or Rules()
    rules.check(len(requests))
    if "ask" in plan and rules.gossip_clip:
        raise UsageError(
            f"--gossip-clip is {rules.gossip_clip:g} in a plan of dpps stats: clipped messages would not add up; leave it out"
        )
    own = key.certify_itself("dpps convener", max(days, 3650))
    shared = _shared_keys(plan, requests)
    members = tuple(
        Contact(r.name, r.address, key.certify(r, own, days), pair_key=pair_key)
        for r, pair_key in zip(requests, shared, strict=True)
    )
    made = Federation(secrets.token_hex(8), 1, __version__, dict(plan), schema, members, rules, own)
    for i, j in sorted(made.pairs):
        one, other = members[i], members[j]
        if not one.address and not other.address:
            raise UsageError(
                f"{one.name} and {other.name} are neighbours in the topology {plan['topology']} and neither listens: "
                "one of the two needs dpps federation key --listen, or choose another topology or order of members"
            )
    return made.signed(key)


def _shared_keys(plan: Mapping[str, Any], requests: Sequence[Request]) -> list[bytes]:
    """The keys with which members share noise; empty ones where they do not."""
    if plan.get("trust") != Pairs.name:
        return [b""] * len(requests)
    found = [request.pair_key for request in requests]
    if not all(found):
        name = requests[found.index(b"")].name
        raise UsageError(
            f"the request of {name} has no pair key, which --trust pairs needs: it is of an earlier version; ask for a new one"
        )
    if len(set(found)) < len(found):
        raise UsageError("two requests have the same pair key: every member needs one of its own")
    return found


def expel(federation: Federation, name: str, key: Key) -> Federation:
    """Create the next revision, without a member."""
    if federation.member(name).expelled:
        raise UsageError(
            f"{name} was expelled already (revision {federation.revision}): there is nothing to do"
        )
    if len(federation.active) <= federation.rules.min_members:
        raise UsageError(
            f"without {name} the number of members is {len(federation.active) - 1} and the contract needs "
            f"{federation.rules.min_members}: make a new federation"
        )
    revision = federation.revision + 1
    gone = replace(
        federation.member(name), expelled=True, expelled_in=revision if federation.shares_noise else 0
    )
    members = tuple(gone if m.name == name else m for m in federation.members)
    return replace(federation, revision=revision, members=members).signed(key)


def renew(federation: Federation, key: Key, days: int = 365) -> Federation:
    """Create the next revision, with new certificates for the same keys of all members that are not
    expelled."""
    _check_days(days)

    def renewed(member: Contact) -> Contact:
        request = Request(member.name, member.address, member.key, member.pair_key)
        return replace(member, certificate=key.certify(request, federation.convener, days))

    members = tuple(m if m.expelled else renewed(m) for m in federation.members)
    return replace(federation, revision=federation.revision + 1, members=members).signed(key)


def _check_days(days: int) -> None:
    if not 1 <= days <= 3650:
        raise UsageError(f"--days is {days}: it must be 1 to 3650")


# From the options of `dpps train` or `dpps stats` to the plan in the contract, and back to the options of one member

_MEMBERS_FOLDER = Path("data")
"""Stands for the member's own folder while the plan is checked."""


def read_plan(path: Path, members: int) -> tuple[dict[str, Any], str]:
    """The plan and the schema of a new federation, from what `--print-config` of `dpps train` or `dpps stats` wrote. A schema that
    it names is read and becomes part of the contract. UsageError: it asks for something that members who come and go cannot do."""
    if members < 2:
        said = "one --member is" if members else "no --member is"
        raise UsageError(
            f"{said} given: a federation has two or more; give --member FILE once for each of them"
        )
    table = read_config(path, "the plan")
    if "ask" in table:
        asked = SurveyOptions.from_table(table, str(path))
        _check_members(asked.nodes, members, "dpps stats")
        asked = replace(asked, schema=path.parent / asked.schema)  # which may be absolute
        return _questions(asked.for_members()), read_schema(asked.schema).to_toml()
    config = given = Options.from_toml(path)
    if config.trust == Pairs.name and config.absentees is None:
        colluders = members // 3 if config.colluders is None else config.colluders
        config = replace(config, absentees=max(0, min(ABSENTEES, members - 2 - colluders)))
    _check_plan(config, members)
    schema = ""
    if config.schema is not None:
        place = path.parent / config.schema
        config, schema = replace(config, schema=place), read_schema(place).to_toml()
    own = config.schema is not None or config.classes is not None
    config = replace(config, node_data=_MEMBERS_FOLDER if own else None, secure_noise=True).resolve()
    config.network()
    config.privacy()
    if not is_own(config.model):  # one of their own may be importable at the members only
        shared_prefixes(config.model, ALGORITHMS[config.algorithm].shares(config.shared))
    usual, common = Options().to_json(), {"schema", *given.common()}
    unread = [name for name, value in given.to_json().items() if name not in common and value != usual[name]]
    if unread:
        log.warning(
            "%s sets %s: each member chooses that itself, so it is not part of the contract",
            path,
            ", ".join(unread),
        )
    return _common(config), schema


def _questions(options: SurveyOptions) -> dict[str, Any]:
    """What all members have alike."""
    _, _, unit = options.opened()
    _check_trust(unit.trust, options.nodes)
    chosen = {"data": OWN_DATA, "topology": topology_of(options.nodes), "unit": unit.name}
    return {name: value for name, value in options.to_table().items() if name != "schema"} | chosen


def questions_for(federation: Federation, schema: Path) -> SurveyOptions:
    """What one member answers by the contract, whose schema was written to a file at home. UsageError: the plan is none that
    `read_plan` makes, whoever signed it."""
    named = "the plan in the federation file"
    asked = {
        name: value for name, value in federation.plan.items() if name not in ("data", "topology", "unit")
    }
    options = SurveyOptions.from_table(asked | {"schema": str(schema)}, named)
    _check_members(options.nodes, len(federation.members), "dpps stats")
    if _questions(options.for_members()) != dict(federation.plan) or federation.rules.gossip_clip:
        raise UsageError(f"{named} is none that dpps federation create makes: ask the convener for another")
    return options


def config_for(federation: Federation, schema: Path | None = None, **circumstances: Any) -> Options:
    """The options with which one member carries out the contract: with paths and other `circumstances` that do not change what is
    computed. UsageError: the plan is none that `read_plan` makes, whoever signed it."""
    named = "the plan in the federation file"
    config = Options.from_json(federation.plan, named, f"{named} is of another version of dpps")
    _check_plan(config, len(federation.members))
    if wrong := sorted(set(federation.plan) - set(_common(config)) - set(RETIRED)):
        raise UsageError(
            f"the plan in the federation file sets {', '.join(wrong)}: that is each member's own to choose"
        )
    if federation.shares_noise and not all(member.pair_key for member in federation.members):
        raise UsageError(
            "the plan in the federation file has --trust pairs and its members have no pair keys: it is not one of dpps federation create"
        )
    if not config.secure_noise:
        raise UsageError(
            "the plan in the federation file has no secure-noise: it is not one of dpps federation create"
        )
    return replace(config, schema=schema, **circumstances)


def _common(config: Options) -> dict[str, Any]:
    """What all members have alike."""
    return {name: value for name, value in config.common().items() if value is not None}


def _check_plan(config: Options, members: int) -> None:
    """Refuse what needs a barrier or a centre."""
    if config.algorithm not in ALGORITHMS:
        raise unknown("algorithm", config.algorithm, ALGORITHMS.names())
    _check_members(config.nodes, members, "dpps train")
    if config.declared_sizes is None:
        raise UsageError(
            "the plan has no declared-sizes: the number of rounds follows from them, and nobody is asked again at the start; add "
            "--declared-sizes N (or one per member, in their order)"
        )
    no_peers = "" if config.unit == "none" else UNITS[config.unit].no_peers
    for option, wrong, why in (
        (f"--unit {config.unit}", bool(no_peers), no_peers),
        ("--sync-every", config.sync_every > 0, "it needs all members at once"),
        (
            f"--algorithm {config.algorithm}",
            not ALGORITHMS[config.algorithm].sends_updates,
            "it sends more than an update of its parameters, which a member that was away cannot make up for",
        ),
        ("--dropouts", config.dropouts > 0, "it simulates what really happens here"),
        ("--track-real", config.track_real, "it looks at all members' rows"),
        ("--weights", config.weights is not None, "the file cannot be part of the contract"),
        ("--seeded-noise", config.seeded_noise, "noise that all know protects nobody"),
    ):
        if wrong:
            raise UsageError(f"{option} in a run between organisations: {why}; leave it out of the plan")
    _check_trust(PrivacyOptions.of(config).trusted(), members)


def _check_members(nodes: int, members: int, command: str) -> None:
    if nodes != members:
        raise UsageError(
            f"the plan has nodes = {nodes} and there are {members} requests (--member): make it with {command} --nodes {members} "
            "--print-config, or give all requests"
        )


def _check_trust(trust: Trust, members: int) -> None:
    """Refuse members that cannot hide each other."""
    if isinstance(trust, Pairs):
        if members < 3:
            raise UsageError(
                f"--trust pairs with {members} members: each knows the noise that it shares, so a third one must be there to hide behind; "
                "use --trust nobody"
            )
        trust.partners(members)  # refuses more colluders and absentees than members can hide from
        if trust.absentees:
            quorum(members, trust.coalition(members), trust.absentees)


def quorum(members: int, colluders: int, absentees: int) -> int:
    """How many others must have noted a reservation before a round is released (`dpps.peers.links.Reservations`).

    At least C + A, so that those who are left when A are lost can say what a lost one has released; at most N - 1 - A, so that
    a member can go on without them. In between, the middle.
    """
    least, most = colluders + absentees, members - 1 - absentees
    if least > most:
        raise UsageError(
            f"--colluders {colluders} and --absentees {absentees} with {members} members: C + 2 A must be {members - 1} or less, "
            "so that enough members are left to say what a lost one has sent; use fewer"
        )
    return max(1, least, min(most, (members - 1 + colluders) // 2))


# The file: read strictly, and written so that it is read back


def _verified(content: bytes, where: str, convener: str) -> tuple[bytes, bytes]:
    """The signature of a file and the bytes that it is of. UsageError: they were not signed by the key that the file names, or that
    is another one than `convener`."""
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
        raise _other_convener(where, fingerprint(key), convener)
    body = content[head.end() :]
    if not verify(key, signature, _SIGNED + body):
        raise UsageError(f"{where} was changed after the convener signed it: ask the convener for it again")
    return signature, body


def _other_convener(where: str, found: str, known: str) -> UsageError:
    return UsageError(
        f"{where} is signed by another convener ({found[:16]}, known is {known[:16]}): ask "
        "the convener on the telephone"
    )


def _contact(table: Any) -> Contact:
    address = _of(table["address"], str)
    if address:
        check_address("an address", address)
    name = check_name(_of(table["name"], str))
    return Contact(
        name,
        address,
        _certificate(table["certificate"]),
        _of(table["expelled"], bool),
        _of(table.get("expelled-in", 0), int),
        bytes.fromhex(_of(table.get("pair-key", ""), str)),
    )


def _of(value: Any, *kinds: type) -> Any:
    """A value of exactly this kind: true is not the number 1."""
    if type(value) not in kinds:
        raise TypeError(f"{value!r} is not of type {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _plain_table(table: Any) -> dict[str, Any]:
    """A table of options without tables in it; questions are a list of texts."""
    for name, value in table.items():
        for each in _of(value, list) if name == "ask" else [value]:
            _of(each, str, int, float, bool)
    return dict(table)


def _base64(certificate: x509.Certificate) -> str:
    return base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()


def _certificate(text: Any) -> x509.Certificate:
    """The certificate that `_base64` wrote."""
    found = x509.load_der_x509_certificate(base64.b64decode(_of(text, str), validate=True))
    if not isinstance(found.public_key(), ec.EllipticCurvePublicKey):
        raise TypeError("a certificate of another kind of key")
    return found


def _key_in(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)  # refused otherwise when the file was read
    return key


def _toml_lines(table: Mapping[str, Any]) -> list[str]:
    """JSON's texts and numbers are TOML's, but for one character."""
    return [
        f"{name} = {json.dumps(value, ensure_ascii=False, allow_nan=False)}".replace("\x7f", "\\u007f")
        for name, value in table.items()
    ]
