"""What leaves a process over torch.distributed, and a member over the network between organisations, keeps the promised epsilon."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dpps.audit import CLAIM, Case, attack, weakened
from dpps.audit.epsilon import DELTA, calibration
from dpps.noise import NoiseSource, SecureNoise, Seeded
from dpps.peers import LEARNING, decode
from dpps.privacy import Contribution
from dpps.protocol import DPPS
from dpps.sensitivity import Unclipped
from dpps.topology import Exponential
from dpps.transport import Distributed
from dpps.transport.distributed import Wire
from tests.support.bare import Bare, membership_of
from tests.support.simulated import Network

UNIT = Contribution(1.0, CLAIM, DELTA, "gaussian")
ROUNDS = 2
Sent = tuple[list[np.ndarray], list[np.ndarray], float]
"""Node 0's messages, as they left, its rows before each, and the scale of its noise."""


def protocol(noise: NoiseSource, fabric: Any) -> DPPS:
    """Two nodes whose rows have a coordinate for every trial; each moves as far as the noise is calibrated to."""
    bound = Unclipped(2 * UNIT.clip)
    return DPPS(Exponential(2), calibration(UNIT).mechanism, bound, noise=noise, fabric=fabric)


def perturbation(node: int, sign: int, copies: int) -> torch.Tensor:
    return torch.full((1, copies), 0.0 if node else sign * UNIT.clip, dtype=torch.float64)


class TappedWire(Wire):
    """Keeps all that is sent."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.sent: list[torch.Tensor] = []

    def post(self, outgoing, incoming):
        self.sent += [message.tensor.clone() for message in outgoing]
        return super().post(outgoing, incoming)


def over_distributed(copies: int, noise: Callable[[], NoiseSource], sign: int) -> Sent:
    """Two ranks, each in a thread, over gloo."""
    store, wires, before, scales, failed = dist.HashStore(), {}, [], [], []

    def run(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
            wires[rank] = TappedWire(group, rank, 2)
            dpps = protocol(noise(), Distributed(2, wires[rank]))
            state = dpps.start(torch.zeros(1, copies, dtype=torch.float64), common_start=True)
            for _ in range(ROUNDS):
                if rank == 0:
                    before.append(state.s[0].numpy().copy())
                scales.append(dpps.step(state, perturbation(rank, sign, copies)).scale)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    rows = [t.numpy().reshape(-1) for t in wires[0].sent if t.dtype == torch.float64]
    others = [t for t in wires[0].sent if t.dtype != torch.float64]
    assert len(rows) == ROUNDS
    assert max(t.nbytes for t in others) < 200  # headers, which say shapes
    return rows, before, scales[0]


@dataclass
class Audited(Bare):
    """A member whose input is that of one of the worlds."""

    noise: NoiseSource = None  # type: ignore[assignment]
    sign: int = 1

    def __post_init__(self) -> None:
        self.before: list[np.ndarray] = []

    def protocol(self, fabric: Any) -> DPPS:
        self.made = protocol(self.noise, fabric)
        return self.made

    def pull(self, state: Any) -> torch.Tensor:
        assert float(state.a[0]) == pytest.approx(1)
        self.before.append(state.s[0].numpy().copy())
        return perturbation(self.membership.own, self.sign, self.width)


def over_peers(copies: int, noise: Callable[[], NoiseSource], sign: int) -> Sent:
    """Two members on a simulated network, whose frames are read as they are handed over."""
    names, topology, shares = ("m0", "m1"), Exponential(2), {}

    def tap(sender: str, _: str, data: bytes) -> None:
        share = decode(data, "run", 2, copies * 8).share
        if sender == "m0" and share is not None and share.claim.phase == LEARNING:
            shares[share.claim.round] = np.frombuffer(share.row)

    with TemporaryDirectory() as folder:
        members = []
        for k, name in enumerate(names):
            (Path(folder) / name).mkdir()
            own = Audited(membership_of(names, k, topology), topology, Path(folder) / name, ROUNDS)
            own.width, own.noise, own.sign = copies, noise(), sign
            members.append(own)
        Network(dict(zip(names, members, strict=True)), tap=tap).run()
    scale = members[0].made.mechanism.scale(2 * UNIT.clip)
    return [shares[t] for t in range(ROUNDS)], members[0].before, scale


@dataclass(frozen=True)
class FabricCase(Case):
    """Everything that node 0 sends over a fabric, all trials in one run."""

    sent: Callable[[int, Callable[[], NoiseSource], int], Sent] = over_distributed

    def scores(self, copies: int, noise: Any, seed: int) -> tuple[np.ndarray, np.ndarray]:
        zero, one = (self._world(copies, lambda w=world: noise(seed + w), 1 - 2 * world) for world in (0, 1))
        return zero, one

    def _world(self, copies: int, noise: Callable[[], NoiseSource], sign: int) -> np.ndarray:
        messages, before, scale = self.sent(copies, noise, sign)
        fresh = sum(m - b for m, b in zip(messages, before, strict=True))
        return 2 * UNIT.clip * np.asarray(fresh) / scale**2


@pytest.mark.parametrize("source", [Seeded, lambda _: SecureNoise()], ids=["seeded", "secure"])
@pytest.mark.parametrize("sent", [over_distributed, over_peers])
def test_what_leaves_keeps_the_claim_and_a_third_less_noise_is_caught(sent: Any, source: Any) -> None:
    case = FabricCase(UNIT, sent.__name__, sent=sent)
    assert 0.3 < attack(case, source, 8_000, seed=1).epsilon <= CLAIM
    assert attack(case, weakened(source), 8_000, seed=2).epsilon > CLAIM


@pytest.mark.parametrize("sent", [over_distributed, over_peers])
def test_rows_without_noise_are_caught(sent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = lambda self, mechanism, scale, out: torch.zeros(len(out.nodes), dtype=torch.float64)  # noqa: E731
    monkeypatch.setattr(Seeded, "release", silent)
    case = FabricCase(UNIT, sent.__name__, sent=sent)
    assert attack(case, Seeded, 1_000, seed=1).epsilon > 4
