"""A rule against plain autograd, one example after the other."""

import torch

from dpps.learning.gradients.layers.rules import Call, tensors_of

EXAMPLES = 3


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make_call(rule, function, arguments, weights, dims, out_dims=(0,), more=None):
    """A call as the recorder makes it.

    Args:
        arguments: by position, under the rule's names.
        weights: keys of the trained ones.
        dims: where the examples lie, by argument.
        more: arguments by keyword.
    """
    names = (*rule.arguments, *map(str, range(9)))[: len(arguments)]
    given = dict(zip(names, arguments, strict=True)) | (more or {})
    result = function(*arguments, **(more or {}))
    shapes = tuple(
        tuple(size // EXAMPLES if k == dim else size for k, size in enumerate(part.shape))
        for (_, part), dim in zip(tensors_of([("", result)]), out_dims, strict=True)
    )
    own = {key: part for key, part in tensors_of(list(given.items())) if key in weights}
    keys = {key: dims.get(key[0]) if key[1] < 0 else None for key, _ in tensors_of(list(given.items()))}
    return Call(function, names, given, own, keys, out_dims, shapes, EXAMPLES)


def check_rule(rule, function, arguments, weights, dims, out_dims=(0,), more=None):
    """Every example's gradient by the rule, its norm and a weighted sum, are those that autograd finds."""
    call = make_call(rule, function, arguments, weights, dims, out_dims, more)
    assert rule.suits(call)
    expected, found = by_autograd(call), by_rule(rule, call)
    assert set(found) == set(expected)
    factors = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)
    for key, each in expected.items():
        contribution = found[key]
        assert contribution.shape == call.weights[key].shape
        torch.testing.assert_close(contribution.explicit(), each)
        torch.testing.assert_close(contribution.total(factors), torch.tensordot(factors, each, 1))
        squares = contribution.norms().double().square().sum(1)
        torch.testing.assert_close(squares, each.flatten(1).square().sum(1))


def by_rule(rule, call):
    total = _losses(call, rule.run(call)).sum()
    call.cut()
    torch.autograd.grad(total, call.root, allow_unused=True)
    call.settle()
    return rule.gradients(call, call.backs)


def by_autograd(call):
    leaves = {key: weight.detach().clone().requires_grad_() for key, weight in call.weights.items()}
    arguments = dict(call.arguments)
    for (name, k), leaf in leaves.items():
        arguments[name] = leaf if k < 0 else [*arguments[name][:k], leaf, *arguments[name][k + 1 :]]
    losses = _losses(call, call.run(arguments))
    rows = [torch.autograd.grad(loss, list(leaves.values()), retain_graph=True) for loss in losses]
    return {key: torch.stack(parts) for key, parts in zip(leaves, zip(*rows, strict=True), strict=True)}


def _losses(call, result):
    """One number per example that depends on all it has come to, every part with its own weight."""
    total = 0
    for (_, part), dim in zip(tensors_of([("", result)]), call.out_dims, strict=True):
        own = part.movedim(dim, 0).reshape(EXAMPLES, -1)
        total = total + (own * torch.linspace(0.5, 2.0, own.numel(), dtype=own.dtype).view_as(own)).sum(1)
    return total
