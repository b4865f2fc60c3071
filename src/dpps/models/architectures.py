"""The models that come with the package: two small ones, the paper's perceptrons, ResNet-18 and a vision transformer."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpps.errors import UsageError, unknown
from dpps.models.named import MODELS, Fitting, NamedModel, Shared

# Small models that private learning does well with: softmax regression, and a CNN with tanh


def linear(inputs: int, classes: int) -> nn.Sequential:
    """Softmax regression on the flattened input, for features or standardised columns. It starts at zero: its loss is convex.

    Args:
        inputs: length of the flattened input.
        classes: width of the output.
    """
    layer = nn.Linear(inputs, classes)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), layer1=layer))


def cnn(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Two convolutions and two linear layers with tanh between them: 26,010 parameters for 28 x 28 and ten classes.

    Papernot, Thakurta, Song, Chien, Erlingsson, "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", AAAI
    2021: bounded activations keep gradients within the clip.
    """
    # what convolutions and pools leave
    rows, columns = (((size - 2) // 2 - 4) // 2 for size in (height, width))
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


# The paper's multilayer perceptrons: 784-10-784-10 with tanh after every layer, the last one included


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


# ResNet-18 (He et al. 2016) with torchvision's layout and parameter names, so that its weight files load

GROUPS = 32  # the number of groups Wu and He (2018) propose for GroupNorm; divides every width of ResNet-18


class Block(nn.Module):
    """relu(f(x) + skip(x)): two 3x3 convolutions in f, a 1x1 convolution as skip where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.bn1 = _norm(outputs, norm)
        self.conv2 = _conv(outputs, outputs, 3, 1)
        self.bn2 = _norm(outputs, norm)
        changes_shape = stride != 1 or inputs != outputs
        self.downsample = (
            nn.Sequential(_conv(inputs, outputs, 1, stride), _norm(outputs, norm)) if changes_shape else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the same shape as its skip connection."""
        skip = x if self.downsample is None else self.downsample(x)
        h = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(h)) + skip)


