"""Noise that cancels between members that come and go: real runs on a simulated network."""

import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch

import dpps
from dpps.errors import RunError
from dpps.peers import LEARNING, Member, decode, read_status
from dpps.peers.links import HERE, STARTS
from dpps.peers.messages import Presence
from dpps.privacy import LedgerFile
from dpps.runs import Run
from tests.peers.test_join import Terminal, organisations
from tests.support.bare import HARD, ROW, WIDTH, A, B, sign_as, started
from tests.support.pairs import Sharing
from tests.support.peers import NAMES
from tests.support.simulated import Killed, Network, SimulatedPost

pytestmark = pytest.mark.usefixtures("no_fsync")


def once(week: Sharing) -> None:
    """Every round's noise of a member is in at most one of its messages, and every message that left is known."""
    for name in week.names:
        own = [part.round for part in chain(*week.given[name].values()) if part.own]
        assert len(own) == len(set(own)), name
        charged = [r for r, _ in LedgerFile.read(week.folder / name / "ledger.jsonl").history]
        assert set(charged) >= set(week.given[name]) & set(range(20)), name


def test_undisturbed_all_of_it_cancels(tmp_path: Path) -> None:
    week = Sharing(tmp_path)
    week.network.run()
    once(week)
    assert week.standing() == {}
    for name in week.names:
        assert sorted(week.given[name]) == list(range(20))
        assert week.off(name) < 1e-4


def test_a_member_that_was_away_makes_up_for_what_it_missed(tmp_path: Path) -> None:
    week = Sharing(tmp_path, epochs=10)
    week.network.at(0.4, lambda: week.network.isolate("m3"))
    week.network.at(0.8, lambda: week.network.rejoin("m3"))
    week.network.run()
    once(week)
    missed = set(range(40)) - set(week.given["m3"])
    assert len(missed) > 5
    assert week.standing() == {}
    assert max(week.off(name) for name in week.names) < 1e-4
    charged = [r for r, _ in LedgerFile.read(tmp_path / "m3" / "ledger.jsonl").history]
    assert not missed & set(charged), "what is made up for costs nothing"


def test_with_momentum_it_does_not_matter_when_noise_is_added(tmp_path: Path) -> None:
    """One member makes up for what it missed in the middle, one adds the last of it after the last round."""
    week = Sharing(tmp_path, epochs=10, more={"learning": {"optimizer": dpps.Momentum(0.8)}})
    week.network.at(0.4, lambda: week.network.isolate("m3"))
    week.network.at(0.8, lambda: week.network.rejoin("m3"))
    week.network.at(1.1, lambda: week.network.kill("m1"))
    week.network.at(1.6, lambda: week.network.restart("m1"))
    week.network.run()
    once(week)
    assert len(set(range(40)) - set(week.given["m3"])) > 5
    assert 39 not in week.given["m1"]
    assert week.standing() == {}
    assert max(week.off(name) for name in week.names) < 1e-4


def test_the_noise_shared_with_a_lost_member_is_taken_back(tmp_path: Path) -> None:
    week = Sharing(tmp_path, members=6, epochs=15)
    week.network.at(0.8, lambda: week.network.kill("m2"))
    week.network.at(1.3, lambda: week.expel(2))
    week.network.run()
    once(week)
    left = [name for name in week.names if name != "m2"]
    assert all(week.member(name).pairs.rounds.lost.keys() == {2} for name in left)
    (last,) = {week.member(name).pairs.rounds.lost[2] for name in left}
    released = max(week.released("m2"))
    assert released <= last <= released + 8
    standing = week.standing()
    assert {r for i, j, r in standing if 2 in (i, j)} <= set(range(released + 1, last + 1))
    assert not [pair for pair in standing if 2 not in pair[:2]]
    taken_back = [p for name in left for p in chain(*week.given[name].values()) if not p.own]
    assert {part.round for part in taken_back} <= set(range(last + 1, 60))
    assert {part.pairs[0][0] for part in taken_back} == {2}
    assert len(taken_back) >= 5


def test_no_more_are_taken_back_than_may_be_lost(tmp_path: Path) -> None:
    week = Sharing(tmp_path, members=6, epochs=15, rules={"min_members": 3})
    week.network.at(0.5, lambda: week.network.kill("m2"))
    week.network.at(0.6, lambda: week.network.kill("m5"))
    week.network.at(1.2, lambda: week.expel(5))
    week.network.at(1.3, lambda: week.expel(2))
    week.network.run()
    once(week)
    for name in ("m0", "m1", "m3", "m4"):
        assert week.member(name).pairs.rounds.lost.keys() == {5}


def test_two_members_do_not_hide_each_other_and_keys_are_needed(tmp_path: Path) -> None:
    for wrong in (Sharing(tmp_path / "a", members=2, trust=dpps.Pairs(0)), Sharing(tmp_path / "b")):
        if wrong.members > 2:
            wrong.membership = lambda k, made=wrong.membership: replace(made(k), pair_keys=None)  # type: ignore[method-assign]
        with pytest.raises(dpps.UsageError, match="Pairs"):
            wrong.network.run()
        assert wrong.left == {}


def test_three_organisations_by_grpc(tmp_path: Path) -> None:
    """From requests with keys to a model, and what the run says of it."""
    trust = {"trust": "pairs", "colluders": 0, "absentees": 1}
    three = organisations(tmp_path, 60.0, 120.0, **trust)
    terminals = [Terminal(three, name) for name in NAMES]
    ended = [terminal.ended() for terminal in terminals]
    assert [each.error for each in ended] == [None] * 3
    runs = [each.participation.run for each in ended]
    assert all(torch.allclose(run.shared, runs[0].shared, atol=1e-4) for run in runs)
    for run, terminal in zip(runs, ended, strict=True):
        contract = run.contract
        assert (contract.trust["colluders"], contract.trust["absentees"]) == (0, 1)
        ledger = LedgerFile.read(terminal.out / "ledger.jsonl")
        assert [r for r, _ in ledger.history] == list(range(run.plan.count))
        told = read_status(terminal.out)
        assert told.protected.startswith("unit contribution")
        assert [int(word) for word in told.against.split() if word.isdigit()] == [0, 1]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["m0", pytest.param("m3", marks=pytest.mark.slow)])
