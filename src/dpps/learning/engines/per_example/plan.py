"""How a model's per-example gradients are computed: found out once on made-up examples,
and checked there against plain autograd."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpps.learning.engines.calling import pick, tensors_in
from dpps.learning.engines.per_example.calls import IrregularModel, Key
from dpps.learning.engines.per_example.fallback import General
from dpps.learning.engines.per_example.gathering import Gathered
from dpps.learning.engines.per_example.madeup import Batches
from dpps.learning.engines.per_example.objective import Objective
from dpps.learning.engines.per_example.recorder import CallSite, Observer, Recorder, Seen, Sites, name_of
from dpps.learning.engines.per_example.rules import Rule, rule_for
from dpps.learning.engines.per_example.single import (
    GradientError,
    cannot_be_differentiated,
    gradient_of_one,
    leaves_of,
)

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 2e-3}


@dataclass(frozen=True)
class Plan:
    """What to expect of a model, in order, and how much memory an example takes.

    Args:
        sites: where weights go in.
        numbers: how many numbers one example leaves behind on its way forward and back.
        fast_formats: whether the model runs with memory laid out as is fastest.
    """

    sites: Sites
    numbers: int
    fast_formats: bool


def find_sites(
    model: nn.Module, objective: Objective, parameters: Mapping[str, Tensor], batches: Batches
) -> tuple[list[CallSite], int]:
    """Where weights meet examples, from runs with two and with three examples; and the numbers an example leaves."""
    meets: frozenset[int] = frozenset()
    while True:
        two, three = (
            _observe(model, objective, parameters, *batch, n, meets)
            for n, batch in ((2, batches.two), (3, batches.three))
        )
        _refuse_picking(two, three)
        pairs = list(zip(two.seen, three.seen, strict=False))
        if len(two.seen) != len(three.seen) or any(a.name != b.name for a, b in pairs):
            raise IrregularModel("what the model does depends on the number of examples")
        grown = [
            any(_dim(a, b) is not None for a, b in zip(one.outputs, other.outputs, strict=True))
            for one, other in pairs
        ]
        new = next((k for k, (one, _) in enumerate(pairs) if grown[k] and not one.meets), None)
        if new is None:
            break
        meets |= {new}
    if any(one.meets and not grows for (one, _), grows in zip(pairs, grown, strict=True)):
        raise IrregularModel("a sum over the batch meets a parameter")
    changed = _observe(model, objective, parameters, *batches.changed, 3, meets)
    sites = [_site(*seen) for seen in zip(two.seen, three.seen, changed.seen, strict=True)]
    return sites, max(1, (three.numbers - two.numbers))


def _refuse_picking(two: Observer, three: Observer) -> None:
    """Rows along the axis of examples that are picked by an index, or by a matrix of examples by examples."""
    if len(two.picked) != len(three.picked) or len(two.shapes) != len(three.shapes):
        raise IrregularModel("what the model does depends on the number of examples")
    for a, b in zip(two.picked, three.picked, strict=True):
        cut = {k for k in a.cut if (a.shape[k], b.shape[k]) == (2, 3)}
        if cut or a.axes & _grown(a.shape, b.shape):
            raise IrregularModel(f"{a.name} picks rows of the batch, so it cannot be told whose they are")
    if any(len(_grown(a, b)) > 1 for a, b in zip(two.shapes, three.shapes, strict=True)):
        raise IrregularModel("a tensor has the examples along two axes")


def _grown(two: Sequence[int], three: Sequence[int]) -> set[int]:
    return {k for k, (a, b) in enumerate(zip(two, three, strict=False)) if a != b}


def _observe(
    model: nn.Module,
    objective: Objective,
    parameters: Mapping[str, Tensor],
    x: Any,
    target: Any,
    examples: int,
    meets: frozenset[int],
) -> Observer:
    leaves = leaves_of(parameters)
    observer = Observer(leaves, tensors_in((x, target)), meets)
    objective.each(model, leaves, x, target, examples, observer)
    return observer


def _dim(two: Sequence[int], three: Sequence[int]) -> int | None:
    """The axis of a tensor that grows with the number of examples."""
    if len(two) != len(three):
        raise IrregularModel("the number of axes of a tensor depends on the number of examples")
    grows = [k for k, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if not grows:
        return None
    if len(grows) > 1 or two[grows[0]] * 3 != three[grows[0]] * 2:
        raise IrregularModel("a tensor does not grow in proportion to the number of examples")
    return grows[0]


def _is_minor(three: Seen, changed: Seen, out: Sequence[int | None]) -> bool:
    """Which rows of an axis with several positions of every example change with the first example:
    every third, or the first third.

    Raises:
        IrregularModel: what changes fits both or neither, so it is not known whose rows they are. Guessing would bound the
            norms of mixtures.
    """
    for before, after, dim in zip(three.made, changed.made, out, strict=False):
        if dim is None or before.shape[dim] == 3 or not before.is_floating_point():
            continue
        differs = (before != after).movedim(dim, 0).flatten(1).any(1) if before.ndim > 1 else before != after
        minor = not bool(torch.unflatten(differs, 0, (-1, 3))[:, 1:].any())
        major = not bool(torch.unflatten(differs, 0, (3, -1))[1:].any())
        if minor == major:
            raise IrregularModel("it cannot be told which rows of a layer belong to which example")
        return minor
    return False


def _site(two: Seen, three: Seen, changed: Seen) -> CallSite:
    dims: dict[Key, int | None] = {
        key: _dim(a, b) for (key, a), (_, b) in zip(two.inputs, three.inputs, strict=True)
    }
    out = tuple(_dim(a, b) for a, b in zip(two.outputs, three.outputs, strict=True))
    single = tuple(
        tuple(size // 2 if k == dim else size for k, size in enumerate(shape))
        for shape, dim in zip(two.outputs, out, strict=True)
    )
    rule: Rule | None = None
    if two.meets:
        rule = rule_for(two.name) or General(_owner(two))
    minor = _is_minor(three, changed, out) if two.meets else False
    return CallSite(two.name, rule, dims, out, single, two.parameters, minor)


def _owner(seen: Seen) -> str:
    return f"{', '.join(sorted(seen.parameters)[:3])} (in {seen.name})"


class Choosing(Recorder):
    """Runs the model once and replaces rules that do not suit a call by the general way."""

    def __init__(
        self, leaves: Mapping[str, Tensor], sites: list[CallSite], examples: int, fast_formats: bool
    ) -> None:
        super().__init__(leaves, Sites(sites), examples, fast_formats)
        self._own = sites

    def weighted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        k = self._next
        site = self._own[k] if k < len(self._own) else None
        if site is not None and site.name != name_of(func):
            site = None  # a question about a weight (its size, its type), no place of the model
        if site is not None and site.rule is not None and not isinstance(site.rule, General):
            call = self.call(func, site, args, kwargs)
            if not site.rule.suits(call):
                if site.name.endswith("_") and not site.name.endswith("__"):
                    raise IrregularModel(f"{site.name} writes over its input and has no rule here")
                general = General(f"{', '.join(sorted(site.parameters)[:3])} (in {site.name})")
                self._own[k] = replace(site, rule=general)
                self._sites = Sites(self._own)
        return super().weighted(func, args, kwargs)


def make_plan(
    model: nn.Module, objective: Objective, parameters: Mapping[str, Tensor], batches: Batches
) -> Plan:
    """A plan that gives what plain autograd gives, for made-up batches of two and of three examples.

    Raises:
        IrregularModel: there is none.
    """
    sites, numbers = find_sites(model, objective, parameters, batches)
    x, target = batches.three
    for fast in (True, False):
        try:
            leaves = leaves_of(parameters)
            recorder = Choosing(leaves, sites, 3, fast)
            gathered = run(model, objective, leaves, recorder, x, target, 3)
        except RuntimeError:  # a view of what does not lie in the usual order
            if not fast:
                raise
            continue
        _check(model, objective, parameters, gathered, x, target)
        return Plan(Sites(sites), 2 * numbers + gathered.numbers // 3, fast)
    raise AssertionError("unreachable")


def run(
    model: nn.Module,
    objective: Objective,
    leaves: Mapping[str, Tensor],
    recorder: Recorder,
    x: Any,
    target: Any,
    examples: int,
) -> Gathered:
    """One forward and one backward pass: every example's loss and squared norm, and what the clipped sum is made of."""
    with torch.enable_grad():
        losses = objective.each(model, leaves, x, target, examples, recorder)
        return recorder.backward(losses)


