"""A release between organisations that come and go: real members on a simulated network."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpps import Pairs
from dpps.noise import IdentityKey, PairKeys
from dpps.peers import LEARNING, Member, decode
from dpps.privacy import LedgerFile
from dpps.privacy.units import Unit
from dpps.statistics import Category, Number
from dpps.statistics.release import OneRecord, Release, Survey, WholeNode, messages_in
from tests.support.bare import membership_of
from tests.support.simulated import Network, SimulatedPost

pytestmark = pytest.mark.usefixtures("no_fsync")
COLUMNS = {"age": Number("age", 0, 120), "sex": Category("sex", ("f", "m"))}
SURVEY = Survey(["count()", "mean(age)", "histogram(sex)"], COLUMNS)
FAINT = OneRecord(noise_multiplier=1e-3, delta=1e-5)
"""Next to no noise: answers are those of the tables."""


def records(node: int) -> dict[str, np.ndarray]:
    """Nodes of very different sizes and ages."""
    draw, count = np.random.default_rng(node), 100 * 2**node
    return {"age": draw.uniform(10 * node, 10 * node + 40, count), "sex": draw.integers(0, 2, count) * 1.0}


class Clinics:
    """Members that ask, and what became of their releases."""

    def __init__(
        self, folder: Path, nodes: int = 3, unit: Unit = FAINT, survey: Survey = SURVEY, **rules: Any
    ) -> None:
        self.folder, self.unit, self.survey, self.rules = folder, unit.for_network(nodes), survey, rules
        self.names = tuple(f"m{k}" for k in range(nodes))
        self.keys = [IdentityKey() for _ in self.names]
        self.runs: dict[str, Release] = {}
        self.left: dict[str, set[str]] = {name: set() for name in self.names}
        self.starts: list[str] = []
        self.network = Network({name: self._main(k) for k, name in enumerate(self.names)}, tap=self._tap)

    def _tap(self, sender: str, _: str, frame: bytes) -> None:
        share = decode(frame, "run", len(self.names), 8 * len(self.names) * (self.survey.width + 1)).share
        if share is not None and (share.claim.phase, share.claim.round) == (LEARNING, 0):
            self.left[sender].add(share.claim.digest)

    def make(self, post: SimulatedPost, k: int) -> Release:
        graph = Release(
            self.survey, np.zeros((len(self.names), self.survey.width)), len(self.names), FAINT
        ).topology
        membership = membership_of(self.names, k, graph, **{"start_deadline": 5.0} | self.rules)
        if isinstance(self.unit.trust, Pairs):
            publics = [key.public for key in self.keys]
            keys = PairKeys(self.keys[k], publics, "run", b"between organisations")
            membership = replace(membership, pair_keys=keys)
        where = Member(membership, post, clock=post.clock, heart=False)
        sums = self.survey.sums(records(k))[None]
        options: dict[str, Any] = {"folder": self.folder / self.names[k], "deployment": where}
        return Release(self.survey, sums, len(self.names), self.unit, secure_noise=True, **options)

    def _main(self, k: int) -> Callable[[SimulatedPost], None]:
        def main(post: SimulatedPost) -> None:
            self.starts.append(self.names[k])
            run = self.make(post, k)
            self.runs[self.names[k]] = run
            try:
                run.fit(1, progress=False)
            finally:
                run.close()

        return main

    def answers(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name / "answers.json").read_text())
        return found

    def charges(self, name: str) -> int:
        return len(LedgerFile.read(self.folder / name / "ledger.jsonl").history)


def exact(*nodes: int) -> list[Any]:
    """What the pooled table of these nodes has: count, mean age, shares of both sexes and of missing."""
    parts = [records(node) for node in nodes]
    age, sex = (np.concatenate([part[name] for part in parts]) for name in ("age", "sex"))
    return [len(age), age.mean(), [(sex == 0).mean(), (sex == 1).mean(), 0.0]]


def same(found: dict[str, Any], *nodes: int, within: float = 1e-3) -> None:
    for answer, truth in zip(found["answers"], exact(*nodes), strict=True):
        assert np.allclose(answer["value"], truth, rtol=within, atol=within), answer["query"]


@pytest.mark.parametrize("nodes", [2, 3, 5])
def test_all_have_the_same_answers_and_paid_once(tmp_path: Path, nodes: int) -> None:
    clinics = Clinics(tmp_path, nodes)
    clinics.network.run()
    first = clinics.answers("m0")
    assert first["nodes"] == [nodes, nodes]
    same(first, *range(nodes))
    for name in clinics.names:
        assert clinics.answers(name)["answers"] == first["answers"]
        assert clinics.charges(name) == 1
        assert len(clinics.left[name]) == 1
        assert f"{nodes} of {nodes} nodes" in clinics.answers(name)["privacy"]["statement"]


def test_one_that_never_comes_is_counted_out(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path)
    clinics.network.at(0.0, lambda: clinics.network.kill("m2"))
    clinics.network.run()
    assert clinics.answers("m0")["nodes"] == [2, 3]
    assert clinics.answers("m0") == clinics.answers("m1")
    same(clinics.answers("m0"), 0, 1)
    assert "m2" in clinics.answers("m0")["privacy"]["statement"]
    assert not clinics.left["m2"]


@pytest.mark.parametrize("seconds", [0.06, 0.1, 0.15, 0.2, 0.3])
def test_one_that_is_lost_on_the_way_counts_as_a_whole_or_not_at_all(tmp_path: Path, seconds: float) -> None:
    """Mass and parts of everybody's message are lost with it: a plain mean would weigh the others unequally."""
    clinics = Clinics(tmp_path, 5)
    clinics.network.at(seconds, lambda: clinics.network.kill("m4"))
    clinics.network.run()
    found = [clinics.answers(name) for name in clinics.names[:4]]
    assert all(each["answers"] == found[0]["answers"] for each in found)
    released = found[0]["nodes"][0]
    assert released in (4, 5)
    same(found[0], *range(released))


