"""A federation under one liar: a member that lies in every field of every frame it may send, one at a time and in random combinations.

Whatever it says, honest members end, within their bound; none of them is refused; the liar is named, with its own signature where
that proves it; and mass is accounted for: what honest members hold is what they had, and got from the liar, less what they gave it.
"""

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dpps.peers import AVERAGING, DONE, FINAL, LEARNING, Frame, Peers, Post, Share, decode
from dpps.peers.links import STARTS
from dpps.peers.messages import Claim, Presence
from dpps.topology import Complete, Exponential, Ring, Topology
from tests.support.bare import HARD, WIDTH, Bare, membership_of, sign_as, verify
from tests.support.simulated import Network, SimulatedPost

LIAR, ROUNDS = 1, 6
HUGE = 1 << 61
UNTIL = 300.0


@dataclass
class Teller:
    """What a lie is made with: a source of chance, and who sends to whom."""

    draw: random.Random
    names: tuple[str, ...]
    to: int = 0
    first: dict[int, Share] = field(default_factory=dict)
    """Of the shares for each member."""

    def whole(self, value: int) -> int:
        """Another whole number than this."""
        near = [value - 1, value + 1, value + 3, 2 * value + 1]
        return self.draw.choice([n for n in (*near, 0, 7, STARTS, HUGE, 2 * HUGE + 1) if n != value])

    def signed(self, claim: Claim, row: bytes) -> Share:
        """A share with the liar's true signature under whatever it says."""
        claim = replace(claim, digest=hashlib.sha256(row).hexdigest())
        message = claim.message("run", self.names[LIAR], self.names[self.to])
        return Share(replace(claim, signature=sign_as(self.names[LIAR])(message)), row)

    def present(self, frame: Frame, node: int, presence: Presence, signer: int | None = LIAR) -> Frame:
        """A frame with another presence of somebody, signed by whoever can."""
        name = self.names[node]
        signature = b"" if signer is None else sign_as(self.names[signer])(presence.message("run", name))
        view = list(frame.view)
        view[node] = replace(presence, signature=signature)
        return replace(frame, view=tuple(view))


Lie = Callable[[Teller, Frame], Frame | bytes]
LIES: dict[str, Lie] = {}
CAUGHT: set[str] = set()
PROVEN: set[str] = set()
"""Lies that every neighbour which hears them refuses; and of these, those of which the liar's own signature is the proof."""


def lie(name: str, *, caught: bool = False, proven: bool = False) -> Callable[[Lie], Lie]:
    def put(made: Lie) -> Lie:
        LIES[name] = made
        CAUGHT.update({name} if caught else ())
        PROVEN.update({name} if proven else ())
        return made

    return put


def of_share(
    name: str, change: Callable[[Teller, Share], tuple[Claim, bytes]], *, caught: bool = False
) -> None:
    """A lie in a share, signed as it is told."""

    def tell(teller: Teller, frame: Frame) -> Frame:
        if frame.share is None:
            return frame
        return replace(frame, share=teller.signed(*change(teller, frame.share)))

    lie(name, caught=caught, proven=caught)(tell)


for _name in ("start", "answers", "got", "kept"):
    lie(_name)(lambda t, f, name=_name: replace(f, **{name: t.whole(getattr(f, name))}))  # type: ignore[misc]
lie("asks")(lambda t, f: replace(f, asks=not f.asks))
lie("run", caught=True)(lambda t, f: replace(f, run="another"))
lie("refusal")(lambda t, f: replace(f, refusal=t.draw.choice(["nonsense", "\x1b[2J", "x" * 1000])))
for _name in ("beats", "pushed", "state"):
    lie(_name)(
        lambda t, f, name=_name: t.present(  # type: ignore[misc]
            f,
            LIAR,
            replace(
                f.view[LIAR],
                **{name: t.draw.randrange(4) if name == "state" else t.whole(getattr(f.view[LIAR], name))},
            ),
        )
    )
