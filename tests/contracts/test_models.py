"""What every registered model keeps: a new one is tested by being registered."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from dpps.errors import UsageError
from dpps.models import MODELS, build, load_weights, shared_prefixes

SHAPE, CLASSES = (1, 16, 16), 3

every_model = pytest.mark.parametrize("name", MODELS.names())


def made(name: str, shared: str = "all", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(name, shared, SHAPE, CLASSES, norm="group", dropout=0.0)[0]


def moved(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """Parameters away from the start, where some models are zero."""
    generator = torch.Generator().manual_seed(seed)
    named = model.named_parameters()
    return {n: p.detach() + 0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in named}


@every_model
def test_all_means_all_and_less_is_less(name: str) -> None:
    parts = {parameter.split(".")[0] for parameter, _ in made(name).named_parameters()}
    one, two, everything = (set(shared_prefixes(name, shared)) for shared in ("1", "2", "all"))
    assert one
    assert one <= two <= everything == parts


@every_model
def test_any_prefix_of_a_parameter_can_be_shared(name: str) -> None:
    parameter = next(iter(dict(made(name).named_parameters())))
    assert shared_prefixes(name, f" {parameter} ") == (parameter,)
    with pytest.raises(UsageError, match=f"{name} 'nothing'") as caught:
        build(name, "nothing", SHAPE, CLASSES)
    assert "\n" not in str(caught.value)


@every_model
def test_it_gives_a_logit_for_every_class(name: str) -> None:
    out = functional_call(made(name), moved(made(name)), (torch.rand(4, *SHAPE),))
    assert out.shape == (4, CLASSES)
    assert torch.isfinite(out).all()


@every_model
def test_torchs_seed_decides_the_start(name: str) -> None:
    first, again = (made(name).state_dict() for _ in range(2))
    assert all(torch.equal(first[key], again[key]) for key in first)


@every_model
def test_examples_do_not_mix(name: str) -> None:
    """What the unit record needs of a model, with the norm and dropout that it asks for."""
    model, x = made(name).train(), torch.rand(3, *SHAPE)
    other = torch.cat([x[:1], 1 - x[1:]])
    ours, theirs = (functional_call(model, moved(model), (batch,)) for batch in (x, other))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours[1:], theirs[1:])


@every_model
def test_many_nodes_at_once_have_each_nodes_gradients(name: str) -> None:
    model = made(name).double()
    nodes = [moved(model, seed) for seed in (1, 2)]
    x, labels = torch.rand(2, 2, *SHAPE, dtype=torch.float64), torch.tensor([[0, 1], [2, 0]])

    def gradient(parameters: dict[str, Tensor], batch: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return grad(lambda p: F.cross_entropy(functional_call(model, p, (batch,)), targets))(parameters)

    stacked = {n: torch.stack([node[n] for node in nodes]) for n in nodes[0]}
    together = torch.vmap(gradient)(stacked, x, labels)
    for k, node in enumerate(nodes):
        for n, own in gradient(node, x[k], labels[k]).items():
            torch.testing.assert_close(together[n][k], own)
            assert own.abs().max() > 0, n


@every_model
def test_saved_weights_load_again(name: str, tmp_path: Path) -> None:
    source, target = made(name), made(name, seed=5)
    source.load_state_dict(moved(source), strict=False)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    assert load_weights(target, tmp_path / "weights.pt") == []
    x = torch.rand(2, *SHAPE)
    assert torch.equal(target.eval()(x), source.eval()(x))


@every_model
@pytest.mark.parametrize(("shape", "classes"), [(SHAPE, 0), ((), CLASSES), ((1, 0, 16), CLASSES)])
def test_nothing_to_learn_is_refused(name: str, shape: tuple[int, ...], classes: int) -> None:
    with pytest.raises(UsageError) as caught:
        build(name, "all", shape, classes)
    assert "\n" not in str(caught.value)
