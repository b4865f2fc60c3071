"""How much noise a message gets, and where it comes from.

`Seeded` streams repeat, for simulation and tests. `SecureNoise` is for messages that really leave. Textbook noise in
floating point gives values away: which doubles can come out depends on what went in. So in `SecureNoise` everything
private is a whole number of grid steps before noise is added, the noise is a whole number with exactly the claimed
distribution, from a keystream keyed by the operating system, and only their sum is turned back into floating point, which
is post-processing.
"""

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.noise.mechanisms import Mechanism
from dpps.noise.sampler import Keystream

if TYPE_CHECKING:
    from dpps.noise.pairs import PairKeys, Partners

STEPS = 2.0**30
"""The scale of secure noise is at least this many grid steps."""

NOISE, SAMPLING, LOCAL_NOISE, DROPOUT, PAIRS = 0, 1, 2, 3, 5  # parts of keys: never renumbered

_FIXED, _THROWN_AWAY = 0x9E3779B97F4A7C15, 12  # of the streams' start state
_BLOCK = 1 << 17  # numbers shaped at a time: they stay in the processor's cache
_LARGEST = 2.0**53  # beyond it, a double does not hold every whole number


@dataclass(frozen=True)
class Outgoing:
    """The messages of the rows held here, before noise.

    `half` = `s` + `perturbation` is overwritten by the message. `base_is_public` says that `s` follows from earlier
    messages (units contribution and record), so only the perturbation has to be hidden. `norms`: whether the caller needs
    the norm of the noise. `step`: the grid that was charged for (`calibrate`), 0 for the source's own. `present`: which of
    all nodes take part in the round; None for all.
    """

    s: Tensor
    perturbation: Tensor
    half: Tensor
    nodes: Sequence[int]
    round: int
    base_is_public: bool
    norms: bool = True
    step: float = 0.0
    present: np.ndarray | None = None


class NoiseSource(ABC):
    """Turns rows into messages by adding noise. Only its output may leave a node."""

    private = False
    """Whether nobody else can know the noise. Statements of privacy are made only for private sources."""

    def grid(self, scale: float) -> float:
        """The step of the grid on which messages of this noise scale lie; 0 if there is none."""
        return 0.0

    def discreteness(self, step: float) -> float:
        """What noise on a grid of this step adds to the sensitivity, compared with continuous noise."""
        return 0.0

    def distance(self, mechanism: Mechanism, dimension: int, rounds: int) -> float:
        """Total variation distance between what was drawn and the noise that is charged for."""
        return 0.0

    def standard_deviation(
        self, mechanism: Mechanism, scale: float, present: np.ndarray | None = None
    ) -> float:
        """Of each coordinate of a message's noise, when these nodes take part; infinite if not known."""
        return mechanism.standard_deviation(scale)

    def for_local_part(self) -> "NoiseSource":
        """A source for the local parameters, independent of the messages' noise (unit record)."""
        raise UsageError(
            f"{type(self).__name__} has no noise for local parameters: use Seeded or SecureNoise in the unit record"
        )

    def with_partners(self, partners: "Partners") -> "NoiseSource":
        """The same source with noise that cancels between partners."""
        raise UsageError(
            f"{type(self).__name__} has no noise that cancels: use Seeded or SecureNoise with trust=Pairs(...)"
        )

    @abstractmethod
    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        """Add noise to `out.half` in place; return the L1 norm of each row's noise (zeros if not `out.norms`)."""


@dataclass(frozen=True)
class NoiseLevel:
    """The noise of one message: its scale, the sensitivity it is calibrated to (what rounding and the grid add included),
    and the step of the grid that the message lies on (0: no grid)."""

    sensitivity: float
    scale: float
    step: float


def calibrate(
    mechanism: Mechanism,
    noise: NoiseSource,
    sensitivity: float,
    rounding: Callable[[float], float],
    *,
    rate: float = 1.0,
) -> NoiseLevel:
    """The noise for a message whose neighbours are up to `sensitivity` apart before rounding.

    `rounding` says what rounding a message to whole steps of a given size adds to that; `rate` is a factor on the noise. The
    grid is fixed first and stays: rounding to it raises the scale, and a grid chosen again for the raised scale could be
    coarser than the one that was charged for. The scale only grows, so the noise has at least as many steps as the source
    asks for.
    """
    step = noise.grid(mechanism.scale(sensitivity) * rate)
    extra = noise.discreteness(step) + rounding(step) if step else 0.0
    used = math.nextafter(sensitivity + extra, math.inf) if extra else sensitivity  # rounded up, never down
    return NoiseLevel(used, mechanism.scale(used) * rate, step)


