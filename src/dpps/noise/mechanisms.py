"""What noise is added to a message, and what that costs.

A mechanism owns its scale, its samplers (seeded, and from a keystream) and its privacy cost; nobody else asks for its name.
docs/architecture.md adds one.

Costs are stated in the words of dp-accounting. That package takes a second to load, and many runs never ask for a total: an `Event`
names one of its classes, can be written into a ledger, and becomes the real object when an accountant needs it. A mechanism of
your own may return the dp-accounting object itself: `Event.of` reads it.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.noise.sampler import Keystream, discrete_gaussian_slack
from dpps.registry import Registry

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LAPLACE, GAUSSIAN, POISSON = "LaplaceDpEvent", "GaussianDpEvent", "PoissonSampledDpEvent"
NOTHING, NON_PRIVATE = "NoOpDpEvent", "NonPrivateDpEvent"


@dataclass(frozen=True)
class Event:
    """What happens to the records that take part in a message.

    `type` is dp-accounting's class, such as ``GaussianDpEvent``; `noise_multiplier` the scale of Laplace or Gaussian noise over
    the sensitivity; `sampling` the chance that a record takes part (Poisson); `arguments` what any other class is made of, as JSON.
    """

    type: str
    noise_multiplier: float = 0.0
    sampling: float = 1.0
    arguments: str = "{}"

    @classmethod
    def of(cls, event: "Event | DpEvent") -> "Event":
        """The same event, read off an object of dp-accounting."""
        if isinstance(event, Event):
            return event
        if not hasattr(type(event), "__attrs_attrs__") or not type(event).__name__.endswith("DpEvent"):
            raise UsageError(
                f"a mechanism's event is {event!r}: return an event of dp-accounting, for example GaussianDpEvent(1.0)"
            )
        return cls.from_json(_table(event))

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "Event":
        """The event that `to_json` wrote."""
        kind, arguments = str(table["type"]), {k: v for k, v in table.items() if k != "type"}
        if kind == POISSON:
            return sampled(float(arguments["sampling_probability"]), cls.from_json(arguments["event"]))
        if kind in (LAPLACE, GAUSSIAN):
            return cls(kind, float(arguments["noise_multiplier"]))
        return cls(kind, arguments=json.dumps(arguments))

    def to_json(self) -> dict[str, Any]:
        """For a ledger line: infinity is written as text, because JSON has no such number."""
        arguments = json.loads(self.arguments)
        if self.noisy:
            noise = self.noise_multiplier
            arguments = {"noise_multiplier": noise if math.isfinite(noise) else str(noise)}
        inner = {"type": self.type, **arguments}
        if self.sampling == 1:
            return inner
        return {"type": POISSON, "sampling_probability": self.sampling, "event": inner}

    def dp_event(self) -> "DpEvent":
        """The object that dp-accounting's accountants take."""
        made: DpEvent = _object(self.to_json())
        return made

    @property
    def noisy(self) -> bool:
        """Whether it is Laplace or Gaussian noise, on all records or on a sample of them."""
        return self.type in (LAPLACE, GAUSSIAN)

    @property
    def well_formed(self) -> bool:
        """Whether every number in it is one an accountant can take: not NaN, not negative."""
        return self.noise_multiplier >= 0 and _well_formed(json.loads(self.arguments))

    @property
    def free(self) -> bool:
        """Whether it reveals nothing: nothing happened, nobody was sampled, or the signal is zero."""
        silent = self.noisy and self.noise_multiplier == math.inf
        return self.type == NOTHING or self.sampling == 0 or silent

    @property
    def unprotected(self) -> bool:
        """Whether it reveals everything."""
        return self.type == NON_PRIVATE or (self.noisy and self.noise_multiplier == 0)

    @property
    def pure_epsilon(self) -> float | None:
        """The epsilon at delta 0; None where there is none. Sampling at rate q turns epsilon into ln(1 + q(e^epsilon - 1))."""
        if self.unprotected:
            return math.inf
        if self.free:
            return 0.0
        if self.type != LAPLACE:
            return None
        epsilon, q = 1 / self.noise_multiplier, self.sampling
        if q == 1:
            return epsilon
        if epsilon < 1:
            return math.log1p(q * math.expm1(epsilon))
        return epsilon + math.log(q + (1 - q) * math.exp(-epsilon))  # the same, and it does not overflow


def laplace(noise_multiplier: float) -> Event:
    """Laplace noise of scale noise_multiplier times the L1 sensitivity: a pure epsilon of 1 / noise_multiplier."""
    return Event(LAPLACE, float(noise_multiplier))


