"""A `torch.optim` optimizer for every node's local parameters, whose state can be kept, undone and resumed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpps.learning.algorithm import LocalOptimizer


class LocalOptimizers:
    """One optimizer per row held here.

    Args:
        make: makes an optimizer for a list of parameters.
        local: the rows to step.
    """

    def __init__(self, make: LocalOptimizer, local: Tensor) -> None:
        self._parameters = [nn.Parameter(row.clone()) for row in local]
        self._optimizers = [make([parameter]) for parameter in self._parameters]

    def step(self, k: int, local: Tensor, gradient: Tensor) -> Tensor:
        """The k-th row after a step."""
        parameter = self._parameters[k]
        parameter.data.copy_(local)
        parameter.grad = gradient.clone()
        self._optimizers[k].step()
        return parameter.detach().clone()

    def state(self) -> dict[str, Tensor]:
        """All that the optimizers remember, as tensors by name: momenta, moments, counters."""
        named = {}
        for k, optimizer in enumerate(self._optimizers):
            for name, value in optimizer.state_dict()["state"].get(0, {}).items():
                if value is not None:
                    named[f"{k}.{name}"] = torch.as_tensor(value).detach().clone()
        return named

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        for k, optimizer in enumerate(self._optimizers):
            own = {n.removeprefix(f"{k}."): t.clone() for n, t in state.items() if n.startswith(f"{k}.")}
            whole: dict[str, Any] = optimizer.state_dict()
            optimizer.load_state_dict({**whole, "state": {0: own} if own else {}})

    def rows(
        self, local: Tensor, gradient: Tensor, rows: slice, away: Sequence[int] | frozenset[int]
    ) -> Tensor:
        """These rows after a step; an absent node's row and optimizer stay as they are."""
        stepped = [
            l.clone() if k in away else self.step(k, l, g)
            for k, g, l in zip(range(rows.start, rows.stop), gradient, local[rows], strict=True)
        ]
        return torch.stack(stepped)