lie("far ahead")(lambda t, f: t.present(f, LIAR, replace(f.view[LIAR], pushed=ROUNDS - 1)))
lie("beyond the end", caught=True, proven=True)(
    lambda t, f: t.present(f, LIAR, replace(f.view[LIAR], pushed=HUGE))
)
lie("unsigned presence", caught=True)(lambda t, f: t.present(f, LIAR, f.view[LIAR], None))


@lie("presence of others", caught=True)
def _of_others(teller: Teller, frame: Frame) -> Frame:
    node = teller.draw.choice([n for n in range(len(teller.names)) if n not in (LIAR, teller.to)])
    poisoned = Presence(HUGE, teller.draw.choice([-1, 2, ROUNDS]), teller.draw.randrange(4))
    return teller.present(frame, node, poisoned, teller.draw.choice([LIAR, None]))


@lie("presence of the receiver", caught=True)
def _of_receiver(teller: Teller, frame: Frame) -> Frame:
    return teller.present(frame, teller.to, Presence(HUGE, HUGE, 0))


of_share("number", lambda t, s: (replace(s.claim, number=max(1, t.whole(s.claim.number))), s.row))
of_share("earlier number", lambda t, s: (replace(s.claim, number=max(1, s.claim.number - 1)), s.row))
of_share(
    "weight", lambda t, s: (replace(s.claim, weight=t.draw.choice([0.9, 1.0, 0.013])), s.row), caught=True
)
of_share("no weight", lambda t, s: (replace(s.claim, weight=0.0), s.row), caught=True)
of_share("a", lambda t, s: (replace(s.claim, a=len(t.names) * t.draw.random()), s.row))
of_share("all mass", lambda t, s: (replace(s.claim, a=float(len(t.names))), s.row))
of_share(
    "more than all mass", lambda t, s: (replace(s.claim, a=t.draw.choice([1e3, 1e18])), s.row), caught=True
)
of_share(
    "phase",
    lambda t, s: (replace(s.claim, phase=LEARNING if s.claim.phase != LEARNING else AVERAGING), s.row),
    caught=True,
)
of_share("round", lambda t, s: (replace(s.claim, round=abs(t.whole(s.claim.round))), s.row))
of_share("round beyond the plan", lambda t, s: (replace(s.claim, round=HUGE), s.row), caught=True)


def _again(teller: Teller, share: Share) -> tuple[Claim, bytes]:
    """The first share once more, under the number of this one."""
    first = teller.first.setdefault(teller.to, share)
    return replace(first.claim, number=share.claim.number), first.row


of_share("share again", _again, caught=True)


def _final(claim: Claim) -> Claim:
    """As the last share of a link has it."""
    return replace(claim, phase=FINAL, weight=1.0, a=1.0)


@lie("finished")
def _finished(teller: Teller, frame: Frame) -> Frame:
    return teller.present(frame, LIAR, replace(frame.view[LIAR], state=DONE))


@lie("final average in the run", caught=True)
def _final_early(teller: Teller, frame: Frame) -> Frame:
    """All it ever gives is a final average, and it says that it has finished."""
    return _final_and_on(teller, _finished(teller, frame))


@lie("final average of one who goes on", caught=True)
def _final_and_on(teller: Teller, frame: Frame) -> Frame:
    if frame.share is None:
        return frame
    return replace(frame, share=teller.signed(_final(frame.share.claim), frame.share.row))


def _row(*values: float) -> Callable[[Teller, Share], tuple[Claim, bytes]]:
    def change(teller: Teller, share: Share) -> tuple[Claim, bytes]:
        value = teller.draw.choice(values)
        return share.claim, _filled(value)

    return change


of_share("row that is none", _row(float("nan"), float("inf"), -float("inf")), caught=True)
of_share("row of any length", _row(1e4, 1e30, -1e300), caught=True)
of_share("row within the bound", _row(-10.0, 10.0, 30.0))


