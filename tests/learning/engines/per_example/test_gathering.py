"""What every parameter gets: from all its uses, also by way of what was computed from it."""

import torch

from dpps.learning import CallSite, Recorder, Sites, rule_for

X = torch.randn(3, 4, dtype=torch.float64)
PRODUCT = CallSite(
    "matmul",
    rule_for("matmul"),
    {("0", -1): 0, ("1", -1): None},
    (0,),
    ((1, 2),),
    frozenset("w"),
    minor=False,
)


def only_weights(name):
    return CallSite(name, None, {}, (), (), frozenset("w"), minor=False)


def gathered(model, sites, leaves):
    """The losses of a model of `leaves` with these places, gathered; and every example's gradients by autograd."""
    expected = []
    for k in range(3):
        loss = model(X[k : k + 1], leaves).sum()
        expected.append(torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))
    recorder = Recorder(leaves, Sites(sites), 3, fast_formats=False)
    with recorder:
        losses = model(X, leaves).sum(1)
    found = recorder.backward(losses)
    rows = {name: torch.stack(g) for name, g in zip(leaves, zip(*expected, strict=True), strict=True)}
    torch.testing.assert_close(found.squares, sum(g.flatten(1).square().sum(1) for g in rows.values()))
    factors = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    totals = found.totals(factors)
    for name, g in rows.items():
        expected_total = torch.tensordot(factors, g, 1)
        torch.testing.assert_close(totals.get(name, torch.zeros_like(expected_total)), expected_total)
    return found


def leaf(*shape):
    torch.manual_seed(len(shape))
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_a_weight_used_twice():
    leaves = {"w": leaf(4, 4)}
    site = CallSite("matmul", PRODUCT.rule, PRODUCT.dims, (0,), ((1, 4),), PRODUCT.parameters, minor=False)
    gathered(lambda x, p: (x @ p["w"]).tanh() @ p["w"], [site, site], leaves)


def test_a_weight_in_another_shape():
    gathered(lambda x, p: (x @ p["w"].T).tanh(), [only_weights("T"), PRODUCT], {"w": leaf(2, 4)})


def test_a_weight_computed_from_a_parameter():
    gathered(lambda x, p: (x @ p["w"].exp()).tanh(), [only_weights("exp"), PRODUCT], {"w": leaf(4, 2)})


def test_a_parameter_without_a_part_in_the_loss_gets_nothing():
    found = gathered(lambda x, p: (x @ p["w"]).tanh(), [PRODUCT], {"w": leaf(4, 2), "unused": leaf(3)})
    assert set(found.uses) == {"w"}
