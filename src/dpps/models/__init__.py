"""The models of the paper and two small ones by name, models of one's own, and weight files."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.models.architectures import MLP, MLPResidual, ResNet18, ViT, cnn, linear
    from dpps.models.named import MODELS, Fitting, NamedModel, build, shared_prefixes
    from dpps.models.weights import load_weights
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
