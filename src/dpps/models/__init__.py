"""The models of the paper and two small ones by name, models of one's own, and weight files."""

from typing import TYPE_CHECKING

from torch import nn

from dpps.errors import UsageError
from dpps.lazy import lazy_imports
from dpps.models.named import MODELS, Fitting, NamedModel
from dpps.models.own import build_own, is_own

if TYPE_CHECKING:  # imported when first asked for
    from dpps.models.mlp import MLP, MLPResidual
    from dpps.models.resnet import ResNet18
    from dpps.models.small import cnn, linear
    from dpps.models.stages import ELEMENTWISE, Staged, call_stages, run_stages, stage_parameters
    from dpps.models.swapping import swapped
    from dpps.models.vit import ViT
    from dpps.models.weights import load_weights

__getattr__, __dir__, __all__ = lazy_imports(__name__)


def shared_prefixes(name: str, shared: str) -> tuple[str, ...]:
    """The parameter prefixes that `shared` stands for in the named model.

    Args:
        name: one of `MODELS.names()`.
        shared: "1", "2" or "all", or comma-separated prefixes ending at a dot of the parameter name:
            "conv1,bn1" is the part of ResNet-18 behind the paper's sensitivity figure (9,536 parameters).
    """
    return MODELS[name].prefixes(name, shared)


def build(
    name: str, shared: str, shape: tuple[int, ...], classes: int, norm: str = "batch", dropout: float = 0.1
) -> tuple[nn.Module, tuple[str, ...]]:
    """The named model, fitted to the data and initialised from torch's generator, and its shared part.

    Args:
        name: one of `MODELS.names()`; or `package.module:callable` (see `dpps.models.own`).
        shared: as in `shared_prefixes`.
        shape: shape of one example; (channels, height, width) for models of images.
        classes: number of labels.
        norm: the norm of resnet18, "batch" or "group"; no other model has one to choose.
        dropout: of vit; the unit record needs 0.
    """
    if is_own(name):
        return build_own(name, shared, shape, classes)
    prefixes = shared_prefixes(name, shared)
    if classes < 1:
        raise UsageError(f"{classes} classes: a model needs at least 1")
    if not shape or min(shape) < 1:
        raise UsageError(f"examples of shape {shape} are empty: every dimension must be at least 1")
    return MODELS[name].fit(Fitting(shape, classes, prefixes, norm, dropout)), prefixes
