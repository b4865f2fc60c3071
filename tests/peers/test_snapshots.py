"""A running machine that is put back to a snapshot: nothing waiting leaves before a neighbour has shown what it has, and noise differs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dpps.errors import RunError
from dpps.learning import NodeData, Poisson
from dpps.noise import Gaussian, Keystream, Outgoing, SecureNoise
from dpps.peers import LEARNING, Channel, Frame, decode
from dpps.peers.connections import Outgoing as Queue
from dpps.peers.messages import Claim
from tests.support.bare import HARD, ROW, WIDTH, A, B, met, sign_as, started
from tests.support.peers import NAMES as THREE
from tests.support.peers import Organisations
from tests.support.processes import free_port, until
from tests.support.simulated import Network, SimulatedPost

CUT, MEND, SPEAKS = 1.0, 2.0, 3.0


def _run(
    speaks: Callable[[SimulatedPost], None], gives: Callable[[SimulatedPost], None]
) -> list[tuple[float, Frame]]:
    """A gives a row while it is cut off from B, and is connected again; what A handed over, and when."""
    found: list[tuple[float, Frame]] = []

    def tap(sender: str, to: str, data: bytes) -> None:
        if sender == A:
            found.append((network.now, decode(data, "run", 2, WIDTH * 8)))

    network = Network({A: gives, B: speaks}, tap=tap)
    network.at(CUT, lambda: network.cut(A, B, notice=0.5))
    network.at(MEND, lambda: network.mend(A, B))
    network.run(until=4 * HARD)
    return found


def _gives(errors: list[RunError]) -> Callable[[SimulatedPost], None]:
    def main(post: SimulatedPost) -> None:
        fabric = started(post, 0, soft_deadline=0.3, hard_deadline=3000.0)
        met(fabric)
        while post.clock() < CUT + 0.1:
            fabric.wait(0.02)
        with fabric.lock:  # it is sent, and does not arrive
            fabric._push(LEARNING, 0, {1: 0.5}, [], ROW, 1.0)
        try:
            while True:
                fabric.wait(0.1)
        except RunError as error:
            errors.append(error)

    return main


def test_a_share_waits_until_the_other_side_was_heard_on_a_new_connection() -> None:
    got: list[float] = []

    def quiet(post: SimulatedPost) -> None:
        fabric = started(post, 1, soft_deadline=0.3, hard_deadline=3000.0)
        while post.clock() < CUT:
            fabric.wait(0.05)
        while post.clock() < SPEAKS:  # connected, and silent
            post.receive(SPEAKS - post.clock())
        while True:
            fabric.wait(0.05)
            if fabric._home[LEARNING][1] and not got:
                got.append(post.clock())

    frames = _run(quiet, _gives([]))
    shares = [when for when, frame in frames if frame.share is not None and when > MEND]
    assert any(MEND <= when < SPEAKS for when, _ in frames), "it greets"
    assert min(shares) >= SPEAKS
    assert len(got) == 1


def test_evidence_comes_before_a_waiting_share() -> None:
    """B has a row of A's that A does not know any more: what A has made instead never leaves."""
    errors: list[RunError] = []

    def knows(post: SimulatedPost) -> None:
        fabric = started(post, 1, soft_deadline=0.3, hard_deadline=3000.0)
        while post.clock() < CUT + 0.5:
            fabric.wait(0.05)
        claim = Claim(LEARNING, 0, "0" * 64, 1, 0.5, 1.0)
        signature = sign_as(A)(claim.message("run", A, B))
        fabric._inlets[0].seen = replace(claim, signature=signature)
        while True:
            fabric.wait(0.05)

    frames = _run(knows, _gives(errors))
    assert [type(error) for error in errors] == [RunError]
    assert not [when for when, frame in frames if frame.share is not None and when > MEND]


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[list[Channel]]:
    made = Organisations(tmp_path, (free_port(), free_port()))
    with ExitStack() as stack:
        found = [Channel(made.federation, made.identities[name]) for name in THREE[:2]]
        for channel in found:
            stack.callback(channel.close)
            channel.start()
        yield found


def test_a_new_connection_is_told_from_the_one_before_and_brings_none_of_its_frames(
    channels: list[Channel],
) -> None:
    """Also while the one before is not yet known to be dead."""
    one, other = channels
    name, peer = THREE[0], THREE[1]
    until(lambda: one.connected() == {peer} and other.connected() == {name})
    before = one.connection(peer)
    one.arrived(peer, b"from the connection before")
    with one.attached(peer, Queue(1000)):
        assert peer in one.connected()
        assert one.connection(peer) != before
        assert one.receive(0.0) is None


def _released(noise: SecureNoise) -> torch.Tensor:
    s = torch.zeros(1, 50, dtype=torch.float64)
    out = Outgoing(s, s.clone(), s.clone(), [0], 0, base_is_public=True)
    noise.release(Gaussian(1.0), 1.0, out)
    return out.half


class _Copied(Keystream):
    """A keystream whose ciphers start over, as those of a machine that is put back to a snapshot do."""

    def __init__(self, key: bytes) -> None:
        super().__init__()
        self._start(key)


def test_noise_and_batches_differ_after_a_snapshot_is_put_back() -> None:
    once, again = (SecureNoise(_Copied(bytes(32))) for _ in range(2))
    assert np.array_equal(_Copied(bytes(32)).words(8), _Copied(bytes(32)).words(8))
    assert not torch.equal(_released(once), _released(again))
    data = NodeData([torch.utils.data.TensorDataset(torch.zeros(500, 1), torch.zeros(500))], "cpu")
    drawn = [Poisson(data, [0], [0.5], _Copied(bytes(32)))._joins(0, 0, 500, 0.5) for _ in range(2)]
    assert not np.array_equal(*drawn)


def test_a_keystream_of_a_given_key_stays_what_it_is() -> None:
    one, other = Keystream(bytes(32)), Keystream(bytes(32))
    one.refresh()
    assert np.array_equal(one.words(8), other.words(8))
