"""Small models of every kind, each with made inputs: what the per-example engine is compared on."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpps
from dpps.learning import OneByOne, Partition, PerExample, choose_per_example, pick
from dpps.models import MLPResidual, ViT

NODES, BATCH = 2, 4


def floats(*shape: int) -> Tensor:
    return torch.randn(NODES, BATCH, *shape)


def tokens(length: int, vocabulary: int = 11) -> Tensor:
    return torch.randint(0, vocabulary, (NODES, BATCH, length))


def rows(partition: Partition) -> tuple[Tensor, Tensor]:
    """Different parameters for every node."""
    s, l = (part.double() + 0.1 * torch.randn(NODES, len(part)) for part in partition.initial())
    return s, l


def each_alone(mask: Tensor) -> Iterator[Tensor]:
    """The mask with one example at a time."""
    for k in range(mask.shape[1]):
        only = torch.zeros_like(mask)
        only[:, k] = mask[:, k]
        yield only


def compare(
    model: nn.Module,
    x: Any,
    target: Any,
    loss: Any,
    *,
    shared: Any = "all",
    clip: Any = None,
    mask: Any = None,
) -> PerExample:
    """The engine that is chosen against one example after the other; gives the engine."""
    partition = Partition(model, shared)
    y, l = rows(partition)
    mask = torch.ones(NODES, BATCH, dtype=torch.bool) if mask is None else mask
    chosen = choose_per_example(partition, loss, pick((x, target), (0, 0)), clip=1.0)
    if clip is None:  # half of the examples are clipped
        one_by_one = OneByOne(partition, loss, 1e9)
        norms = [torch.cat(one_by_one.sums(y, l, x, target, only)[1:], 1) for only in each_alone(mask)]
        clip = float(torch.stack([n.norm(dim=1) for n in norms]).flatten().median())
    found = type(chosen)(partition, loss, clip).sums(y, l, x, target, mask)
    expected = OneByOne(partition, loss, clip).sums(y, l, x, target, mask)
    for a, b in zip(found, expected, strict=True):
        # norms by Gram matrices are enlarged by the root of float64's rounding
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8 * max(1.0, clip))
    torch.testing.assert_close(found.clipped, expected.clipped)
    return chosen


class TiedLanguageModel(nn.Module):
    """Embeddings, positions from a table, one encoder layer, the output layer tied to the embeddings."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, 8, padding_idx=0), nn.Embedding(5, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.out = nn.Linear(8, vocabulary, bias=False)
        self.out.weight = self.words.weight
        self.head = nn.Linear(vocabulary, 3)

    def forward(self, x: Tensor) -> Any:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.head(self.out(self.encoder(h)).mean(1))


class Twice(nn.Module):
    """A layer that is used twice and a weight that is used turned around."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.w = nn.Parameter(torch.randn(4, 6) / 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(torch.tanh(self.a(x))))
        return self.b(torch.tanh(h @ self.w.t()) @ self.w)


class Bare(nn.Module):
    """Parameters that are added, multiplied, subtracted and repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(5, 6))
        self.scale, self.temperature = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.tensor(1.3))
        self.mix = nn.Parameter(torch.randn(5, 5) / 2)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        h = torch.tanh(self.mix @ h) * self.scale / self.temperature.exp()
        h = h + (1 - self.scale) * self.place[None]
        return self.out(h[:, 0])


class Merged(nn.Module):
    """Weights that are computed from parameters: low rank, normalised, sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6)
        self.base.weight.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(6, 2) / 3)
        self.raw = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(F.linear(x, self.base.weight + self.up @ self.down, self.base.bias))
        normal = self.raw / self.raw.norm(dim=1, keepdim=True)
        return F.linear(torch.tanh(F.linear(h, normal)), self.raw[:3])


class Bilinear(nn.Module):
    """A function without a rule, and one of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.slope, self.out = nn.Bilinear(4, 3, 5), nn.PReLU(5), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.out(self.slope(self.both(a, b)))


class Spectral(nn.Module):
    """A filter of pairs of numbers that are read as complex ones, behind an odd number of others."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.pairs = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 2))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        h = torch.fft.rfft(x + self.shift) * torch.view_as_complex(self.pairs)
        return self.out(torch.fft.irfft(h, n=5))


class Named(nn.Module):
    """Inputs by name; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cross = nn.Embedding(11, 8), nn.MultiheadAttention(8, 2, kdim=5, vdim=5)
        self.out, self.second = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, ids: Tensor, seen: Tensor) -> Any:
        h, _ = self.cross(self.words(ids).transpose(0, 1), seen.transpose(0, 1), seen.transpose(0, 1))
        h = h.transpose(0, 1).mean(1)
        return self.out(h), self.second(h)[:, 0]


