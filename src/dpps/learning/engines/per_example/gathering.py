"""From what was recorded to every example's norm over all parameters, and then to the clipped sum."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpps.learning.engines.per_example.calls import Call
from dpps.learning.engines.per_example.contributions import Contribution, Explicit, combine
from dpps.learning.engines.per_example.fallback import quiet
from dpps.learning.engines.per_example.rules.base import Rule
from dpps.learning.engines.per_example.weights import Weights


@dataclass
class _Use:
    """A parameter's contribution, by way of a weight that is it in another shape (None: itself)."""

    contribution: Contribution
    weight: Tensor | None


@dataclass
class Gathered:
    """What one pass found.

    Args:
        losses: every example's loss.
        squares: every example's squared norm over all parameters, in float64.
        uses: by parameter.
    """

    losses: Tensor
    squares: Tensor
    uses: dict[str, _Use]
    leaves: Mapping[str, Tensor]

    @property
    def numbers(self) -> int:
        """How many numbers are held for the gradients at most."""
        return sum(use.contribution.numbers for use in self.uses.values())

    def totals(self, factors: Tensor, piece: int | None = None) -> dict[str, Tensor]:
        """The sum of the examples' gradients, each times its factor, by parameter."""
        return {name: self._total(name, use, factors, piece) for name, use in self.uses.items()}

    def _total(self, name: str, use: _Use, factors: Tensor, piece: int | None) -> Tensor:
        total = use.contribution.total(factors, piece)
        if use.weight is None:
            return total
        with torch.enable_grad():
            shaped = total.reshape(use.weight.shape).to(use.weight.dtype)
            (found,) = torch.autograd.grad(use.weight, self.leaves[name], shaped, retain_graph=True)
        return found


class Gathering:
    """Puts together what comes back, call by call while the backward pass runs: so long it is in the cache, and most of it
    need not be kept.

    Args:
        leaves: the trained parameters.
        weights: where the weights of calls come from.
        met_once: parameters whose norms are final after one call.
    """

    def __init__(self, leaves: Mapping[str, Tensor], weights: Weights, met_once: frozenset[str]) -> None:
        self._leaves, self._weights, self._met_once = leaves, weights, met_once
        self._uses: dict[str, list[_Use]] = {}
        self._norms: list[Tensor] = []

    def take(self, rule: Rule, call: Call) -> None:
        """Everything has come back to a call."""
        own: dict[str, list[_Use]] = {}
        backs = [back for back in call.backs if back is not None]
        for key, contribution in rule.gradients(call, backs).items():
            self._assign(own, contribution, call.weights[key])
        call.backs.clear()
        for name, uses in own.items():
            if name in self._met_once and len(uses) == 1:
                self._norms.append(uses[0].contribution.norms())
            self._uses.setdefault(name, []).extend(uses)

    def _assign(self, uses: dict[str, list[_Use]], contribution: Contribution, weight: Tensor) -> None:
        origin, leaves = self._weights.origin(weight), self._leaves
        if origin.same_numbers:
            (name,) = origin.parameters
            uses.setdefault(name, []).append(_Use(contribution, None if weight is leaves[name] else weight))
            return
        names = sorted(origin.parameters)
        pulled = _pulled(contribution.explicit(), weight, [leaves[n] for n in names])
        for name, g in zip(names, pulled, strict=True):
            uses.setdefault(name, []).append(_Use(Explicit(g), None))

    def finish(self, losses: Tensor) -> Gathered:
        """All norms and contributions, when the backward pass is over."""
        settled = {name: _settle(name, own, self._leaves) for name, own in self._uses.items()}
        for name, use in settled.items():
            if not (name in self._met_once and len(self._uses[name]) == 1):
                self._norms.append(use.contribution.norms())
        squares = torch.zeros(len(losses), dtype=torch.float64, device=losses.device)
        for dtype in {norms.dtype for norms in self._norms}:
            alike = torch.cat([norms for norms in self._norms if norms.dtype == dtype], 1)
            squares += alike.double().square_().sum(1)
        return Gathered(losses, squares, settled, self._leaves)


def _settle(name: str, uses: list[_Use], leaves: Mapping[str, Tensor]) -> _Use:
    if len(uses) == 1:
        return uses[0]
    direct = [
        use.contribution
        if use.weight is None
        else Explicit(_pulled(use.contribution.explicit(), use.weight, [leaves[name]])[0])
        for use in uses
    ]
    return _Use(combine(direct), None)


def _pulled(gradients: Tensor, weight: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Every example's gradient of a weight, taken back to the parameters that it is computed from."""
    with torch.enable_grad(), quiet():
        try:
            found = torch.autograd.grad(
                weight, leaves, gradients, is_grads_batched=True, retain_graph=True, allow_unused=True
            )
        except RuntimeError:  # what torch.vmap cannot batch
            each = [
                torch.autograd.grad(weight, leaves, g, retain_graph=True, materialize_grads=True)
                for g in gradients
            ]
            return [torch.stack(parts) for parts in zip(*each, strict=True)]
    return [
        gradients.new_zeros(len(gradients), *leaf.shape) if g is None else g
        for g, leaf in zip(found, leaves, strict=True)
    ]