def _of_final(*changes: dict[str, float]) -> Callable[[Teller, Share], tuple[Claim, bytes]]:
    """Honest until the end: only the final average is another one."""

    def change(teller: Teller, share: Share) -> tuple[Claim, bytes]:
        if share.claim.phase != FINAL:
            return share.claim, share.row
        values = dict(teller.draw.choice(changes))
        fill = values.pop("fill", None)
        row = share.row if fill is None else _filled(fill)
        return replace(share.claim, **values), row

    return change


def _filled(value: float) -> bytes:
    return torch.full((WIDTH,), value, dtype=torch.float64).numpy().tobytes()


of_share("final claim", _of_final({"weight": 0.5}, {"a": 2.0}, {"a": 0.0}, {"round": HUGE}))
of_share("final row", _of_final({"fill": 10.0}, {"fill": -30.0}, {"fill": 1e30}, {"fill": float("nan")}))


@lie("signature", caught=True)
def _signature(teller: Teller, frame: Frame) -> Frame:
    if frame.share is None:
        return frame
    return replace(frame, share=replace(frame.share, claim=replace(frame.share.claim, signature=b"mine")))


@lie("digest")
def _digest(teller: Teller, frame: Frame) -> Frame:
    return frame if frame.seen is None else replace(frame, seen=replace(frame.seen, digest="0" * 64))


@lie("seen")
def _seen(teller: Teller, frame: Frame) -> Frame:
    if frame.seen is None:
        return replace(frame, receipt=b"for nothing")
    changed = replace(frame.seen, round=abs(teller.whole(frame.seen.round)))
    return teller.draw.choice(
        [replace(frame, seen=None), replace(frame, seen=changed), replace(frame, receipt=b"")]
    )


lie("withheld shares")(lambda t, f: replace(f, share=None))
lie("row of another size", caught=True)(lambda t, f: f.encode() + b"x" * t.draw.choice([1, 8, 24, 100]))
lie("cut off", caught=True)(lambda t, f: f.encode()[: t.draw.randrange(8, 40)])


@lie("bytes")
def _bytes(teller: Teller, frame: Frame) -> bytes:
    data = bytearray(frame.encode())
    for _ in range(teller.draw.randint(1, 4)):
        data[teller.draw.randrange(len(data))] = teller.draw.randrange(256)
    return bytes(data)


class LyingPost(Post):
    """Sends what a liar makes of an honest member's frames."""

    def __init__(self, post: SimulatedPost, teller: Teller, lies: tuple[str, ...], often: float) -> None:
        self._post, self._teller, self._lies, self._often = post, teller, lies, often

    def send(self, to: str, frame: bytes) -> None:
        teller = self._teller
        teller.to = teller.names.index(to)
        if teller.draw.random() >= self._often:
            self._post.send(to, frame)
            return
        told: Frame | bytes = decode(frame, "run", len(teller.names), WIDTH * 8)
        for name in self._lies:
            if isinstance(told, Frame):
                told = LIES[name](teller, told)
        self._post.send(to, told.encode() if isinstance(told, Frame) else told)

    def receive(self, seconds: float) -> tuple[str, bytes] | None:
        return self._post.receive(seconds)

    def connected(self) -> frozenset[str]:
        return self._post.connected()

    def close(self) -> None:
        self._post.close()


