"""Members that learn next to nothing and share noise: what is left in their models is noise that did not cancel."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps.noise import Gaussian, IdentityKey, MemberPairs, PairKeys
from dpps.noise.pairs import Part
from dpps.peers import LEARNING, Member, Membership, decode
from dpps.runs import Run
from dpps.topology import Topology
from tests.support.bare import membership_of
from tests.support.federation import EXAMPLES, FEATURES, examples
from tests.support.simulated import Network, SimulatedPost
from tests.system.pair_noise import Message, Observer, scale_of


class Silent(Gaussian):
    """The noise that is each member's own is zero."""

    def draw_whole(self, keystream: Any, scale: float, size: int) -> Any:
        return np.zeros(size, dtype=np.int64)


@dataclass
class Sharing:
    """A federation whose members share noise.

    Attributes:
        left: by (member, phase, round), the digest of the row that left: the same every time.
        given: by member and round of the message, which noise it carries; of messages that were put on disk.
        messages: what these messages add to their rows, with digests; those with the number of rounds for a round have none.
        outputs: of the model, which has so many times seven parameters.
    """

    folder: Path
    members: int = 5
    epochs: int = 5
    trust: dpps.Pairs = field(default_factory=lambda: dpps.Pairs(1, absentees=1))
    pace: float = 0.05
    topology: Topology | None = None
    rules: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    network_options: dict[str, Any] = field(default_factory=dict)
    outputs: int = 2

    def __post_init__(self) -> None:
        self.names = tuple(f"m{k}" for k in range(self.members))
        self.graph = self.topology or dpps.Exponential(self.members)
        self.identities = [IdentityKey() for _ in self.names]
        self.runs: dict[str, Run] = {}
        self.left: dict[tuple[str, int, int], str] = {}
        self.given: dict[str, dict[int, list[Part]]] = {name: {} for name in self.names}
        self.messages: list[tuple[Message, str]] = []
        self.expelled: dict[int, int] = {}
        mains = {name: self.main(k) for k, name in enumerate(self.names)}
        self.network = Network(mains, tap=self._tap, **self.network_options)

    def membership(self, k: int) -> Membership:
        publics = [identity.public for identity in self.identities]
        keys = PairKeys(self.identities[k], publics, "run", b"between organisations")
        made = membership_of(self.names, k, self.graph, **self.rules)
        active = frozenset(name for n, name in enumerate(self.names) if n not in self.expelled)
        return replace(
            made,
            pair_keys=keys,
            active=active,
            revision=1 + len(self.expelled),
            expelled_in=dict(self.expelled),
        )

    def expel(self, k: int) -> None:
        """Everybody who is there hears of the next revision."""
        self.expelled[k] = 2 + len(self.expelled)
        for n, name in enumerate(self.names):
            if name in self.network.running and name in self.runs and n not in self.expelled:
                self.member(name).adopt(self.membership(n))

    def member(self, name: str) -> Member:
        where = self.runs[name].deployment
        assert isinstance(where, Member)
        return where

    def main(self, k: int) -> Callable[[SimulatedPost], None]:
        def main(post: SimulatedPost) -> None:
            torch.manual_seed(0)
            where = Member(self.membership(k), post, clock=post.clock, heart=False)
            learning = {"lr_shared": 1e-9, "lr_local": 1e-9, "batch_size": 10}
            learning |= self.more.get("learning", {})
            algorithm = dpps.PartPSP(nn.Linear(FEATURES, self.outputs), **learning)
            options = {key: value for key, value in self.more.items() if key != "learning"}
            run = Run(
                algorithm,
                [TensorDataset(*examples(k + 1))],
                topology=self.graph,
                deployment=where,
                folder=self.folder / self.names[k],
                seed=k,
                privacy=dpps.Record(noise_multiplier=1e9, clip=1.0, trust=self.trust),
                declared_sizes=EXAMPLES,
                **options,
            )
            self.runs[self.names[k]] = run
            self._watch(where, self.names[k])
            try:
                for _ in run.rounds(self.epochs):
                    where.fabric.wait(self.pace)
            finally:
                run.close()

        return main

    def _watch(self, where: Member, name: str) -> None:
        """Note which noise every message carries that is on disk."""
        write = where._write
        pairs = where.pairs

        give, settle, made = where.fabric._give, where._settle, dict[MemberPairs, Any]()
        adding: list[tuple[Message, str]] = []

        def given(phase: int, round_: int, row: torch.Tensor, *rest: Any) -> None:
            if phase == LEARNING:
                note(round_, row, hashlib.sha256(where.fabric._rows.encode(row)).hexdigest(), before())
            give(phase, round_, row, *rest)

        def settled(run: Run) -> None:
            base = before()
            settle(run)
            if not torch.equal(base, before()):
                note(run.plan.count * run.mixes, before(), "", base)

        def before() -> torch.Tensor:
            return self.runs[name].state.shared.s[0].double().clone()

        def note(round_: int, row: torch.Tensor, digest: str, base: torch.Tensor) -> None:
            added = (row.double() - base).numpy()
            adding.append((Message(self.names.index(name), round_, added), digest))

        def kept(run: Run, round_: int, clock: int) -> None:
            write(run, round_, clock)
            self.messages += adding
            adding.clear()
            source = where.pairs
            if source is not None and source not in made:
                made[source] = drawn = source.drawn

                def noted(mechanism: Any, parts: list[Part], *rest: Any) -> Any:
                    waiting.append(parts)
                    return drawn(Silent(1.0) if self.quiet else mechanism, parts, *rest)

                source.drawn = noted  # type: ignore[method-assign]
            elif waiting:
                self.given[name][where.fabric.pushed] = waiting.pop()
                assert not waiting

        waiting: list[list[Part]] = []
        assert pairs is None or isinstance(pairs, MemberPairs)
        where._write, where._settle = kept, settled  # type: ignore[method-assign]
        where.fabric._give = given  # type: ignore[method-assign]

    quiet: bool = True
    """Whether members' own noise is zero."""

    def _tap(self, sender: str, to: str, data: bytes) -> None:
        frame = decode(data, "run", self.members, 4 * self.outputs * (FEATURES + 1))
        if frame.share is not None:
            claim = frame.share.claim
            before = self.left.setdefault((sender, claim.phase, claim.round), claim.digest)
            assert before == claim.digest, f"{sender} sent two rows for round {claim.round}"

    def without_momentum(self) -> list[Message]:
        """What was released: what the messages add, without what momentum adds of earlier ones."""
        optimizer = self.more.get("learning", {}).get("optimizer")
        if optimizer is None:
            return [message for message, _ in self.messages]
        found, velocity = [], dict[int, Any]()
        for message, digest in self.messages:
            # before the average all that is still to come is added at once
            change = message.added if digest else message.added / optimizer.gain
            released = change - optimizer.beta * velocity.get(message.member, 0.0)
            velocity[message.member] = change
            found.append(replace(message, added=released))
        return found

    def observer(self) -> Observer:
        """Who has everybody's keys."""
        publics = [identity.public for identity in self.identities]
        partners = self.trust.partners(self.members)
        keys = [PairKeys(each, publics, "run", b"between organisations") for each in self.identities]
        sources = [MemberPairs(partners, each, k) for k, each in enumerate(keys)]
        return Observer(sources, scale_of(self.folder / self.names[0] / "ledger.jsonl"))

    def released(self, name: str) -> set[int]:
        return {r for sender, phase, r in self.left if sender == name and phase == LEARNING}

    def standing(self) -> dict[tuple[int, int, int], int]:
        """By (i, j, round) with i < j, how often the noise of the pair is left in the sum of all messages."""
        found: dict[tuple[int, int, int], int] = {}
        for k, name in enumerate(self.names):
            for parts in self.given[name].values():
                for part in parts:
                    for other, sign in part.pairs:
                        pair = (min(k, other), max(k, other), part.round)
                        found[pair] = found.get(pair, 0) + sign
        return {pair: many for pair, many in found.items() if many}

    def start(self) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(FEATURES, self.outputs)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def off(self, name: str) -> float:
        """How far a member's model is from the start, at which it would be without noise."""
        with suppress(KeyError):
            return float((self.runs[name].shared - self.start()).abs().max())
        return float("inf")
