"""Small models that private learning does well with: softmax regression, and a CNN with tanh."""

from collections import OrderedDict
from typing import ClassVar

from torch import nn

from dpps.errors import UsageError
from dpps.models.named import MODELS, Fitting, NamedModel, Shared


def linear(inputs: int, classes: int) -> nn.Sequential:
    """Softmax regression on the flattened input, for features or standardised columns. It starts at zero: its loss is convex.

    Args:
        inputs: length of the flattened input.
        classes: width of the output.
    """
    layer = nn.Linear(inputs, classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), layer1=layer))


def cnn(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Two convolutions and two linear layers with tanh between them: 26,010 parameters for 28 x 28 and ten classes.

    Papernot, Thakurta, Song, Chien, Erlingsson, "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", AAAI
    2021: bounded activations keep gradients within the clip.
    """
    rows, columns = (
        ((size - 2) // 2 - 4) // 2 for size in (height, width)
    )  # what convolutions and pools leave
    if min(rows, columns) < 1:
        raise UsageError(f"cnn needs images of at least 14 x 14, not {height} x {width}: use linear or mlp")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 8, stride=2, padding=3),
            tanh1=nn.Tanh(),
            pool1=nn.MaxPool2d(2, stride=1),
            conv2=nn.Conv2d(16, 32, 4, stride=2),
            tanh2=nn.Tanh(),
            pool2=nn.MaxPool2d(2, stride=1),
            flatten=nn.Flatten(),
            fc1=nn.Linear(32 * rows * columns, 32),
            tanh3=nn.Tanh(),
            fc2=nn.Linear(32, classes),
        )
    )


@MODELS.register("linear")
class NamedLinear(NamedModel):
    """Has one layer, so it is always shared."""

    shared = dict.fromkeys(("1", "2", "all"), ("layer1",))
    softmax_regression = True

    @classmethod
    def fit(cls, to: Fitting) -> nn.Module:
        return linear(to.values, to.classes)


@MODELS.register("cnn")
class NamedCNN(NamedModel):
    """For images of at least 14 x 14."""

    shared: ClassVar[Shared] = {
        "1": ("conv1",),
        "2": ("conv1", "conv2"),
        "all": ("conv1", "conv2", "fc1", "fc2"),
    }

    @classmethod
    def fit(cls, to: Fitting) -> nn.Module:
        return cnn(*to.image("cnn"), to.classes)
