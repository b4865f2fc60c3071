"""Pair noise as an observer finds it who has everybody's keys: which noise is in which message that crossed the network.

Nothing is asked of the members' bookkeeping. What a message adds to its row is explained by the noise of all its member's pairs in
all rounds, which the keys give: least squares find a factor of 1 or -1 for noise that is in it, and about 0 for other noise.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dpps.noise import MemberPairs
from dpps.noise.pairs import Part
from dpps.peers import Federation, Identity, Membership
from dpps.peers.contract import config_for
from dpps.peers.links import AHEAD
from dpps.privacy.units import PrivacyOptions

_FOUND = 0.5


@dataclass(frozen=True)
class Message:
    """What one message adds to its member's row.

    Attributes:
        member: whose it is.
        round: of learning; for what is added before the final average, the number of rounds.
        added: update and noise.
    """

    member: int
    round: int
    added: np.ndarray


class Observer:
    """Has the keys of all members.

    Args:
        sources: every member's noise.
        scale: of the noise without partners, the same in all rounds.
    """

    def __init__(self, sources: Sequence[MemberPairs], scale: float) -> None:
        self._sources, self.scale = sources, scale
        self.own = sources[0].partners.shares().independent * scale

    @classmethod
    def of_federation(cls, federation: Path, members: Iterable[Path], ledger: Path) -> "Observer":
        """From the contract, the folders of all members' keys, and the ledger of one of them, which has the scale."""
        contract = Federation.read(federation)
        everybody = tuple(replace(member, expelled=False, expelled_in=0) for member in contract.members)
        contract = replace(contract, members=everybody)  # keys hold for those expelled, too
        options = config_for(contract)
        partners = PrivacyOptions.of(options).trusted().partners(options.nodes)
        keys = [Membership.of(contract, Identity.open(each)).pair_keys for each in members]
        assert partners is not None
        sources = [MemberPairs(partners, each, k) for k, each in enumerate(keys) if each is not None]
        return cls(sources, scale_of(ledger))

    def noise(self, member: int, partner: int, rounds: int, size: int) -> np.ndarray:
        """What a member adds of the noise that it shares with a partner, by round."""
        source, sign = self._sources[member], 1 if member < partner else -1
        step, _ = source.lattice(self.scale)
        parts = [Part(r, False, ((partner, sign),)) for r in range(rounds)]
        return np.stack([source.in_steps(part, self.scale, size, step) * step for part in parts])

    def find(self, messages: list[Message], rounds: int) -> "Found":
        """Which noise is in which message, and what is left of each without it."""
        found, members = Found({}, {}), range(len(self._sources))
        for member in members:
            mine = [message for message in messages if message.member == member]
            if not mine:
                continue
            added = np.stack([message.added for message in mine]).astype(np.float64)
            partners = [other for other in members if other != member]
            noise = np.concatenate([self.noise(member, each, rounds, added.shape[1]) for each in partners])
            factors = np.linalg.solve(noise @ noise.T, noise @ added.T).T
            for m, place in zip(*np.nonzero(np.abs(factors) > _FOUND), strict=True):
                partner, r = partners[place // rounds], int(place % rounds)
                there = (mine[m].round, round(float(factors[m, place])))
                found.places.setdefault((member, partner, r), []).append(there)
            for message, left in zip(mine, added - np.round(factors) @ noise, strict=True):
                found.rest[member, message.round] = float((left**2).mean())
        return found


@dataclass
class Found:
    """Where pair noise was found.

    Attributes:
        places: by (member, partner, round of the noise), the rounds of the messages that have it, with a sign: -1 is taken back.
        rest: by (member, round of the message), the mean square of what is neither.
    """

    places: dict[tuple[int, int, int], list[tuple[int, int]]]
    rest: dict[tuple[int, int], float]

    def wrong(self, lost: dict[int, int]) -> list[str]:
        """What breaks the promise: noise under two messages, or taken back of a round that was released, or of a member that is there.

        Args:
            lost: by expelled member, the last round it has released.
        """
        found = []
        for (member, partner, r), places in sorted(self.places.items()):
            signs = [sign for _, sign in sorted(places)]
            back = partner in lost and r > lost[partner]
            if signs != [1] and not (back and signs == [1, -1]):
                found.append(f"noise of round {r} that {member} shares with {partner}: {sorted(places)}")
        return found

    def standing(self, rounds: int, lost: dict[int, int]) -> list[tuple[int, int, int]]:
        """Noise of two members that does not cancel, although it should: (member, partner, round)."""
        net: Counter[tuple[int, int, int]] = Counter()
        for (member, partner, r), places in self.places.items():
            sign = 1 if member < partner else -1
            net[min(member, partner), max(member, partner), r] += sign * sum(each for _, each in places)
        doubt = {(g, r) for g, last in lost.items() for r in range(last + 1, min(last + AHEAD + 2, rounds))}
        return [
            (i, j, r)
            for (i, j, r), many in sorted(net.items())
            if many and (i, r) not in doubt and (j, r) not in doubt
        ]

    def carried(self) -> dict[tuple[int, int], int]:
        """By (member, round of the message), the noise of how many rounds it carries."""
        carried: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for (member, _, r), places in self.places.items():
            for at, sign in places:
                if sign > 0:
                    carried[member, at].add(r)
        return {key: len(each) for key, each in carried.items()}


def scale_of(ledger: Path) -> float:
    """The noise scale in a ledger, the same in all rounds."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    (scale,) = {float(line["scale"]) for line in lines if "scale" in line}
    return scale