def key(seed: int, purpose: int, node: int, round_: int) -> tuple[int, int]:
    """The two words of one stream: the seed, and purpose | round | node packed without overlap."""
    if not (0 <= node < 1 << 26 and 0 <= round_ < 1 << 34):
        raise OverflowError(f"node {node} or round {round_} is beyond what a stream key holds")
    return seed & ((1 << 64) - 1), (purpose << 60) | (round_ << 26) | node


class Streams:
    """The streams of one seed and purpose, by node and round: one generator, moved from key to key.

    Numbers are keyed by what they are for, never by process or by call order. A key is the start state of numpy's SFC64
    generator: words a = seed, b = purpose | round | node, c fixed, counter 1, and twelve steps thrown away, as its author
    seeds it. Two different keys never give overlapping streams: one step is a bijection of the state that adds 1 to the
    counter, so at the same counter (hence after the same number of steps) different starts are still different. Whoever
    knows the seed can subtract the noise: these streams are for simulation and tests.
    """

    def __init__(self, seed: int, purpose: int) -> None:
        self.seed, self.purpose = seed, purpose
        self._bits = np.random.SFC64(0)
        self._state = self._bits.state | {"has_uint32": 0, "uinteger": 0}
        self.current = np.random.Generator(self._bits)
        """Goes on with the stream that `at` moved to last."""

    def at(self, node: int, round_: int) -> np.random.Generator:
        """The stream of (node, round); valid until the next call."""
        self._state["state"]["state"][:] = (*key(self.seed, self.purpose, node, round_), _FIXED, 1)
        self._bits.state = self._state  # numpy takes a copy
        self._bits.random_raw(_THROWN_AWAY)
        return self.current


def fresh_seed() -> int:
    """A seed nobody knows, from the operating system."""
    return secrets.randbits(64)


