"""What a message costs, in the words of dp-accounting, without loading that package.

dp-accounting takes a second to load, and many runs never ask for a total. An `Event` names one of its event classes and
its arguments; it can be written into a ledger and turned into the real object when an accountant needs it. A mechanism of
your own may return the dp-accounting object itself: `Event.of` reads it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpps.errors import UsageError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LAPLACE, GAUSSIAN, POISSON = "LaplaceDpEvent", "GaussianDpEvent", "PoissonSampledDpEvent"
NOTHING, NON_PRIVATE = "NoOpDpEvent", "NonPrivateDpEvent"


@dataclass(frozen=True)
class Event:
    """One event: the name of dp-accounting's class, and the arguments it is made of.

    Attributes:
        type: the class, for example ``GaussianDpEvent``.
        arguments: (name, value) pairs; a value is a number, a text, a tuple of them, or another `Event`.
    """

    type: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, event: "Event | DpEvent") -> "Event":
        """The same event, read off an object of dp-accounting."""
        if isinstance(event, Event):
            return event
        fields = getattr(type(event), "__attrs_attrs__", None)
        if fields is None or not type(event).__name__.endswith("DpEvent"):
            raise UsageError(
                f"a mechanism's event is {event!r}: return an event of dp-accounting, for example GaussianDpEvent(1.0)"
            )
        return cls(
            type(event).__name__, tuple((f.name, _read(getattr(event, f.name))) for f in fields if f.init)
        )

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "Event":
        """The event that `to_json` wrote."""
        rest = {name: value for name, value in table.items() if name != "type"}
        return cls(str(table["type"]), tuple((name, _from_json(value)) for name, value in rest.items()))

    def to_json(self) -> dict[str, Any]:
        """For a ledger line."""
        return {"type": self.type, **{name: _to_json(value) for name, value in self.arguments}}

    def dp_event(self) -> "DpEvent":
        """The object that dp-accounting's accountants take."""
        import dp_accounting
        from dp_accounting import dp_event as classes

        made = getattr(dp_accounting, self.type, None) or getattr(classes, self.type, None)
        if made is None:
            raise UsageError(f"dp-accounting has no event {self.type!r}: its total is not known")
        return made(**{name: _make(value) for name, value in self.arguments})

    def __getitem__(self, name: str) -> Any:
        return dict(self.arguments)[name]

    @property
    def sampling(self) -> float:
        """The chance that one record's data takes part at all: below 1 for a Poisson sampled event."""
        return float(self["sampling_probability"]) if self.type == POISSON else 1.0

    @property
    def inner(self) -> "Event":
        """What happens to the records that take part."""
        event = self["event"] if self.type == POISSON else self
        assert isinstance(event, Event)
        return event

    @property
    def noise_multiplier(self) -> float:
        """Noise scale over sensitivity, of Laplace and Gaussian noise."""
        return float(self.inner["noise_multiplier"])

    @property
    def well_formed(self) -> bool:
        """Whether every number in it is one an accountant can take: not NaN, not negative."""
        parts = [value for _, value in self.arguments]
        numbers = [part for part in parts if isinstance(part, (int, float))]
        return all(n >= 0 for n in numbers) and all(p.well_formed for p in parts if isinstance(p, Event))

    @property
    def free(self) -> bool:
        """Whether it reveals nothing: nothing happened, nobody was sampled, or the signal is zero."""
        inner = self.inner
        silent = inner.type in (LAPLACE, GAUSSIAN) and inner["noise_multiplier"] == math.inf
        return inner.type == NOTHING or self.sampling == 0 or silent

    @property
    def unprotected(self) -> bool:
        """Whether it reveals everything."""
        inner = self.inner
        bare = inner.type in (LAPLACE, GAUSSIAN) and inner["noise_multiplier"] == 0
        return inner.type == NON_PRIVATE or bare

    @property
    def pure_epsilon(self) -> float | None:
        """The epsilon at delta 0; None where there is none. Sampling at rate q turns epsilon into ln(1 + q(e^epsilon - 1))."""
        if self.unprotected:
            return math.inf
        if self.free:
            return 0.0
        inner = self.inner
        if inner.type == LAPLACE:
            return _amplified(1 / float(inner["noise_multiplier"]), self.sampling)
        return None


def laplace(noise_multiplier: float) -> Event:
    """Laplace noise of scale noise_multiplier times the L1 sensitivity: a pure epsilon of 1 / noise_multiplier."""
    return Event(LAPLACE, (("noise_multiplier", float(noise_multiplier)),))


def gaussian(noise_multiplier: float) -> Event:
    """Gaussian noise of deviation noise_multiplier times the L2 sensitivity."""
    return Event(GAUSSIAN, (("noise_multiplier", float(noise_multiplier)),))


def non_private() -> Event:
    """A message without noise, or with noise whose cost nobody has stated."""
    return Event(NON_PRIVATE)


def sampled(rate: float, event: Event) -> Event:
    """The event on a Poisson sample: every record takes part independently with this chance."""
    if not 0 <= rate <= 1:
        raise UsageError(f"sampling rate {rate}: it must lie between 0 and 1")
    return event if rate == 1 else Event(POISSON, (("sampling_probability", float(rate)), ("event", event)))


def _amplified(epsilon: float, rate: float) -> float:
    if rate == 1:
        return epsilon
    # ln(1 + q(e^x - 1)) = x + ln(q + (1-q)e^-x): the second form does not overflow.
    return (
        math.log1p(rate * math.expm1(epsilon))
        if epsilon < 1
        else epsilon + math.log(rate + (1 - rate) * math.exp(-epsilon))
    )


def _read(value: Any) -> Any:
    if hasattr(type(value), "__attrs_attrs__"):
        return Event.of(value)
    if isinstance(value, (list, tuple)) or type(value).__name__ == "ndarray":
        return tuple(_read(part) for part in value)
    if type(value).__module__ == "numpy":
        return value.item()
    return value


def _make(value: Any) -> Any:
    if isinstance(value, Event):
        return value.dp_event()
    return [_make(part) for part in value] if isinstance(value, tuple) else value


def _to_json(value: Any) -> Any:
    """Infinity is written as text: JSON has no such number."""
    if isinstance(value, Event):
        return value.to_json()
    if isinstance(value, tuple):
        return [_to_json(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _from_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Event.from_json(value)
    if isinstance(value, list):
        return tuple(_from_json(part) for part in value)
    return float(value) if value in ("inf", "-inf") else value
