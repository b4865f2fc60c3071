"""The cost of a message in dp-accounting's terms, without importing that package or torch.

Both take a second to load, and a command that only reads a ledger needs neither. An `Event` names one of dp-accounting's
classes, can be written to a ledger, and becomes the real object when an accountant needs it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpps.errors import UsageError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LAPLACE, GAUSSIAN, POISSON = "LaplaceDpEvent", "GaussianDpEvent", "PoissonSampledDpEvent"
NOTHING, NON_PRIVATE = "NoOpDpEvent", "NonPrivateDpEvent"


@dataclass(frozen=True)
class Event:
    """What happens to the records that take part in a message.

    `type` is dp-accounting's class, such as ``GaussianDpEvent``; `noise_multiplier` the scale of Laplace or Gaussian
    noise over the sensitivity; `sampling` the probability that a record takes part (Poisson); `arguments` those of
    any other class, as JSON.
    """

    type: str
    noise_multiplier: float = 0.0
    sampling: float = 1.0
    arguments: str = "{}"

    @classmethod
    def of(cls, event: "Event | DpEvent") -> "Event":
        """The same event, also from an object of dp-accounting."""
        if isinstance(event, Event):
            return event
        if not hasattr(type(event), "__attrs_attrs__") or not type(event).__name__.endswith("DpEvent"):
            raise UsageError(
                f"a mechanism's event is {event!r}: return an event of dp-accounting, for example GaussianDpEvent(1.0)"
            )
        return cls.from_json(_to_json(event))

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
        """For a ledger line. Infinity is written as text, because JSON has no such number."""
        noise = {"noise_multiplier": _to_json(self.noise_multiplier)}
        inner = {"type": self.type, **(noise if self.noisy else json.loads(self.arguments))}
        if self.sampling == 1:
            return inner
        return {"type": POISSON, "sampling_probability": self.sampling, "event": inner}

    def dp_event(self) -> "DpEvent":
        """The object that dp-accounting's accountants take."""
        made: DpEvent = _from_json(self.to_json())
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
        return (
            self.type == NOTHING or self.sampling == 0 or (self.noisy and self.noise_multiplier == math.inf)
        )

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
    """The event on a Poisson sample: every record takes part independently with this probability."""
    if not 0 <= rate <= 1:
        raise UsageError(f"sampling rate {rate}: it must lie between 0 and 1")
    return replace(event, sampling=float(rate) * event.sampling)


def _to_json(value: Any) -> Any:
    """An object of dp-accounting, and what it is made of, as JSON values."""
    if (fields := getattr(type(value), "__attrs_attrs__", None)) is not None:
        parts = {field.name: _to_json(getattr(value, field.name)) for field in fields if field.init}
        return {"type": type(value).__name__, **parts}
    if type(value).__module__ == "numpy":
        return _to_json(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_to_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    """The reverse of `_to_json`."""
    if isinstance(value, dict):
        from dp_accounting import dp_event

        made = getattr(dp_event, value["type"], None)
        if made is None:
            raise UsageError(f"dp-accounting has no event {value['type']!r}: its total is not known")
        return made(**{name: _from_json(part) for name, part in value.items() if name != "type"})
    if isinstance(value, list):
        return [_from_json(part) for part in value]
    return float(value) if value in ("inf", "-inf") else value


def _well_formed(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(_well_formed, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, (int, float)) or value >= 0
