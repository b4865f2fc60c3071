"""What the convener does: sign the members' requests and the contract, expel a member, renew certificates."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dpps.errors import UsageError
from dpps.peers.federation import Contact, Federation, Rules
from dpps.peers.identity import Key, Request, fingerprint
from dpps.version import __version__


def convene(
    plan: Mapping[str, Any],
    requests: Sequence[Request],
    key: Key,
    *,
    rules: Rules | None = None,
    schema: str = "",
    days: int = 365,
) -> Federation:
    """A new federation, signed.

    Args:
        plan: the options of `dpps train`, without paths.
        requests: of the members, in the order of their rows.
        key: of the convener.
        rules: deadlines and how many must be there.
        schema: what the members' tables mean.
        days: how long the certificates hold.
    """
    for what, found in (
        ("name", [r.name for r in requests]),
        ("key", [fingerprint(r.key) for r in requests]),
    ):
        if len(set(found)) < len(found):
            twice = next(each for each in found if found.count(each) > 1)
            raise UsageError(f"two requests have the {what} {twice}: every member needs one of its own")
    _check_days(days)
    rules = rules or Rules()
    rules.check(len(requests))
    own = key.certify_itself("dpps convener", max(days, 3650))
    members = tuple(Contact(r.name, r.address, key.certify(r, own, days)) for r in requests)
    made = Federation(secrets.token_hex(8), 1, __version__, dict(plan), schema, members, rules, own)
    _check_reachable(made)
    return made.signed(key)


def expel(federation: Federation, name: str, key: Key) -> Federation:
    """The next epoch, without a member."""
    member = federation.member(name)
    if member.expelled:
        raise UsageError(f"{name} was expelled already (epoch {federation.epoch}): there is nothing to do")
    if len(federation.active) <= federation.rules.min_members:
        raise UsageError(
            f"without {name} there are {len(federation.active) - 1} members and the contract needs "
            f"{federation.rules.min_members}: "
            "make a new federation"
        )
    members = tuple(replace(m, expelled=True) if m.name == name else m for m in federation.members)
    return replace(federation, epoch=federation.epoch + 1, members=members).signed(key)


def renew(federation: Federation, key: Key, days: int = 365) -> Federation:
    """The next epoch, with new certificates of the same keys for all who are not expelled."""
    _check_days(days)
    members = tuple(
        m
        if m.expelled
        else replace(m, certificate=key.certify(Request(m.name, m.address, m.key), federation.convener, days))
        for m in federation.members
    )
    return replace(federation, epoch=federation.epoch + 1, members=members).signed(key)


def _check_days(days: int) -> None:
    if not 1 <= days <= 3650:
        raise UsageError(f"--days is {days}: it must be 1 to 3650")


def _check_reachable(federation: Federation) -> None:
    """Of two neighbours at least one must listen."""
    for i, j in sorted(federation.pairs):
        one, other = federation.members[i], federation.members[j]
        if not one.address and not other.address:
            raise UsageError(
                f"{one.name} and {other.name} are neighbours in the topology {federation.plan['topology']} and neither listens: "
                "one of the two needs dpps member init --listen, or choose another topology or order of members"
            )
