"""Members without learning: the protocol on tiny rows, with outbox and ledger, on a simulated network. What tests of failures share."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpps.noise import Gaussian, Seeded
from dpps.peers import (
    DONE,
    LEARNING,
    Frame,
    Membership,
    Outbox,
    OutboxLedger,
    Peers,
    Rules,
    Terms,
    averaging_rounds,
    decode,
)
from dpps.peers.contract import linked
from dpps.protocol import DPPS
from dpps.sensitivity import Bounded
from dpps.topology import Complete, Topology
from dpps.transport.base import TAIL
from tests.support.simulated import Killed, Network, SimulatedPost

WIDTH = 3
SOFT, HARD = 0.3, 1.5


def sign_as(name: str) -> Callable[[bytes], bytes]:
    return lambda message: hashlib.sha256(name.encode() + message).digest()


def verify(name: str, signature: bytes, message: bytes) -> bool:
    return sign_as(name)(message) == signature


def membership_of(
    names: tuple[str, ...], own: int, topology: Topology | None = None, **more: Any
) -> Membership:
    pairs = linked(topology or Complete(len(names)))
    neighbours = frozenset(names[n] for pair in pairs if own in pair for n in pair if n != own)
    active, neighbours = more.pop("active", frozenset(names)), more.pop("neighbours", neighbours)
    rules = Rules(**{"soft_deadline": SOFT, "hard_deadline": HARD} | more)
    return Membership("run", names, own, sign_as(names[own]), verify, active, neighbours, rules)


def terms_of(
    topology: Topology, rounds: int, growth: tuple[float, float] = (1.0, 0.2), width: int = WIDTH
) -> Terms:
    """What all rounds together can add to a row, each adding so much."""
    step, deviation = growth
    reach = rounds * step + math.sqrt(rounds) * deviation * (math.sqrt(width) + TAIL)
    return Terms(topology, rounds, reach)


@dataclass
class Bare:
    """One member: every start of its process goes on from its folder."""

    membership: Membership
    topology: Topology
    folder: Path
    rounds: int
    pace: float = 0.05
    """Seconds that a round's computation takes."""
    result: torch.Tensor | None = None
    apart: float | None = None
    leave_at: int | None = None
    quiet: float = 0.0
    """When failures are over: the average at the end is taken after that."""
    skipped: int = 0
    handed_over: int | None = None
    few_left: bool = False
    fabric: Peers | None = None
    held: tuple[Any, float] | None = None
    kept: dict[int, str] = field(default_factory=dict)
    """Digest of the row of every round of learning that was put on disk."""
    die_at: set[tuple[int, str]] = field(default_factory=set)
    """(round, "before" or "after" it is on disk): the process ends there, once."""
    kind: type[Peers] = Peers
    """Liars have one of their own."""

    def make(self, post: SimulatedPost) -> Peers:
        """This member's fabric."""
        return self.kind(self.membership, post, post.clock)

    width: int = WIDTH

    def protocol(self, fabric: Peers) -> DPPS:
        """What it runs."""
        noise, mechanism, bound = Seeded(self.membership.own), Gaussian(0.1), Bounded(2.0, clip=1.0)
        return DPPS(self.topology, mechanism, bound, noise=noise, fabric=fabric)

    def pull(self, state: Any) -> torch.Tensor:
        """The perturbation of its row in the next round."""
        return 0.1 * (torch.arange(self.width) + self.membership.own - state.y)

    def __call__(self, post: SimulatedPost) -> None:
        self.held, self.few_left = None, False
        own = self.membership.own
        fabric = self.fabric = self.make(post)
        protocol = self.protocol(fabric)
        state = protocol.start(torch.zeros(1, self.width, dtype=torch.float64), common_start=True)
        fabric.agree(terms_of(self.topology, self.rounds, protocol.growth(state, 1.0), self.width))
        outbox = Outbox(self.folder / "outbox")
        found, header = outbox.read(), {"rows": [own], "run": "x"}
        opening = OutboxLedger.create if found is None else OutboxLedger.open
        ledger = protocol.ledger = opening(self.folder / "ledger.jsonl", header, True)

        def keep(phase: int) -> None:
            more = 1 if phase == LEARNING and not fabric.state else 0
            meta = {"round": state.round + more, "ledger": ledger.tail(), "fabric": fabric.meta()}
            self._die(post, state.round, "before")
            outbox.write(fabric.tensors(), meta)
            if more and (LEARNING, state.round) in fabric._digests:
                self.kept[state.round] = fabric._digests[LEARNING, state.round]
            self._die(post, state.round, "after")
            ledger.kept()

        try:
            if found is not None:
                tensors, meta = found
                ledger.recover(*meta["ledger"])
                state.round = state.clock = meta["round"]
                fabric.load(tensors, meta["fabric"])
                state.s[0], state.a[0] = fabric.take(LEARNING)
            fabric.keep = keep
            fabric.hold(LEARNING, state.s[0], float(state.a[0]))
            keep(1)
            row, a = fabric.take(LEARNING)
            state.s, state.a = row[None], state.a.new_tensor([a])
            self._live(post, protocol, state, fabric)
        finally:
            if post._process.killed:
                ledger._abandon()
            else:
                self.held = (fabric._home, float(state.a[0]))
                ledger.close()

    def _die(self, post: SimulatedPost, round_: int, when: str) -> None:
        if (round_, when) in self.die_at:
            self.die_at.discard((round_, when))
            post._process.killed = True
            raise Killed

    def _assemble(self, averaging: bool = False) -> None:
        """As `Member` does it."""
        begun = self.fabric.clock()
        while True:
            self.fabric.wait(0.0)
            waited = self.fabric.clock() - begun
            if self.fabric.assembled(self.membership.rules.min_members, waited < SOFT):
                return
            if averaging and self.fabric.ending() and waited >= HARD:
                self.few_left = True
            if self.fabric.over() or self.few_left:
                return
            self.fabric.wait(SOFT / 3)

    def _live(self, post: SimulatedPost, protocol: DPPS, state: Any, fabric: Peers) -> None:
        if fabric.state == DONE:  # it was started once more, for those who come late
            fabric.stay(self.result)
            return
        while state.round < self.rounds:
            self._assemble()
            if self.leave_at is not None and state.round >= self.leave_at:
                self.handed_over = state.round
                fabric.hand_over(state.s[0], float(state.a[0]), state.round)
                state.a = torch.zeros(1)
                return
            target = self.rounds if fabric.over() else min(fabric.behind(state.round), self.rounds)
            self.skipped += target - state.round
            state.round = state.clock = target
            if target == self.rounds:
                break
            end = post.clock() + self.pace
            while post.clock() < end:
                fabric.wait(end - post.clock())
            protocol.step(state, self.pull(state))
        fabric.hold(LEARNING, state.s[0], float(state.a[0]))
        while post.clock() < self.quiet:
            fabric.wait(self.quiet - post.clock())
        fewest = averaging_rounds(self.topology)
        self.result, self.apart = fabric.average(
            state.y[0], self.rounds, fewest, before=lambda: self._assemble(averaging=True)
        )
        state.a = torch.zeros(1)
        fabric.finish()
        fabric.stay(self.result)