class Block(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.b = nn.Conv2d(channels, channels, 3, padding=1)
        self.one, self.two = nn.GroupNorm(2, channels), nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.one(self.a(x)), inplace=True)
        return F.relu_(x + self.two(self.b(h)))


class UNet(nn.Module):
    """Down, up and across; one class per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        )
        self.up, self.out = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.down(x))
        deep = F.relu(self.deep(F.max_pool2d(h, 2)))
        return self.out(torch.cat([h, self.up(deep)], 1))


class Recurrent(nn.Module):
    """A recurrent classifier of tokens."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 5)
        self.cells = kind(5, 4, batch_first=True, **options)
        self.out = nn.Linear(8 if options.get("bidirectional") else 4, 3)

    def forward(self, x: Tensor) -> Any:
        h, _ = self.cells(self.words(x))
        return self.out(h[:, -1] + h.mean(1))


class Cells(nn.Module):
    """A loop over cells, whose hidden state is made of the cell state inside a function without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(11, 5), nn.LSTMCell(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        h = c = torch.zeros(len(x), 4)
        for word in self.words(x).unbind(1):
            h, c = self.cell(word, (h, c))
        return self.head(h)


class Regression(nn.Module):
    """A transformer encoder whose output is a number per example."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=False, norm_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.encoder(self.into(x).transpose(0, 1)).mean(0))[:, 0]


def conv3d() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 2, stride=(1, 2, 1), dilation=(1, 1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(96, 3)
    )


def conv1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding="same", dilation=2),
        nn.InstanceNorm1d(4, affine=True),
        nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3),
        nn.RMSNorm([6, 6, 6]),
        nn.SiLU(),
        nn.Conv2d(6, 3, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    return model


def wide() -> nn.Module:
    """Few positions and many numbers: norms by Gram matrices."""
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 48), nn.Flatten(), nn.Linear(96, 3))


def viewed() -> nn.Module:
    """A model that insists on the usual order of numbers behind a convolution."""

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(1, 3, 3), nn.Linear(108, 3)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.conv(x))
            return self.out(h.view(len(h), -1))

    return Viewed()


WITHOUT_RULES = {
    *("1-d cnn", "bare parameters", "no rule", "bags of words"),
    *("LSTM with projections (one by one)", "LSTM cells (one by one)"),
}
"""Models that have a function without a rule: they go by `vmap(grad)`, or one by one."""
SHARED = {"mlp": "layer1", "frozen": "3"}
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (lambda: dpps.models.MLP((12, 5, 9, 3)), lambda: floats(3, 4)),
    "residual mlp": (lambda: MLPResidual(2, 12, 3), lambda: floats(12)),
    "linear on sequences": (wide, lambda: floats(2, 40)),
    "cnn": (cnn, lambda: floats(1, 8, 8)),
    "cnn that views": (viewed, lambda: floats(1, 8, 8)),
    "depthwise cnn": (depthwise, lambda: floats(3, 8, 8)),
    "1-d cnn": (conv1d, lambda: floats(2, 8)),
    "3-d cnn": (conv3d, lambda: floats(2, 4, 5, 6)),
    "resnet with GroupNorm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), Block(4), Block(4), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        ),
        lambda: floats(1, 7, 7),
    ),
    "frozen": (frozen, lambda: floats(6)),
    "used twice": (Twice, lambda: floats(6)),
    "bare parameters": (Bare, lambda: floats(4, 6)),
    "weights from parameters": (Merged, lambda: floats(6)),
    "no rule": (Bilinear, lambda: (floats(4), floats(3))),
    "spectral filter": (Spectral, lambda: floats(5)),
    "bags of words": (
        lambda: nn.Sequential(nn.EmbeddingBag(11, 6, mode="mean"), nn.Tanh(), nn.Linear(6, 3)),
        lambda: tokens(5),
    ),
    "tied language model": (TiedLanguageModel, lambda: tokens(5)),
    "tied, large vocabulary": (lambda: TiedLanguageModel(400), lambda: tokens(5, 400)),
    "LSTM": (lambda: Recurrent(nn.LSTM), lambda: tokens(6)),
    "LSTM, two layers, both directions": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, bias=False),
        lambda: tokens(6),
    ),
    "LSTM with projections (one by one)": (
        lambda: Recurrent(lambda inputs, width, **more: nn.LSTM(inputs, width + 2, proj_size=width, **more)),
        lambda: tokens(6),
    ),
    "LSTM cells (one by one)": (Cells, lambda: tokens(3)),
    "GRU": (lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), lambda: tokens(6)),
    "RNN": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), lambda: tokens(6)),
    "vision transformer": (lambda: ViT(8, 4, 2, 2, 8, 16, 0.0, 3, 1), lambda: floats(1, 8, 8)),
}
"""Classifiers into three classes: what makes the model, and what makes inputs of all nodes."""