class ResNet18(nn.Module):
    """ResNet-18: a 7x7 stem with max-pooling, four layers of two blocks, a linear head.

    Initialised as in torchvision: convolutions normal with He's fan-out variance, norms 1 and 0, the head as `nn.Linear`.
    norm="batch" computes statistics over the batch, so one example influences the gradients of the others; norm="group" has
    the same parameter names and none of that, as privacy of single records requires.
    """

    def __init__(self, classes: int = 10, channels: int = 3, norm: str = "batch") -> None:
        super().__init__()
        if norm not in ("batch", "group"):
            raise unknown("norm", norm, ("batch", "group"))
        self.conv1 = _conv(channels, 64, 7, 2)
        self.bn1 = _norm(64, norm)
        self.layer1 = _layer(64, 64, 1, norm)
        self.layer2 = _layer(64, 128, 2, norm)
        self.layer3 = _layer(128, 256, 2, norm)
        self.layer4 = _layer(256, 512, 2, norm)
        self.fc = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits; the head reads the mean over all places of the last layer."""
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(-2, -1)))
        return logits


def _layer(inputs: int, outputs: int, stride: int, norm: str) -> nn.Sequential:
    return nn.Sequential(Block(inputs, outputs, stride, norm), Block(outputs, outputs, 1, norm))


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _norm(width: int, norm: str) -> nn.Module:
    return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(GROUPS, width)


@MODELS.register("resnet18")
class NamedResNet18(NamedModel):
    """For images of any size; the norm can be chosen."""

    has_norm = True
    shared: ClassVar[Shared] = {
        "1": ("conv1", "bn1", "layer1"),
        "2": ("conv1", "bn1", "layer1", "layer2"),
        "all": ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"),
    }

    @classmethod
    def fit(cls, to: Fitting) -> nn.Module:
        channels, _, _ = to.image("resnet18")
        return ResNet18(to.classes, channels, to.norm)


# Vision transformer (Dosovitskiy et al. 2021), with torchvision's parameter names and initialisation


class SelfAttention(nn.Module):
    """Multi-head self-attention with the parameters of `nn.MultiheadAttention`.

    Written out in matrix products, because torch's fused attention has no batching rule for `torch.vmap`.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """softmax(q kᵀ / sqrt(width / heads)) v per head, projected; x is (batch, tokens, width)."""
        batch, tokens, width = x.shape
        qkv = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = torch.softmax(q @ k.mT * (width // self.heads) ** -0.5, dim=-1) @ v
        out: Tensor = self.out_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class EncoderLayer(nn.Module):
    """Attention, then a two-layer perceptron, each on the normalised input and added to it."""

    def __init__(self, width: int, heads: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = SelfAttention(width, heads)
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        inner, outer = _linear(width, mlp), _linear(mlp, width)
        self.mlp = nn.Sequential(inner, nn.GELU(), nn.Dropout(dropout), outer, nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        """x is (batch, tokens, width), and so is the output."""
        attended: Tensor = x + self.dropout(self.self_attention(self.ln_1(x)))
        out: Tensor = attended + self.mlp(self.ln_2(attended))
        return out


class Encoder(nn.Module):
    """Adds the position of every token, then runs the encoder layers and a last norm."""

    def __init__(self, tokens: int, layers: int, heads: int, width: int, mlp: int, dropout: float) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        stack = [(f"encoder_layer_{k}", EncoderLayer(width, heads, mlp, dropout)) for k in range(layers)]
        self.layers = nn.Sequential(OrderedDict(stack))
        self.ln = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """x is (batch, tokens, width), and so is the output."""
        out: Tensor = self.ln(self.layers(self.dropout(x + self.pos_embedding)))
        return out


class ViT(nn.Module):
    """Vision transformer; the defaults are the paper's, for 32x32 images in 4x4 patches.

    As in torchvision the head starts at zero, so in the very first step only the head has a gradient.

    Args:
        image: height and width of the image.
        patch: height and width of a patch; must divide `image`.
        layers: number of encoder layers.
        heads: attention heads per layer; must divide `width`.
        width: length of a token.
        mlp: width inside the perceptron of an encoder layer.
        dropout: probability of dropping a value, after the embedding, attention and perceptron layers.
        classes: width of the output.
        channels: channels of the input image.
    """

    def __init__(
        self,
        image: int = 32,
        patch: int = 4,
        layers: int = 4,
        heads: int = 4,
        width: int = 128,
        mlp: int = 1024,
        dropout: float = 0.1,
        classes: int = 10,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if image % patch:
            raise UsageError(
                f"ViT patch {patch} does not divide the image size {image}: choose one that does"
            )
        if width % heads:
            raise UsageError(
                f"ViT heads {heads} does not divide the width {width}: choose a number that does"
            )
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.conv_proj = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        nn.init.trunc_normal_(self.conv_proj.weight, std=(channels * patch * patch) ** -0.5)
        assert self.conv_proj.bias is not None
        nn.init.zeros_(self.conv_proj.bias)
        self.encoder = Encoder((image // patch) ** 2 + 1, layers, heads, width, mlp, dropout)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(width, classes)))
        for parameter in self.heads.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Logits from the class token, which stands in front of the embedded patches."""
        patches = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        logits: Tensor = self.heads(self.encoder(tokens)[:, 0])
        return logits


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(linear.weight)
    nn.init.normal_(linear.bias, std=1e-6)
    return linear


PATCH = 4
"""Pixels of a patch's side."""


@MODELS.register("vit")
class NamedViT(NamedModel):
    """For square images that patches cover."""

    shared: ClassVar[Shared] = {
        "1": ("class_token", "conv_proj"),
        "2": ("class_token", "conv_proj", "encoder"),
        "all": ("class_token", "conv_proj", "encoder", "heads"),
    }

    @classmethod
    def fit(cls, to: Fitting) -> nn.Module:
        channels, height, width = to.image("vit")
        if height != width or height % PATCH:
            raise UsageError(
                f"vit needs square images whose side is a multiple of {PATCH}, not {height}x{width}: use resnet18"
            )
        return ViT(image=height, patch=PATCH, classes=to.classes, channels=channels, dropout=to.dropout)