class Counting(Peers):
    """An honest member that keeps books of all mass of the rounds of learning."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.counted: Counter[int] = Counter()
        self.given: Counter[int] = Counter()
        self.lost = 0.0

    def hold(self, phase: int, row: Tensor, a: float) -> None:
        before = self._home[phase][1]
        super().hold(phase, row, a)
        if phase == LEARNING:
            self.lost += before + a - self._home[phase][1]

    def _count(self, node, inlet, share, leaves) -> None:  # type: ignore[no-untyped-def]
        super()._count(node, inlet, share, leaves)
        if share.claim.phase == LEARNING:
            self.counted[node] += share.claim.weight * share.claim.a

    def _give(
        self, phase: int, round_: int, row: Tensor, a: float, parts: Mapping[int, float], rest: float
    ) -> None:
        if phase == LEARNING:
            for node, weight in parts.items():
                self.given[node] += weight * a
        super()._give(phase, round_, row, a, parts, rest)


@dataclass
class Honest(Bare):
    kind: type[Peers] = Counting


class Shameless(Peers):
    """Others show the liar what it has signed; it knows."""

    def _check_seen(self, node: int, seen: Claim, receipt: bytes) -> None:
        return


@dataclass
class Liar(Bare):
    teller: Teller = field(default_factory=lambda: Teller(random.Random(), ()))
    lies: tuple[str, ...] = ()
    often: float = 1.0

    def make(self, post: SimulatedPost) -> Peers:
        return Shameless(self.membership, LyingPost(post, self.teller, self.lies, self.often), post.clock)


def federate(
    folder: Path, seed: int, lies: tuple[str, ...], often: float, late: bool = False
) -> list[Honest]:
    """Run a small federation with a liar; what became of the honest ones. `late`: one of them is killed and comes back when the others
    have finished, which join once more after they have gone."""
    draw = random.Random(seed)
    n = draw.choice([4, 5] if late else [3, 4, 5])
    kinds: list[Topology] = [Ring(n), Complete(n), Exponential(n)]
    topology, names = draw.choice(kinds), tuple(f"m{k}" for k in range(n))
    honest, mains, left = [], {}, set(names) - {names[LIAR]}
    for k, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        membership = membership_of(names, k, topology)
        if k == LIAR:
            mains[name] = Liar(
                membership,
                topology,
                folder / name,
                ROUNDS,
                teller=Teller(draw, names),
                lies=lies,
                often=often,
            )
            continue
        member = Honest(membership, topology, folder / name, ROUNDS)
        honest.append(member)
        mains[name] = member  # type: ignore[assignment]

    def main(name: str) -> Callable[[SimulatedPost], None]:
        def run(post: SimulatedPost) -> None:
            mains[name](post)
            left.discard(name)
            if not left:
                network.kill(names[LIAR])

        return run

    network = Network(
        {name: main(name) for name in names},
        seed,
        loss=draw.choice([0.0, 0.0, 0.1]),
        duplicate=draw.choice([0.0, 0.1]),
        delay=(0.01, draw.choice([0.01, 0.04])),
    )
    victim = honest[seed % len(honest)]

    def come_back() -> None:
        missing = any(member.result is None for member in honest if member is not victim)
        if (
            missing and network.now < 10 * HARD
        ):  # on a ring one of them may be left with the liar, and waits for the victim
            network.at(network.now + 0.1, come_back)
            return
        network.at(network.now + 0.2, lambda: network.restart(victim.membership.name))
        for name in sorted({member.membership.name for member in honest}):
            network.at(network.now + 4 * HARD, lambda name=name: network.restart(name))

    if late:
        network.at(draw.uniform(0.1, 0.8), lambda: network.kill(victim.membership.name))
        network.at(1.0, come_back)
    network.run(until=UNTIL)
    return honest


def check(folder: Path, seed: int, lies: tuple[str, ...], often: float, late: bool = False) -> list[Honest]:
    """The claims at the top of this file."""
    honest = federate(folder, seed, lies, often, late)
    told = f"seed {seed}: {lies}, {often}, {late}"
    fabrics: dict[int, Counting] = {}
    for member in honest:
        fabric = member.fabric
        assert isinstance(fabric, Counting)
        fabrics[member.membership.own] = fabric
        assert member.result is not None, told
        assert float(member.result.norm()) <= 2 * fabric._rows.longest(1.0), told
        assert set(fabric.refused) <= {LIAR}, (told, fabric.refused)
        assert set(fabric.refused_by) <= {LIAR}, (told, fabric.refused_by)
        for message, signature in fabric.evidence.values():
            assert verify(fabric.membership.names[LIAR], signature, message), told
        assert fabric._home[LEARNING][1] <= fabric.nodes
    if late:  # what a member has counted and given is forgotten with its process
        return honest
    check_mass(honest, fabrics, told, made_up=bool({"a", "all mass", "weight", "state"} & set(lies)))
    return honest


def check_mass(honest: list[Honest], fabrics: dict[int, Counting], told: str, *, made_up: bool) -> None:
    from_liar = to_liar = in_all = 0.0
    for own, fabric in fabrics.items():
        held = fabric._home[LEARNING][1]
        books = 1 + sum(fabric.counted.values()) - sum(fabric.given.values()) - fabric.lost
        assert held == pytest.approx(books, abs=1e-9), told
        from_liar, to_liar = from_liar + fabric.counted[LIAR], to_liar + fabric.given[LIAR]
        in_all += held + fabric.lost
        for node, other in fabrics.items():
            if node == own:
                continue
            got = other._inlets[own].counted
            rest = [sent for sent in fabric._outlets[node].waiting if sent.number > got]
            waiting = sum(s.weight * fabric._letters[s.letter].a for s in rest if s.letter[0] == LEARNING)
            assert fabric.given[node] == pytest.approx(other.counted[own] + waiting, abs=1e-9), told
            in_all += waiting
    assert in_all == pytest.approx(len(honest) + from_liar - to_liar, abs=1e-9), told
    if not made_up:  # then the liar gives no more than it had and got, and nobody has anything to cut off
        assert from_liar <= 1 + to_liar + 1e-9, told
        assert sum(fabric.lost for fabric in fabrics.values()) == pytest.approx(0, abs=1e-9), told


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch, no_fsync: None) -> None:
    """For the disk, nor for an agreement that a liar never grants."""
    monkeypatch.setattr("dpps.peers.gossip.LONGEST", 12)
    monkeypatch.setattr("dpps.peers.gossip.PATIENCE", 1)


def alone(folder: Path, name: str, seeds: range) -> None:
    """One lie, in every frame or in some."""
    for k, often in itertools.product(seeds, (1.0, 0.2)):
        honest = check(folder / f"{k}-{often}", k, (name,), often)
        fabrics = [member.fabric for member in honest if member.fabric is not None]
        near = [f for f in fabrics if f.membership.names[LIAR] in f.membership.partners]
        if often == 1.0 and name in CAUGHT:
            refused = [f for f in near if LIAR in f.refused]
            assert refused, f"{name}, seed {k}"
            if name in PROVEN:
                assert all(LIAR in f.evidence for f in refused), f"{name}, seed {k}"


def together(folder: Path, seeds: range) -> None:
    """Several lies at once."""
    for seed in seeds:
        draw = random.Random(f"together {seed}")
        lies = tuple(draw.sample(sorted(LIES), draw.randint(2, 6)))
        check(folder / str(seed), seed, lies, draw.choice([1.0, 0.5, 0.1, 0.02]))


def to_a_latecomer(folder: Path, seeds: range, names: list[str] | None = None) -> None:
    """Lies, alone and together, while one honest member is away at the end."""
    for seed in seeds:
        draw = random.Random(f"late {seed}")
        lies = tuple(names or draw.sample(sorted(LIES), draw.randint(1, 4)))
        check(folder / str(seed), seed, lies, draw.choice([1.0, 0.5, 0.1]), late=True)


@pytest.mark.parametrize("name", sorted(LIES))
def test_one_lie_to_a_latecomer(name: str, tmp_path: Path) -> None:
    to_a_latecomer(tmp_path, range(1), [name])


def test_lies_together_to_a_latecomer(tmp_path: Path) -> None:
    to_a_latecomer(tmp_path, range(20))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_lies_to_latecomers(part: int, tmp_path: Path) -> None:
    to_a_latecomer(tmp_path, range(1000 + 50 * part, 1050 + 50 * part))


@pytest.mark.parametrize("name", sorted(LIES))
def test_one_lie(name: str, tmp_path: Path) -> None:
    alone(tmp_path, name, range(2))


def test_lies_together(tmp_path: Path) -> None:
    together(tmp_path, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LIES))
def test_one_lie_in_many_networks(name: str, tmp_path: Path) -> None:
    alone(tmp_path, name, range(2, 27))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_lies_together(part: int, tmp_path: Path) -> None:
    together(tmp_path, range(1000 + 100 * part, 1100 + 100 * part))
