"""What every process says of itself at the meeting point, and the comparison of it."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from dpps.errors import PeerError, UsageError
from dpps.transport.blame import printable


def same_facts(said: Sequence[Mapping[str, Any]], own: int) -> None:
    """Raise for the first fact that differs, naming the minority."""
    for name in said[own]:
        values = [json.dumps(facts.get(name), sort_keys=True) for facts in said]
        common = Counter(values).most_common(1)[0][0]
        others = [r for r, value in enumerate(values) if value != common]
        if others:
            theirs, ours = (json.loads(v) for v in (values[others[0]], common))
            raise UsageError(
                f"rank {', '.join(map(str, others))} differs in {name}: {printable(_difference(theirs, ours))}; "
                "start all processes alike; nothing was sent"
            )


def _difference(theirs: Any, ours: Any) -> str:
    """The first differing entry of two dictionaries, or the two values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        name = next(k for k in [*ours, *theirs] if json.dumps(theirs.get(k)) != json.dumps(ours.get(k)))
        return f"{name} is {theirs.get(name)!r}, the others have {ours.get(name)!r}"
    return f"{theirs!r}, the others have {ours!r}"


def understood(rank: int, hello: str) -> dict[str, Any]:
    """What a process said of itself."""
    said = decoded(rank, hello)
    try:
        address, port, facts = str(ip_address(said["address"])), int(said["port"]), dict(said["facts"])
        key = bytes.fromhex(said["key"])
    except (ValueError, TypeError, KeyError, OverflowError):
        raise _not_understood(rank) from None
    if not 0 < port < 1 << 16:
        raise _not_understood(rank)
    return {"address": address, "port": port, "key": key, "facts": facts}


def unreached(rank: int, text: str, processes: int) -> dict[int, str]:
    """Which of so many processes a process says it cannot reach, and why."""
    said = decoded(rank, text)
    if not all(peer.isdecimal() and int(peer) < processes for peer in said):
        raise _not_understood(rank)
    return {int(peer): printable(why) for peer, why in said.items()}


def decoded(rank: int, text: str) -> dict[str, Any]:
    """A JSON object that a process has put down.

    Raises:
        PeerError: it is something else.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise _not_understood(rank) from None
    if not isinstance(found, dict):
        raise _not_understood(rank)
    return found


def _not_understood(rank: int) -> PeerError:
    return PeerError(
        f"what rank {rank} says at the meeting point is not understood: is it a process of this run?"
    )
