"""The models of the paper by name, what "one" and "two shared layers" mean for each, and weight files."""

from math import prod

from dpps.errors import UsageError, unknown
from dpps.models.mlp import MLP, MLPResidual
from dpps.models.resnet import ResNet18
from dpps.models.stages import Staged, call_stages, run_stages, stage_parameters
from dpps.models.vit import ViT
from dpps.models.weights import load_weights

__all__ = [
    "MLP",
    "SHARED",
    "MLPResidual",
    "ResNet18",
    "Staged",
    "ViT",
    "build",
    "call_stages",
    "load_weights",
    "run_stages",
    "shared_prefixes",
    "stage_parameters",
]

_LAYERS = {"1": ("layer1",), "2": ("layer1", "layer2"), "all": ("layer1", "layer2", "layer3")}

#: Per model: the parameter prefixes that the paper's experiments call one and two shared layers, and all.
SHARED: dict[str, dict[str, tuple[str, ...]]] = {
    "mlp": _LAYERS,
    "mlp-residual": _LAYERS,
    "resnet18": {
        "1": ("conv1", "bn1", "layer1"),
        "2": ("conv1", "bn1", "layer1", "layer2"),
        "all": ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"),
    },
    "vit": {
        "1": ("class_token", "conv_proj"),
        "2": ("class_token", "conv_proj", "encoder"),
        "all": ("class_token", "conv_proj", "encoder", "heads"),
    },
}

HIDDEN = 10  # the width of the MLP's first layer
PATCH = 4  # the ViT's patch size


def shared_prefixes(name: str, shared: str) -> tuple[str, ...]:
    """The parameter prefixes that `shared` stands for in the named model.

    Args:
        name: mlp, mlp-residual, resnet18 or vit.
        shared: "1", "2" or "all", or comma-separated prefixes ending at a dot of the parameter name:
            "conv1,bn1" is the part of ResNet-18 behind the paper's sensitivity figure (9,536 parameters).
    """
    if name not in SHARED:
        raise unknown("model", name, SHARED)
    if shared in SHARED[name]:
        return SHARED[name][shared]
    prefixes = tuple(part.strip() for part in shared.split(","))
    for prefix in prefixes:
        if prefix.split(".")[0] not in SHARED[name]["all"]:
            raise unknown(f"shared part of {name}", prefix, (*SHARED[name], *SHARED[name]["all"]))
    return prefixes


def build(
    name: str, shared: str, shape: tuple[int, ...], classes: int, norm: str = "batch", dropout: float = 0.1
) -> tuple[Staged, tuple[str, ...]]:
    """The named model, fitted to the data and initialised from torch's generator, and its shared part.

    The MLPs take the flattened example of n values: mlp is (n, 10, n, classes), mlp-residual is
    (n, classes, n, classes), because its sum needs equal widths. The residual connection of mlp-residual is
    where the authors had it: beside layers 2 and 3 if layer1 alone is shared, else beside layers 1 and 2, so
    also for "all".

    Args:
        name: mlp, mlp-residual, resnet18 or vit.
        shared: as in `shared_prefixes`.
        shape: shape of one example; (channels, height, width) for resnet18 and vit.
        classes: number of labels.
        norm: the norm of resnet18, "batch" or "group"; no other model has one to choose.
        dropout: of vit; the unit record needs 0.
    """
    prefixes = shared_prefixes(name, shared)
    if classes < 1:
        raise UsageError(f"{classes} classes: a model needs at least 1")
    if not shape or min(shape) < 1:
        raise UsageError(f"examples of shape {shape} are empty: every dimension must be at least 1")
    return _fit(name, prefixes, shape, classes, norm, dropout), prefixes


def _fit(
    name: str, prefixes: tuple[str, ...], shape: tuple[int, ...], classes: int, norm: str, dropout: float
) -> Staged:
    if name == "mlp":
        return MLP((prod(shape), HIDDEN, prod(shape), classes))
    if name == "mlp-residual":
        only_first = all(prefix.split(".")[0] == "layer1" for prefix in prefixes)
        return MLPResidual(1 if only_first else 2, prod(shape), classes)
    if len(shape) != 3:
        raise UsageError(f"{name} needs images of shape (channels, height, width), not {shape}: use mlp")
    channels, height, width = shape
    if name == "resnet18":
        return ResNet18(classes, channels, norm)
    if height != width or height % PATCH:
        raise UsageError(
            f"vit needs square images whose side is a multiple of {PATCH}, not {height}x{width}: use resnet18"
        )
    return ViT(image=height, patch=PATCH, classes=classes, channels=channels, dropout=dropout)