def gaussian(noise_multiplier: float) -> Event:
    """Gaussian noise of standard deviation noise_multiplier times the L2 sensitivity."""
    return Event(GAUSSIAN, float(noise_multiplier))


def non_private() -> Event:
    """A message without noise, or with noise whose cost nobody has stated."""
    return Event(NON_PRIVATE)


def sampled(rate: float, event: Event) -> Event:
    """The event on a Poisson sample: every record takes part independently with this chance."""
    if not 0 <= rate <= 1:
        raise UsageError(f"sampling rate {rate}: it must lie between 0 and 1")
    return replace(event, sampling=float(rate) * event.sampling)


def _table(value: Any) -> Any:
    """An object of dp-accounting, and what it is made of, as JSON has it."""
    if (fields := getattr(type(value), "__attrs_attrs__", None)) is not None:
        parts = {field.name: _table(getattr(value, field.name)) for field in fields if field.init}
        return {"type": type(value).__name__, **parts}
    if type(value).__module__ == "numpy":
        return _table(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_table(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _object(value: Any) -> Any:
    """What `_table` has read, made again."""
    if isinstance(value, dict):
        from dp_accounting import dp_event

        made = getattr(dp_event, value["type"], None)
        if made is None:
            raise UsageError(f"dp-accounting has no event {value['type']!r}: its total is not known")
        return made(**{name: _object(part) for name, part in value.items() if name != "type"})
    if isinstance(value, list):
        return [_object(part) for part in value]
    return float(value) if value in ("inf", "-inf") else value


def _well_formed(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(_well_formed, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, (int, float)) or value >= 0


class Mechanism(ABC):
    """Additive noise, independent per coordinate, of a scale proportional to the sensitivity."""

    name: str
    norm: int
    """The norm (1 or 2) in which this mechanism needs the sensitivity."""
    pure: ClassVar[bool] = False
    """Whether a message has a pure epsilon, which is 1 / noise_multiplier."""

    @classmethod
    def of(cls, noise: float) -> Self:
        """The mechanism with this much noise: the pure epsilon of a message where it is `pure`, else the noise multiplier."""
        raise UsageError(
            f"{cls.__name__} noise cannot be asked for by name: define the class method of(cls, noise)"
        )

    @abstractmethod
    def scale(self, sensitivity: float) -> float:
        """The scale of the noise for a message of this sensitivity."""

    def standard_deviation(self, scale: float) -> float:
        """Standard deviation of each coordinate of noise of this scale; infinite: not known."""
        return math.inf

    @abstractmethod
    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        """Fill `out`, one node's row, with random numbers from `stream`; `shape` makes unit noise of them."""

    def shape(self, block: Tensor) -> Tensor:
        """Turn a block of drawn rows into unit-scale noise, all rows at once. Default: they already are."""
        return block

    def event(self, noise_multiplier: float) -> "Event | DpEvent":
        """What a message costs whose noise has `noise_multiplier` times the sensitivity as its scale.

        Additive noise is judged by that ratio alone. The accountant composes these events, so a right event here is a right
        total everywhere; `non_private()` says that nothing is claimed.
        """
        raise UsageError(
            f"{type(self).__name__} noise states no cost: define event(self, noise_multiplier) and return an event of "
            "dp-accounting, or dpps.noise.non_private() if nothing is claimed"
        )

    def cost(self, sensitivity: float, scale: float) -> Event:
        """What one message of this sensitivity costs under noise of this scale."""
        if sensitivity == 0:
            return Event(NOTHING)
        found = Event.of(self.event(scale / sensitivity)) if scale > 0 else non_private()
        if found.free and math.isfinite(scale / sensitivity):
            raise UsageError(
                f"{type(self).__name__} noise says that a message of sensitivity {sensitivity:g} costs nothing: its event must be the "
                "cost of its noise, or dpps.noise.non_private() if nothing is claimed"
            )
        return found

    def epsilon(self, sensitivity: float, scale: float) -> float:
        """The pure epsilon of one message; infinite where the mechanism has none."""
        pure = self.cost(sensitivity, scale).pure_epsilon
        return math.inf if pure is None else pure

    def draw_whole(self, keystream: Keystream, steps: float, size: int) -> np.ndarray:
        """Exact whole-number noise of a scale of `steps` grid steps, for messages that really leave."""
        raise UsageError(
            f"{type(self).__name__} noise has no exact sampler: define draw_whole, or use Laplace or Gaussian noise"
        )

    def sampler_distance(self, steps: float, coordinates: int, rounds: int) -> float:
        """Total variation distance between what `draw_whole` gives and the noise that `event` stands for."""
        return 0.0


MECHANISMS: Registry[type[Mechanism]] = Registry("mechanism", "dpps.noise")
"""Mechanisms by name: what `Contribution(mechanism=...)` and `dpps train --mechanism` offer."""


@cache
def _almost_minus_one(dtype: torch.dtype) -> Tensor:
    """Half a step of that type above -1."""
    return torch.tensor(torch.finfo(dtype).eps / 2 - 1, dtype=dtype, device="cpu")


@MECHANISMS.register("laplace")
@dataclass(frozen=True)
class Laplace(Mechanism):
    r"""The paper's noise, $\gamma_n n$ with $n \sim Lap(0, S/b)$ per coordinate: Lemma 1 with $\varepsilon = b/\gamma_n$.

    Args:
        budget: b, the paper's privacy budget hyperparameter.
        noise_rate: $\gamma_n$. Epsilon of one round is budget / noise_rate; b=5 with the paper's 0.001 is 5,000.
    """

    budget: float
    noise_rate: float = 1.0
    name, norm, pure = "laplace", 1, True

    @classmethod
    def of(cls, noise: float) -> Self:
        return cls(budget=noise)

    def __post_init__(self) -> None:
        if not 0 < self.budget < math.inf:
            raise UsageError(
                f"budget is {self.budget}: it must be positive and finite (the paper uses 1 to 5)"
            )
        if not 0 <= self.noise_rate < math.inf:
            raise UsageError(
                f"noise rate is {self.noise_rate}: it must be 0 (no noise) or more (the paper uses 0.001)"
            )

    def scale(self, sensitivity: float) -> float:
        return self.noise_rate * sensitivity / self.budget

    def standard_deviation(self, scale: float) -> float:
        return math.sqrt(2) * scale

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        stream.random(dtype=out.dtype, out=out)

    def shape(self, block: Tensor) -> Tensor:
        # v = 2u - 1 + half a step lies strictly inside (-1, 1), symmetric, and 1 - |v| is exact: its logarithm is finite.
        torch.add(_almost_minus_one(block.dtype), block, alpha=2, out=block)
        magnitude = block.abs()
        torch.sub(1, magnitude, out=magnitude).log_()
        # takes the sign of v and only the size of the logarithm
        return torch.copysign(magnitude, block, out=block)

    def event(self, noise_multiplier: float) -> Event:
        return laplace(noise_multiplier)

    def draw_whole(self, keystream: Keystream, steps: float, size: int) -> np.ndarray:
        return keystream.discrete_laplace(steps, size)


@MECHANISMS.register("gaussian")
@dataclass(frozen=True)
class Gaussian(Mechanism):
    """Gaussian noise of standard deviation `noise_multiplier` x the L2 sensitivity; (epsilon, delta) comes from the accountant."""

    noise_multiplier: float
    name, norm = "gaussian", 2

    @classmethod
    def of(cls, noise: float) -> Self:
        return cls(noise_multiplier=noise)

    def __post_init__(self) -> None:
        if not 0 < self.noise_multiplier < math.inf:
            raise UsageError(f"noise multiplier is {self.noise_multiplier}: it must be positive and finite")

    def scale(self, sensitivity: float) -> float:
        return self.noise_multiplier * sensitivity

    def standard_deviation(self, scale: float) -> float:
        return scale

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        stream.standard_normal(dtype=out.dtype, out=out)

    def event(self, noise_multiplier: float) -> Event:
        return gaussian(noise_multiplier)

    def draw_whole(self, keystream: Keystream, steps: float, size: int) -> np.ndarray:
        return keystream.discrete_gaussian(steps, size)

    def sampler_distance(self, steps: float, coordinates: int, rounds: int) -> float:
        return discrete_gaussian_slack(steps, coordinates, rounds)


@dataclass(frozen=True)
class NoNoise(Mechanism):
    """No noise: plain push-sum. Nothing is private."""

    name, norm = "none", 1

    def scale(self, sensitivity: float) -> float:
        return 0.0

    def standard_deviation(self, scale: float) -> float:
        return 0.0

    def draw(self, stream: np.random.Generator, out: np.ndarray) -> None:
        out.fill(0)

    def event(self, noise_multiplier: float) -> Event:
        return non_private()
