"""An attack on noise that cancels in rounds from which nodes are away: fewer nodes hide each other less."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dpps.audit.cases import CLAIM, DELTA, Case, Scores
from dpps.audit.coalition import Matrix, calibrated, pair_noise
from dpps.audit.wiretap import SABOTAGE, NoiseFor, Weakened, Wiretap
from dpps.noise.pairs import SecurePairs
from dpps.noise.source import NoiseSource, SecureNoise
from dpps.privacy.trust import Pairs, Partners, Shares
from dpps.privacy.units import Contribution
from dpps.protocol import DPPS
from dpps.sensitivity import Unclipped
from dpps.topology import Exponential

_NODES, _COLLUDER = 5, 4
_AWAY = {0: [2, 3], 1: [1, 2, 3]}  # in round 1 one honest node is left beside the colluder
_ROUNDS = 2


class AsIfAllWereThere(Partners):
    """Sabotage: the noise of a round is split as if nobody were away."""

    def shares(self, present: NDArray[np.bool_] | None = None) -> Shares:
        return super().shares(None)


@dataclass(frozen=True)
class AwayCase(Case):
    """Unit contribution, five nodes, everybody everybody's partner, one colluder; two are away in round 0 and three in round 1.

    One network, whose rows have a coordinate for every trial: noise is independent per coordinate. The protocol would
    clip rows as a whole; here each coordinate moves as far as the noise is calibrated to.
    """

    unit: Contribution
    partners: Callable[[int, None, int], Partners] = Partners

    @property
    def secure_only(self) -> bool:
        return self.leaks

    def scores(self, copies: int, noise: NoiseFor, seed: int) -> tuple[Scores, Scores]:
        zero, one = (self._world(copies, noise(seed + world), 1 - 2 * world) for world in (0, 1))
        return zero, one

    def _world(self, copies: int, source: NoiseSource, sign: int) -> Scores:
        calibration, clip = calibrated(self.unit, _NODES), self.unit.clip
        noise = _with(source, self.partners(_NODES, None, 1))
        wire, topology = Wiretap(_NODES), Exponential(_NODES).with_dropouts(_AWAY)
        bound = Unclipped(2 * clip)
        protocol = DPPS(topology, calibration.mechanism, bound, noise=noise, fabric=wire)
        state = protocol.start(torch.zeros(_NODES, copies))
        before, total = state.s.clone(), np.zeros(copies)
        for t in range(_ROUNDS):
            rows = torch.zeros(_NODES, copies)
            rows[0] = sign * clip
            scale, present = protocol.step(state, rows).scale, topology.present(t)
            fresh = (wire.messages[-1] - before).double().numpy()
            fresh -= _told(noise, scale, t, present, copies)
            total += _along(fresh / scale, 2 * clip / scale, present, isinstance(_inner(noise), SecurePairs))
            before = state.s.clone()
        return np.round(total, 9)


def _with(source: NoiseSource, partners: Partners) -> NoiseSource:
    """The source with partners; a weakened one stays weak."""
    inner = _inner(source)
    made = SecurePairs(partners) if isinstance(inner, SecureNoise) else inner.with_partners(partners)
    return Weakened(made) if isinstance(source, Weakened) else made


def _inner(source: NoiseSource) -> NoiseSource:
    return source.source if isinstance(source, Weakened) else source


def _told(
    noise: NoiseSource, scale: float, round_: int, present: NDArray[np.bool_] | None, copies: int
) -> Matrix:
    """The pair noise that the colluder shares with others, in their rows. Seeded noise is drawn without keys to tell."""
    known, source = np.zeros((_NODES, copies)), _inner(noise)
    if not isinstance(source, SecurePairs):
        return known
    scale = scale * SABOTAGE if isinstance(noise, Weakened) else scale
    step = source.lattice(scale, present)[0]
    for i, j in source.partners.among(present).tolist():
        if _COLLUDER in (i, j) and source.partners.shares(present).pair:
            shared = pair_noise(source, i, j, scale, round_, copies, present) * step
            known[i] += shared
            known[j] -= shared
    return known


def _along(rows: Matrix, shift: float, present: NDArray[np.bool_] | None, told: bool) -> Scores:
    """How far the rows of the nodes that took part lie in the direction in which node 0 moves, by the covariance that is promised."""
    assert present is not None
    here = [k for k in np.flatnonzero(present).tolist() if not (told and k == _COLLUDER)]
    shares = Partners(_NODES, None, 1).shares(present)
    laplacian = len(here) * np.eye(len(here)) - np.ones((len(here), len(here)))
    covariance = shares.independent**2 * np.eye(len(here)) + shares.pair**2 * laplacian
    direction = shift * np.eye(len(here))[0]  # node 0 is never away
    along: Scores = direction @ np.linalg.solve(covariance, rows[here])
    return along


def absence_cases() -> tuple[AwayCase, ...]:
    """Announced absences, and noise that does not follow them, which must be found out."""
    unit = Contribution(1.0, CLAIM, DELTA, "gaussian", trust=Pairs(1))
    told = "pairs, 1 colluder, 2 and 3 of 5 away"
    return (
        AwayCase(unit, unit.name, told, DELTA),
        AwayCase(
            unit, unit.name, f"{told}, noise as if all were there", DELTA, 20_000, partners=AsIfAllWereThere
        ),
    )
