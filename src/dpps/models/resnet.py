"""ResNet-18 (He et al. 2016) with torchvision's layout and parameter names, so that its weight files load."""

from typing import ClassVar

from torch import Tensor, nn
from torch.nn import functional

from dpps.errors import unknown
from dpps.models.named import MODELS, Fitting, NamedModel, Shared

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