class Seeded(NoiseSource):
    """Noise keyed by (seed, node, round), for simulations: whoever knows the seed can subtract the noise.

    Without a seed, one is drawn from the operating system. `purpose` selects one of the streams of a seed.
    """

    def __init__(self, seed: int | None = None, purpose: int = NOISE) -> None:
        self.seed = fresh_seed() if seed is None else seed
        self._streams = Streams(self.seed, purpose)
        self._block = torch.empty(_BLOCK, dtype=torch.float32)  # used again: fresh pages cost time

    def for_local_part(self) -> NoiseSource:
        return Seeded(self.seed, LOCAL_NOISE)

    def with_partners(self, partners: "Partners") -> NoiseSource:
        from dpps.noise.pairs import SeededPairs

        return SeededPairs(partners, self.seed)

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        norms = torch.zeros(len(out.nodes), dtype=torch.float64)
        if scale == 0:
            return norms
        for rows, columns, unit in self._unit_noise(mechanism, out.nodes, out):
            if out.norms:
                norms[rows] += unit.abs().sum(1)
            target = out.half[rows, columns]
            target.add_(unit.to(target), alpha=scale)
        return norms.mul_(scale)

    def _unit_noise(
        self, mechanism: Mechanism, nodes: Sequence[int], out: Outgoing
    ) -> Iterator[tuple[slice, slice, Tensor]]:
        """Noise of scale 1 for these nodes, in tiles of at most _BLOCK numbers that share one memory: several whole rows, or
        pieces of one row from left to right."""
        width = torch.float64 if out.half.dtype == torch.float64 else torch.float32
        if self._block.dtype != width:
            self._block = torch.empty(_BLOCK, dtype=width)
        columns = out.half.shape[1]
        height = max(1, _BLOCK // max(columns, 1))
        for top in range(0, len(nodes), height):
            part = nodes[top : top + height]
            for left in range(0, max(columns, 1), _BLOCK):
                right = min(columns, left + _BLOCK)
                tile = self._block[: len(part) * (right - left)].view(len(part), right - left)
                for row, node in zip(tile.numpy(), part, strict=True):
                    mechanism.draw(self._streams.current if left else self._streams.at(node, out.round), row)
                yield slice(top, top + len(part)), slice(left, right), mechanism.shape(tile)


Draw = Callable[[int, int], tuple[np.ndarray, float]]
"""Given a row here and its length, the row's noise in whole steps, and their size: the grid's or a power of two below it."""


class SecureNoise(NoiseSource):
    """Discrete Laplace or Gaussian noise from AES-256 in counter mode; nobody else can know it.

    In the units contribution and record only the perturbation is private (the row before it follows from earlier messages):
    it is rounded toward zero to whole steps, noised, and added to the row. In node-swap the whole row is rounded.

    Args:
        keystream: source of random bits; by default one with a fresh key from the operating system.
        pair_keys: what the nodes here share with their partners, for noise that cancels between processes.
        finer: factor on the step of the grid, at most 1.
    """

    private = True

    def __init__(
        self, keystream: Keystream | None = None, pair_keys: "PairKeys | None" = None, *, finer: float = 1.0
    ) -> None:
        self.keystream = keystream or Keystream()
        self.pair_keys = pair_keys
        self._finer = finer

    def for_local_part(self) -> NoiseSource:
        return self  # a keystream never gives the same bits twice

    def with_partners(self, partners: "Partners") -> NoiseSource:
        from dpps.noise.pairs import SecurePairs

        return SecurePairs(partners, self.pair_keys, self.keystream)

    def grid(self, scale: float) -> float:
        """The step: the power of two with `scale` between STEPS and 2 STEPS steps, or more where it is to be finer."""
        return 0.0 if scale == 0 else power_of_two_below(scale * self._finer / STEPS)

    def discreteness(self, step: float) -> float:
        """Discrete noise of t >= STEPS steps costs what continuous noise does at a sensitivity larger by 1/(4t) steps.

        Gaussian noise: the variance loses 1/12 step squared (`discrete_gaussian_slack`), a smaller relative amount.

        Laplace noise, P(k) ∝ exp(-|k|/t), all in grid steps: by itself it has the pure epsilon m/t, m being the
        sensitivity, but its privacy loss is a little more concentrated on that extreme than that of continuous noise. Claim: the
        shift m of discrete noise is dominated by the shift m + 2t ln cosh(1/2t) <= m + 1/(4t) of continuous Laplace noise of scale
        t, so the charge m/t + 1/(4t²) covers every accountant.

        Proof. Likelihood ratios are monotone, so the vertices of the discrete curve (false alarm, power) are the
        threshold tests Z >= k. With r = e^(-1/t): P(Z >= k) = r^k/(1+r) for k >= 1 and 1 - r^(1-k)/(1+r) for k <=
        0. Put c = -t ln((1+r)/2) = 1/2 - t ln cosh(1/2t), in [0, 1/2]. For continuous X: P(X >= k - c) = P(Z >=
        k) for k >= 1 and P(X >= k - 1 + c) = P(Z >= k) for k <= 0. A vertex with k >= 1 and k - m <= 0 has power
        P(Z >= k - m); the continuous shift that reaches it is (k - c) - (k - m - 1 + c) = m + 1 - 2c = m + 2t ln
        cosh(1/2t). When k and k - m lie on the same side, the shift m reaches it. The continuous curve is
        concave, so it lies above the chords between vertices too. Vertices go to vertices, so coordinates compose. ∎
        """
        return step / (4 * STEPS)

    def distance(self, mechanism: Mechanism, dimension: int, rounds: int) -> float:
        return mechanism.sampler_distance(STEPS, dimension, rounds)

    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        norms = torch.zeros(len(out.nodes), dtype=torch.float64)
        if scale == 0:
            return norms
        step = out.step or self.grid(scale)
        draw = self._draws(mechanism, scale, step, out)
        self.keystream.refresh()
        for k in range(len(out.nodes)):  # row by row: integers need eight bytes each
            hidden = (out.perturbation if out.base_is_public else out.half)[k].double().cpu().numpy()
            noise, finest = draw(k, hidden.size)
            whole = whole_steps(hidden, step, toward_zero=out.base_is_public)
            if finest != step:
                whole *= round(step / finest)
            whole += noise
            message = torch.from_numpy(whole.astype(np.float64) * finest)
            if out.base_is_public:
                message += out.s[k].double().cpu()
            out.half[k] = message.to(out.half)
            if out.norms:
                norms[k] = float(np.abs(noise).sum(dtype=np.float64)) * finest
        return norms

    def _draws(self, mechanism: Mechanism, scale: float, step: float, out: Outgoing) -> Draw:
        return lambda _, size: (mechanism.draw_whole(self.keystream, scale / step, size), step)


def power_of_two_below(value: float) -> float:
    """The largest power of two that is at most `value`; exact, so that all machines find the same."""
    return math.ldexp(0.5, math.frexp(value)[1])


def whole_steps(values: np.ndarray, step: float, toward_zero: bool) -> np.ndarray:
    """Values as whole numbers of steps."""
    steps = np.trunc(values / step) if toward_zero else np.rint(values / step)
    if np.abs(steps).max(initial=0.0) >= _LARGEST:
        raise RunError(
            f"a value of {np.abs(values).max():.3g} does not fit the noise grid of {step:.3g}: the noise is too small against "
            "the values to be safe; use a smaller epsilon or smaller values"
        )
    return steps.astype(np.int64)