@pytest.mark.parametrize("trust", [None, Pairs(1)])
@pytest.mark.parametrize("seconds", [0.1, 0.3])
def test_one_that_is_killed_sends_the_same_message_again(
    tmp_path: Path, seconds: float, trust: Pairs | None
) -> None:
    unit = OneRecord(epsilon=1.0, delta=1e-5, **({} if trust is None else {"trust": trust}))
    clinics = Clinics(tmp_path, unit=unit)
    clinics.network.at(seconds, lambda: clinics.network.kill("m1"))
    clinics.network.at(seconds + 0.3, lambda: clinics.network.restart("m1"))
    clinics.network.run()
    assert clinics.starts.count("m1") == 2
    assert clinics.charges("m1") == 1
    assert len(clinics.left["m1"]) == 1
    assert clinics.answers("m1")["nodes"] == [3, 3]
    assert all(clinics.answers(name)["answers"] == clinics.answers("m0")["answers"] for name in clinics.names)


def test_one_that_comes_when_all_is_over_has_the_answers_and_pays_nothing(tmp_path: Path) -> None:
    clinics = Clinics(tmp_path, hard_deadline=10.0, start_deadline=1.0)
    clinics.network.at(0.0, lambda: clinics.network.kill("m2"))
    clinics.network.at(6.0, lambda: clinics.network.restart("m2"))
    clinics.network.run()
    assert clinics.answers("m0")["nodes"] == [2, 3]
    assert clinics.answers("m2")["answers"] == clinics.answers("m0")["answers"]
    assert clinics.charges("m2") == 0
    assert not clinics.left["m2"]


@pytest.mark.parametrize("absent", [False, True])
def test_noise_that_partners_share(tmp_path: Path, absent: bool) -> None:
    """It cancels where all release. Where one does not, what is left of it is in the intervals."""
    survey = Survey(["histogram(age, bins=300)"], COLUMNS)
    clinics = Clinics(tmp_path, 4, OneRecord(epsilon=1.0, delta=1e-5, trust=Pairs(1)), survey)
    if absent:
        clinics.network.at(0.0, lambda: clinics.network.kill("m3"))
    clinics.network.run()
    released = range(3 if absent else 4)
    run = clinics.runs["m0"]
    sums = sum(messages_in(run.shared.numpy(), 4).values())
    noise = sums - sum(survey.sums(records(node)) for node in released)
    claimed = run.noise_of_sums(released)
    assert 0.8 < np.std(noise) / claimed < 1.25
    alone = Clinics(tmp_path / "alone", 4, OneRecord(epsilon=1.0, delta=1e-5), survey)
    alone.network.run()
    independent = alone.runs["m0"].noise_of_sums(range(4))
    assert (claimed > independent) if absent else (claimed < 0.8 * independent)


def test_a_node_that_is_scaled_down_does_not_tell_by_how_much(tmp_path: Path) -> None:
    """The 1 that travels with a message is no part of what is clipped."""
    clinics = Clinics(tmp_path, 3, WholeNode(50.0, 1e6, 1e-5, "gaussian"))
    clinics.network.run()
    row = clinics.runs["m0"].shared.numpy().reshape(3, -1)
    assert np.allclose(row[:, -1], row[0, -1])
    for node, message in messages_in(row.reshape(-1), 3).items():
        assert np.linalg.norm(message) < 51, node
