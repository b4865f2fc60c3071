"""Noise that cancels, under random schedules: every message that was ever sent is compared with what the keys say."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

import dpps
from dpps.peers import LEARNING
from dpps.privacy import LedgerFile
from tests.support.pairs import Sharing
from tests.system.pair_noise import Message

pytestmark = pytest.mark.usefixtures("no_fsync")

ROUNDS, LOST = 32, 4


def a_week(folder: Path, seed: int) -> Sharing:
    """Frames are lost, doubled and overtaken; one member is away, two are killed and started again, at any moment; in every second
    week one is lost, expelled and started once more after that."""
    pick = random.Random(seed)
    network = {"seed": seed, "loss": 0.04, "duplicate": 0.04, "delay": (0.01, 0.04)}
    momentum = dpps.Momentum(0.5) if seed % 3 == 2 else None
    week = Sharing(
        folder,
        epochs=ROUNDS // 4,
        outputs=60,
        network_options=network,
        more={"learning": {"optimizer": momentum}},
        rules={"min_members": 3},
    )
    net, first = week.network, pick.uniform(0.1, 0.5)
    net.at(first, lambda: net.isolate("m3"))
    net.at(first + pick.uniform(0.1, 0.5), lambda: net.rejoin("m3"))
    for name in ("m1", "m2"):
        when = pick.uniform(0.05, 1.0)
        net.at(when, lambda name=name: net.kill(name))
        net.at(when + pick.uniform(0.05, 0.4), lambda name=name: net.restart(name))
    if seed % 2 == 0:
        when = pick.uniform(0.3, 0.7)
        net.at(when, lambda: net.kill(f"m{LOST}"))
        net.at(when + 0.3, lambda: week.expel(LOST))
        net.at(when + 0.4, lambda: net.restart(f"m{LOST}"))
        net.at(when + 2.0, lambda: net.kill(f"m{LOST}"))  # nobody hears it
    net.run()
    return week


# 2: a member is lost, and its partners have momentum and hear late of what it has released
@pytest.mark.parametrize("seed", [2, *(pytest.param(k, marks=pytest.mark.slow) for k in range(16) if k != 2)])
def test_every_message_is_what_the_keys_say(seed: int, tmp_path: Path) -> None:
    week = a_week(tmp_path, seed)
    lost = {k: max(m.round for m, _ in week.messages if m.member == k) for k in week.expelled}
    # what left is what was put on disk
    digests = {(m.member, m.round): digest for m, digest in week.messages}
    left = {(week.names.index(name), r): d for (name, phase, r), d in week.left.items() if phase == LEARNING}
    assert left.items() <= digests.items()
    for k, name in enumerate(week.names):
        charged = [r for r, _ in LedgerFile.read(tmp_path / name / "ledger.jsonl").history]
        assert charged == sorted(r for member, r in digests if member == k and r < ROUNDS), name
    # noise is in the messages of those who have it, once; that of rounds which a lost member may have released is not taken back
    messages, observer = week.without_momentum(), week.observer()
    found = observer.find(messages, ROUNDS)
    assert not found.wrong(lost)
    assert not found.standing(ROUNDS, lost)
    assert max(found.rest.values()) < 1e-6 * observer.scale**2
    there = [k for k in range(week.members) if k not in lost]
    assert {(i, j, r) for i in there for j in there for r in range(ROUNDS) if i != j} <= found.places.keys()
    # somebody who sent noise under a second message, or took it back from one who is there, would be found
    once_more = Message(there[0], ROUNDS + 1, messages[0].added)
    assert observer.find([*messages, replace(once_more, member=messages[0].member)], ROUNDS).wrong(lost)
    taken_back = replace(once_more, member=messages[0].member, added=-messages[0].added)
    assert observer.find([*messages, taken_back], ROUNDS).wrong(lost)
