"""The paper's multilayer perceptrons: 784-10-784-10 with tanh after every layer, the last one included."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.models.named import MODELS, Fitting, NamedModel


class MLP(nn.Module):
    """Linear layers `layer1`, `layer2`, ... with biases, tanh after every one; the input is flattened.

    This is the model behind the paper's accuracy tables. `sizes` has the width of the input and of every layer's output.
    """

    def __init__(self, sizes: Sequence[int] = (784, 10, 784, 10)) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1:
            raise UsageError(f"MLP sizes {tuple(sizes)}: give at least two sizes, each at least 1")
        for k, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            self.add_module(f"layer{k}", nn.Linear(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """tanh(L_k ... tanh(L_1 x))."""
        x = x.flatten(1)
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


class MLPResidual(nn.Module):
    """The three-layer perceptron with a residual connection behind the paper's sensitivity figures.

    residual=1: out = h + tanh(L3 tanh(L2 h)), h = tanh(L1 x); the authors share one layer of it.
    residual=2: out = tanh(L3(x + tanh(L2 tanh(L1 x)))); the authors share two layers of it.
    """

    def __init__(self, residual: int, inputs: int = 784, classes: int = 10) -> None:
        super().__init__()
        if residual not in (1, 2):
            raise UsageError(
                f"residual {residual!r}: choose 1 (skip layers 2 and 3) or 2 (skip layers 1 and 2)"
            )
        self.residual = residual
        self.layer1 = nn.Linear(inputs, classes)
        self.layer2 = nn.Linear(classes, inputs)
        self.layer3 = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x is flattened; the output is (batch, classes)."""
        x = x.flatten(1)
        h = torch.tanh(self.layer1(x))
        z = torch.tanh(self.layer2(h))
        if self.residual == 1:
            return h + torch.tanh(self.layer3(z))
        return torch.tanh(self.layer3(x + z))


_LAYERS = {"1": ("layer1",), "2": ("layer1", "layer2"), "all": ("layer1", "layer2", "layer3")}
HIDDEN = 10  # the width of the first layer


@MODELS.register("mlp")
class NamedMLP(NamedModel):
    """Takes the flattened example of n values: (n, 10, n, classes)."""

    shared = _LAYERS

    @classmethod
    def fit(cls, to: Fitting) -> nn.Module:
        return MLP((to.values, HIDDEN, to.values, to.classes))


@MODELS.register("mlp-residual")
class NamedMLPResidual(NamedModel):
    """(n, classes, n, classes), because its sum needs equal widths. The residual connection is where the authors had it:
    around layers 2 and 3 if layer1 alone is shared, else around layers 1 and 2, so also for "all"."""

    shared = _LAYERS

    @classmethod
    def fit(cls, to: Fitting) -> nn.Module:
        only_first = all(prefix.split(".")[0] == "layer1" for prefix in to.prefixes)
        return MLPResidual(1 if only_first else 2, to.values, to.classes)
