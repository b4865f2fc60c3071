"""The general way for a function without a rule: every example by itself, through `torch.vmap` or one after the other."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpps.learning.engines.calling import FAILURES, in_short
from dpps.learning.engines.per_example.calls import Call, Key, replace_tensors, tensors_of
from dpps.learning.engines.per_example.contributions import Contribution, Explicit
from dpps.learning.engines.per_example.rules.base import Rule

_log = logging.getLogger(__name__)


class General(Rule):
    """Any function: called again for every example alone, and differentiated there.

    Args:
        owner: what a notice calls the place in the model.
    """

    functions = ()

    def __init__(self, owner: str) -> None:
        self._owner, self._vmap = owner, True

    def run(self, call: Call) -> Any:
        result = call.run()
        if isinstance(result, Tensor):
            return call.watch(result)
        return type(result)(
            call.watch(_alias(part)) if isinstance(part, Tensor) and part.is_floating_point() else part
            for part in result
        )

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        given = {key: call.dims.get(key) for key, _ in tensors_of(list(call.arguments.items()))}
        batched = {key: dim for key, dim in given.items() if dim is not None and key not in call.weights}
        inputs = [call.input(*key) for key in batched]
        backs = [call.output(d, k) for k, d in enumerate(back)]
        keys = list(call.weights)
        weights = [call.weights[key].detach() for key in keys]

        def one(own: list[Tensor], d: list[Tensor]) -> list[Tensor]:
            alone = {
                key: part.unsqueeze(dim) if part.ndim < _tensor(call, key).ndim else part
                for (key, dim), part in zip(batched.items(), own, strict=True)
            }

            def function(*tensors: Tensor) -> tuple[Tensor, ...]:
                new = alone | dict(zip(keys, tensors, strict=True))
                result = call.run(replace_tensors(call.arguments, new))
                return tuple(part for _, part in tensors_of([("", result)]) if part.is_floating_point())

            outputs, pull = torch.func.vjp(function, *weights)  # type: ignore[misc]
            shaped = tuple(g.reshape(out.shape) for g, out in zip(d, outputs, strict=True))
            return list(pull(shaped))

        return {
            key: Explicit(g)
            for key, g in zip(keys, self._each(one, inputs, backs, call.examples), strict=True)
        }

    def _each(self, one: Any, inputs: list[Tensor], backs: list[Tensor], examples: int) -> list[Tensor]:
        if self._vmap:
            try:
                with quiet():
                    found: list[Tensor] = torch.vmap(one)(inputs, backs)
            except FAILURES as error:  # what torch.vmap cannot batch
                self._vmap = False
                _log.warning(
                    "%s has no rule and torch.vmap cannot run it (%s): its gradients are computed one example after the other",
                    self._owner,
                    in_short(error),
                )
            else:
                return found
        rows = [one([x[k] for x in inputs], [d[k] for d in backs]) for k in range(examples)]
        return [torch.stack(parts) for parts in zip(*rows, strict=True)]


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's remarks that an operation has no batching rule of its own: it is right all the same."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield


def _alias(part: Tensor) -> Tensor:
    """The same numbers: one result may be made of another inside the function, and what comes back that way is not asked for."""
    return part.view_as(part) if part.requires_grad else part


def _tensor(call: Call, key: Key) -> Tensor:
    value = call.arguments[key[0]]
    tensor: Tensor = value if key[1] < 0 else value[key[1]]
    return tensor
