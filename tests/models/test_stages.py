"""Stages: what splits a model, and how its parts run with other parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional

from dpps.errors import UsageError
from dpps.models import (
    MODELS,
    Staged,
    build,
    call_stages,
    run_stages,
    stage_parameters,
)
from tests.support.models import SMALL, small, stages_of


@pytest.mark.parametrize("kind", SMALL)
def test_stages_split_parameters_and_forward_pass(kind: str) -> None:
    model, x = small(kind)
    stages = stages_of(model)
    names = [name for stage in stages for name in stage]
    assert sorted(names) == sorted(n for n, _ in model.named_parameters())
    whole, before = model(x), x.clone()
    for cut in range(len(stages) + 1):
        assert torch.equal(run_stages(model, run_stages(model, x, 0, cut), cut), whole)
    assert torch.equal(x, before)


@pytest.mark.parametrize("kind", SMALL)
def test_a_stage_depends_on_its_own_parameters_only(kind: str) -> None:
    model, x = small(kind)
    for k, stage in enumerate(stages_of(model)):
        moved = {n: p.detach() + 0.5 * (n not in stage) for n, p in model.named_parameters()}
        handed = run_stages(model, x, 0, k)
        for ours, expected in zip(
            flat(call_stages(model, moved, handed, k, k + 1)),
            flat(run_stages(model, handed, k, k + 1)),
            strict=True,
        ):
            assert torch.equal(ours, expected)


def flat(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.mark.parametrize(("name", "shared"), [(n, s) for n in MODELS.names() for s in MODELS[n].shared])
def test_named_shared_parts_are_prefixes_of_the_stages(name: str, shared: str) -> None:
    model, prefixes = build(name, shared, (3, 32, 32), 10)
    stages = stages_of(model)
    owned = {n for n, _ in model.named_parameters() if any(f"{n}.".startswith(f"{k}.") for k in prefixes)}
    assert owned in [set().union(*stages[: k + 1]) for k in range(len(stages))]


def test_models_without_separate_stages_are_recognised() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            total: Tensor = self[0](x) + self[1](x)
            return total

    shared = nn.Linear(3, 3)
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    for model in (
        nn.Linear(3, 3),
        nn.Sequential(shared, nn.Tanh(), shared),
        tied,
        Own(shared, nn.Linear(3, 3)),
    ):
        assert stage_parameters(model) is None
    assert stage_parameters(nn.Sequential()) == []
    with pytest.raises(TypeError, match=r"Linear .*Staged"):
        run_stages(nn.Linear(3, 3), torch.rand(1, 3))
    with pytest.raises(TypeError, match=r"Own .*Staged"):
        run_stages(Own(shared, nn.Linear(3, 3)), torch.rand(1, 3))


def test_stage_names_that_miss_a_parameter_are_refused() -> None:
    class Forgetful(Staged):
        stage_names = (("a",),)

        def __init__(self) -> None:
            super().__init__()
            self.a, self.ab = nn.Linear(2, 2), nn.Linear(2, 2)

        def stage(self, k: int, x: Any) -> Any:
            return self.ab(self.a(x))

    with pytest.raises(UsageError, match=r"Forgetful .*ab\.weight, ab\.bias"):
        stage_parameters(Forgetful())


# Vectorisation


def stacked(model: nn.Module, nodes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        n: p.detach()
        + 0.1 * p.detach().std(correction=0) * torch.randn((nodes, *p.shape), generator=generator)
        for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("kind", SMALL)
def test_vmap_over_nodes_equals_a_loop(kind: str) -> None:
    model, x = small(kind, batch=6)
    model.double()
    parameters, batches = stacked(model, 3), x.double().reshape(3, 2, *x.shape[1:])
    labels = torch.tensor([[0, 1], [2, 0], [1, 1]])

    def in_halves(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(call_stages(model, p, call_stages(model, p, x, 0, 1), 1), y)

    def whole(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, p, (x,)), y)

    vectorised = torch.vmap(grad(in_halves))(parameters, batches, labels)
    for node in range(3):
        expected = grad(whole)({n: p[node] for n, p in parameters.items()}, batches[node], labels[node])
        for name, gradient in expected.items():
            torch.testing.assert_close(vectorised[name][node], gradient)
            assert gradient.abs().max() > 0, name


def test_vmap_with_dropout_differs_between_nodes() -> None:
    model, x = small("vit")
    model.train()
    same = {n: p.detach().expand(2, *p.shape) for n, p in model.named_parameters()}
    out = torch.vmap(lambda p: call_stages(model, p, x), randomness="different")(same)
    assert not torch.equal(out[0], out[1])


def test_call_stages_leaves_the_model_and_uses_buffers() -> None:
    model, x = small("resnet-batch")
    expected, before = model(x), {n: t.clone() for n, t in model.state_dict().items()}
    shifted = call_stages(model, {"bn1.running_mean": before["bn1.running_mean"] + 1}, x)
    assert not torch.allclose(shifted, expected)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
