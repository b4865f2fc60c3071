"""Small models of every kind, and what tests ask of a model."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpps.models import MLP, MLPResidual, ResNet18, ViT

Shapes = dict[str, tuple[int, ...]]


def shapes(model: nn.Module) -> Shapes:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def count(model: nn.Module, prefixes: tuple[str, ...] = ()) -> int:
    named = model.named_parameters()
    return sum(
        p.numel() for n, p in named if not prefixes or any(f"{n}.".startswith(f"{k}.") for k in prefixes)
    )


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random values everywhere, so that no zero hides a missing term; vectors are positive (variances)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]:
            value = torch.rand(tensor.shape, generator=generator)
            matrix = tensor.dim() > 1
            tensor.copy_((value - 0.5) * 4 * tensor[0].numel() ** -0.5 if matrix else value + 0.1)
    return model


def tiny_vit(dropout: float = 0.1) -> ViT:
    return ViT(image=8, patch=4, layers=2, heads=2, width=8, mlp=16, dropout=dropout, classes=3)


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 3))


# A model and the shape of one example. Evaluation mode: dropout has its own test.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((12, 5, 12, 3)), (3, 2, 2)),
    "residual-1": (lambda: MLPResidual(1, 12, 3), (3, 2, 2)),
    "residual-2": (lambda: MLPResidual(2, 12, 3), (3, 2, 2)),
    "vit": (tiny_vit, (3, 8, 8)),
    "sequential": (sequential, (3, 2, 2)),
    "resnet-batch": (lambda: ResNet18(3), (3, 16, 16)),
    "resnet-group": (lambda: ResNet18(3, norm="group"), (3, 16, 16)),
}


def small(kind: str, batch: int = 2) -> tuple[nn.Module, Tensor]:
    make, shape = SMALL[kind]
    generator = torch.Generator().manual_seed(1)
    return randomise(make()).eval(), torch.rand((batch, *shape), generator=generator)
