r"""Optimizers: momentum and Adam of released updates, which cost no privacy, and any of `torch.optim` for local parameters.

A node releases an update $u_t$, its clipped gradient with noise, and moves by what an optimizer makes of all the updates it has
released so far. That is post-processing: whoever sees the messages, and knows the public start, can compute every step. So the
noise stays calibrated to the clipped gradient alone. It holds only because the optimizer keeps the *noised* update; a velocity of
clean gradients would be sent again and again under noise that was paid for once.

State goes in and comes out explicitly: it is part of the run's state and of a checkpoint.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpps.errors import UsageError

OptimizerState = Mapping[str, Tensor]
"""Rows by name: what an optimizer remembers of every node."""

LocalOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
"""Makes an optimizer for a list of parameters."""


class ReleasedOptimizer(ABC):
    """Turns a released update into the change of a row."""

    linear: ClassVar[bool] = False
    """Whether changes add up as updates do, and `rest` is there; otherwise noise that partners share does not cancel in the sum."""

    @property
    def gain(self) -> float:
        """How much an update moves a row at most, over all rounds together, in units of its own length; infinite: not known."""
        return math.inf

    @abstractmethod
    def start(self, rows: Tensor) -> OptimizerState:
        """Before the first round, for rows like these."""

    @abstractmethod
    def step(self, state: OptimizerState, released: Tensor) -> tuple[Tensor, OptimizerState]:
        """The change of every row, and the state after it. Neither argument is changed."""

    def rest(self, state: OptimizerState, released: Tensor) -> Tensor:
        """The sum of all further changes, if this is the last update that is not zero; of linear optimizers."""
        raise NotImplementedError(f"{type(self).__name__} is not linear")

    def advance(
        self, state: OptimizerState, released: Tensor, away: Tensor | None
    ) -> tuple[Tensor, OptimizerState]:
        """A step from a state that is empty before the first one. Rows that are away (a mask) do not move, and keep their state."""
        old = state or self.start(released)
        change, new = self.step(old, released)
        if away is None:
            return change, new
        kept = {
            name: torch.where(away.view(-1, *[1] * (rows.ndim - 1)).to(rows.device), old[name], rows)
            for name, rows in new.items()
        }
        return change.masked_fill(away.to(change.device)[:, None], 0.0), kept


@dataclass(frozen=True)
class Momentum(ReleasedOptimizer):
    r"""Heavy ball: $v_{t+1} = \beta v_t + u_t$, and the row moves by $v_{t+1}$.

    Equal updates add up to $1 / (1 - \beta)$ times one update, so use a learning rate that is smaller by this factor.

    Args:
        beta: in [0, 1).
    """

    beta: float = 0.9

    linear = True

    def __post_init__(self) -> None:
        _below_one("momentum", self.beta)

    @property
    def gain(self) -> float:
        return 1 / (1 - self.beta)

    def start(self, rows: Tensor) -> OptimizerState:
        return {"velocity": torch.zeros_like(rows)}

    def step(self, state: OptimizerState, released: Tensor) -> tuple[Tensor, OptimizerState]:
        velocity = torch.add(released, state["velocity"], alpha=self.beta)
        return velocity, {"velocity": velocity}

    def rest(self, state: OptimizerState, released: Tensor) -> Tensor:
        velocity, _ = self.step(state or self.start(released), released)
        return self.gain * velocity


@dataclass(frozen=True)
class Adam(ReleasedOptimizer):
    r"""Adam on released updates, with moments of noised values: $m = \beta_1 m + (1-\beta_1) u$,
    $w = \beta_2 w + (1-\beta_2) u^2$, both divided by $1 - \beta^t$; the row moves by $\eta\, m / (\sqrt{w} + \epsilon)$.

    The rate of the algorithm scales update and noise alike and so drops out, but for $\epsilon$; the step's size is `rate`.
    Reference: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.

    Args:
        rate: $\eta$, the size of a step in each coordinate.
        beta1: of the first moment, in [0, 1).
        beta2: of the second moment, in [0, 1).
        epsilon: keeps the quotient finite.
    """

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _below_one("beta1", self.beta1)
        _below_one("beta2", self.beta2)
        for name in ("rate", "epsilon"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"{name} is {getattr(self, name)}: it must be positive and finite")

    def start(self, rows: Tensor) -> OptimizerState:
        steps = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        return {"first": torch.zeros_like(rows), "second": torch.zeros_like(rows), "steps": steps}

    def step(self, state: OptimizerState, released: Tensor) -> tuple[Tensor, OptimizerState]:
        first = torch.lerp(released, state["first"], self.beta1)
        second = torch.lerp(released.square(), state["second"], self.beta2)
        steps = state["steps"] + 1
        count = steps.to(released.dtype)[:, None]
        unbiased = first / (1 - self.beta1**count)
        spread = (second / (1 - self.beta2**count)).sqrt_()
        change = self.rate * unbiased / (spread + self.epsilon)
        return change, {"first": first, "second": second, "steps": steps}


class LocalOptimizers:
    """A `torch.optim` optimizer for the local parameters of every row held here; its state can be kept, undone and resumed.

    Args:
        make: makes an optimizer for a list of parameters.
        local: the rows to step.
    """

    def __init__(self, make: LocalOptimizer, local: Tensor) -> None:
        self._parameters = [nn.Parameter(row.clone()) for row in local]
        self._optimizers = [make([parameter]) for parameter in self._parameters]

    def step(
        self, local: Tensor, gradient: Tensor, rows: slice, away: Collection[int] = frozenset()
    ) -> Tensor:
        """These rows after a step; an absent node's row and optimizer stay as they are."""
        stepped = local[rows].clone()
        for k, row, own in zip(range(rows.start, rows.stop), stepped, gradient, strict=True):
            if k not in away:
                parameter = self._parameters[k]
                parameter.data.copy_(row)
                parameter.grad = own.clone()
                self._optimizers[k].step()
                row.copy_(parameter.detach())
        return stepped

    def state(self) -> dict[str, Tensor]:
        """All that the optimizers remember, as tensors by name: momenta, moments, counters."""
        return {
            f"{k}.{name}": torch.as_tensor(value).detach().clone()
            for k, optimizer in enumerate(self._optimizers)
            for name, value in optimizer.state_dict()["state"].get(0, {}).items()
            if value is not None
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        for k, optimizer in enumerate(self._optimizers):
            own = {n.removeprefix(f"{k}."): t.clone() for n, t in state.items() if n.startswith(f"{k}.")}
            whole: dict[str, Any] = optimizer.state_dict()
            optimizer.load_state_dict({**whole, "state": {0: own} if own else {}})


def _below_one(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise UsageError(f"{name} is {value}: it must lie in [0, 1)")
