"""Vision transformer (Dosovitskiy et al. 2021), with torchvision's parameter names and initialisation."""

from collections import OrderedDict
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpps.errors import UsageError
from dpps.models.named import MODELS, Fitting, NamedModel, Shared


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
        self.conv_proj = _patch_projection(channels, width, patch)
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


def _patch_projection(channels: int, width: int, patch: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
    nn.init.trunc_normal_(conv.weight, std=(channels * patch * patch) ** -0.5)
    assert conv.bias is not None
    nn.init.zeros_(conv.bias)
    return conv


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