def _check(
    model: nn.Module,
    objective: Objective,
    parameters: Mapping[str, Tensor],
    found: Gathered,
    x: Any,
    target: Any,
) -> None:
    """Against one example after the other."""
    factors = torch.tensor([0.5, 1.0, 0.25])
    leaves = leaves_of(parameters)
    totals: dict[str, Tensor] = {}
    mine = found.totals(factors.to(found.losses))
    for k in range(3):
        try:
            loss, gradients = gradient_of_one(model, objective, leaves, pick(x, k), pick(target, k))
        except GradientError as error:  # nobody's data are here, so stopping tells nothing
            raise cannot_be_differentiated(model, error) from error
        squares = torch.stack([g.double().square().sum() for g in gradients.values()]).sum()
        _close(loss, found.losses[k], "the loss of an example depends on the others in its batch")
        _close(squares.sqrt(), found.squares[k].sqrt(), "the norm of a gradient is not what autograd says")
        for name, g in gradients.items():
            totals[name] = totals.get(name, torch.zeros_like(g)) + factors[k] * g
    scale = torch.stack(
        [found.squares.max().sqrt().to(found.losses), *(t.norm() for t in totals.values())]
    ).max()
    for name, total in totals.items():
        ours = mine.get(name, torch.zeros_like(total))
        if not bool((ours - total).abs().max() <= _TOLERANCE.get(total.dtype, 1e-2) * scale):
            raise IrregularModel(f"the gradient of {name} is not what autograd says")


def _close(a: Tensor, b: Tensor, message: str) -> None:
    tolerance = _TOLERANCE.get(b.dtype if b.dtype != torch.float64 else a.dtype, 1e-2)
    tolerance = max(tolerance, 2e-3 if torch.get_default_dtype() == torch.float32 else tolerance)
    if not bool((a.double() - b.double()).abs() <= tolerance * (1e-3 + a.double().abs())):
        raise IrregularModel(message)