@dataclass
class Tap:
    """Everything that was handed over, checked as it goes: no row of a round with two contents."""

    nodes: int
    digests: dict[tuple[str, int, int], str] = field(default_factory=dict)
    frames: int = 0

    def __call__(self, sender: str, to: str, data: bytes) -> None:
        frame: Frame = decode(data, "run", self.nodes, WIDTH * 8)
        self.frames += 1
        if frame.share is not None:
            claim = frame.share.claim
            before = self.digests.setdefault((sender, claim.phase, claim.round), claim.digest)
            assert before == claim.digest, f"{sender} sent two rows for round {claim.round}"

    def released(self, name: str) -> set[int]:
        """The rounds of learning of which something left."""
        return {r for sender, phase, r in self.digests if sender == name and phase == LEARNING}


def mass(members: list[Bare], network: Network) -> float:
    """What all hold and what is on its way, after the end: of those who are gone, what their disks say."""
    total = 0.0
    metas: dict[int, Any] = {}
    live: dict[int, float] = {}
    for k, member in enumerate(members):
        if member.held is not None:
            homes, in_hand = member.held
            live[k] = homes[LEARNING][1] + in_hand
            metas[k] = member.fabric.meta()
        else:
            found = Outbox(member.folder / "outbox").read()
            metas[k] = found[1]["fabric"]
            live[k] = metas[k]["mass"]["0"]
    total += sum(live.values())
    for k, meta in metas.items():
        letters = {(phase, r): a for phase, r, a, _ in meta["letters"]}
        for to, outlet in meta["outlets"].items():
            counted = metas[int(to)]["inlets"][str(k)]["counted"]
            for number, weight, phase, r in outlet["waiting"]:
                if number > counted and phase == LEARNING:
                    total += weight * letters[phase, r]
    return total


def one_other(
    folder: Path, topology: Topology, rounds: int, at: int, kind: type[Bare], **more: Any
) -> list[Bare]:
    """Members of a network of their own, each with a folder; the one with number `at` is of another kind."""
    names = tuple(f"m{k}" for k in range(topology.nodes))
    found = []
    for k, name in enumerate(names):
        (folder / name).mkdir()
        membership = membership_of(names, k, topology, **more)
        found.append((kind if k == at else Bare)(membership, topology, folder / name, rounds))
    return found


# Two members, moved by hand

A, B = PAIR = ("a", "b")
ROW = torch.ones(WIDTH, dtype=torch.float64)


def started(post: SimulatedPost, own: int, **more: float) -> Peers:
    """One of the two, before its first frame."""
    fabric = Peers(membership_of(PAIR, own, **more), post, post.clock)
    fabric.start(torch.zeros(1, WIDTH, dtype=torch.float64), common=True)
    fabric.agree(terms_of(Complete(2), 1000))
    return fabric


def listen(post: SimulatedPost) -> None:
    """Be there, take everything in, and give nothing."""
    fabric = started(post, 1)
    while post.clock() < 6 * HARD:
        fabric.wait(0.1)


def met(fabric: Peers) -> None:
    """Wait until both have answered each other."""
    while not fabric.assembled(2, answers=True):
        fabric.wait(0.1)