def test_killed_around_the_write_of_any_message(name: str, when: str, tmp_path: Path) -> None:
    """Every ninth write ends the process: a message and its noise exist both or not at all."""
    week = Sharing(tmp_path, epochs=10, members=4, trust=dpps.Pairs(1, absentees=1))
    watch, writes = week._watch, 0

    def dying(where: Member, whose: str) -> None:
        watch(where, whose)
        write = where._write

        def last(run: Run, round_: int, clock: int) -> None:
            nonlocal writes
            writes += whose == name
            dies = whose == name and writes % 9 == 0
            if dies:
                week.network.at(week.network.now + 0.05, lambda: week.network.restart(whose))
            if dies and when == "before":
                raise killed(where)
            write(run, round_, clock)
            if dies:
                raise killed(where)

        where._write = last  # type: ignore[method-assign]

    week._watch = dying  # type: ignore[method-assign]
    week.network.run()
    once(week)
    assert week.member(name).fabric.start_number > 2
    assert week.standing() == {}
    assert max(week.off(each) for each in week.names) < 1e-4


def killed(where: Member) -> Killed:
    where.post._process.killed = True
    where._run.ledger._abandon()
    return Killed()


def test_an_older_copy_releases_nothing(tmp_path: Path) -> None:
    """Whoever has heard of a later round says so, also a neighbour that never got a row: before anything leaves."""
    week = Sharing(tmp_path, epochs=20)
    network, copy = week.network, tmp_path / "copy"

    def put_back() -> None:
        shutil.rmtree(tmp_path / "m1")
        copy.rename(tmp_path / "m1")

    network.at(0.3, lambda: network.kill("m1"))
    network.at(0.31, lambda: shutil.copytree(tmp_path / "m1", copy))
    network.at(0.35, lambda: network.restart("m1"))
    network.at(0.8, lambda: network.kill("m1"))
    network.at(0.81, put_back)
    network.at(0.9, lambda: network.restart("m1"))
    with pytest.raises(RunError, match=r"round \d+"):
        network.run()
    before = {r for r, _ in LedgerFile.read(tmp_path / "m1" / "ledger.jsonl").history}
    assert max(before) < max(week.released("m1"))


def test_a_snapshot_is_found_out_by_the_word_of_a_neighbour_that_has_no_row() -> None:
    """A machine that is put back while it runs: the others' signs of life hold its own signature of a later round."""
    later = Presence(5 * STARTS, 7, HERE)
    signed = replace(later, signature=sign_as(A)(later.message("run", A)))
    errors: list[RunError] = []

    def knows(post: SimulatedPost) -> None:
        fabric = started(post, 1)
        fabric.view.known[0] = fabric.view._farthest[0] = signed
        while post.clock() < HARD:
            fabric.wait(0.05)

    def put_back(post: SimulatedPost) -> None:
        fabric = started(post, 0)
        fabric.share_noise(0, 0)
        try:
            while post.clock() < HARD:
                fabric.wait(0.05)
        except RunError as error:
            errors.append(error)
        with pytest.raises(RunError):
            fabric._push(LEARNING, 0, {1: 0.5}, [], ROW, 1.0)

    shares: list[bytes] = []

    def tap(sender: str, to: str, data: bytes) -> None:
        if sender == A and decode(data, "run", 2, WIDTH * 8).share is not None:
            shares.append(data)

    Network({A: put_back, B: knows}, tap=tap).run()
    assert [type(error) for error in errors] == [RunError]
    assert shares == []


def test_rows_are_passed_on_between_releases_without_a_barrier(tmp_path: Path) -> None:
    """Three gossip exchanges for each of 16 releases; one member is killed and another one is away meanwhile."""
    week = Sharing(tmp_path, epochs=4, more={"mixes": 3}, network_options={"seed": 1, "loss": 0.03})
    week.network.at(0.3, lambda: week.network.kill("m1"))
    week.network.at(0.45, lambda: week.network.restart("m1"))
    week.network.at(0.5, lambda: week.network.isolate("m3"))
    week.network.at(0.7, lambda: week.network.rejoin("m3"))
    week.network.run()
    for name in week.names:
        charged = [r for r, _ in LedgerFile.read(tmp_path / name / "ledger.jsonl").history]
        assert charged == sorted(set(charged))
        assert max(charged) == 15
        assert week.member(name).fabric.refused == {}
        assert {r % 3 for r in week.released(name)} == {0, 1, 2}
    assert max(week.released("m0")) == 47
    assert week.standing() == {}
    assert max(week.off(name) for name in week.names) < 1e-4


def test_passing_on_mixes_rows_that_noise_has_driven_apart(tmp_path: Path) -> None:
    def apart(mixes: int) -> float:
        week = Sharing(tmp_path / str(mixes), epochs=3, more={"mixes": mixes}, topology=dpps.Exponential(5))
        rows: dict[str, torch.Tensor] = {}
        take = Member.after_last_round

        def before(where: Member, run: Run) -> None:
            rows[where.membership.name] = run.state.shared.y[0].clone()
            take(where, run)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Member, "after_last_round", before)
            week.network.run()
        return float(torch.stack(list(rows.values())).std(0).mean())

    assert apart(4) < apart(1) / 2
