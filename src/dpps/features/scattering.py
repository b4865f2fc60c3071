"""Wavelet scattering: image features with fixed filters. Nothing is learned, so they cost no privacy.

Bruna and Mallat, "Invariant Scattering Convolution Networks", IEEE TPAMI 35(8), 2013. As the input of a linear model in private
learning: Tramèr and Boneh, "Differentially Private Learning Needs Better Features", ICLR 2021.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.features.extraction import FEATURES

Wave = npt.NDArray[np.complex128]


class Scattering(nn.Module):
    r"""Scattering coefficients of images (batch, channels, height, width), every channel by itself.

    With a Gaussian $\phi$ of width $2^J$ and Morlet wavelets $\psi_{j\theta}$ of width $2^j$, the coefficients are
    $x * \phi$, $|x * \psi_1| * \phi$ and $||x * \psi_1| * \psi_2| * \phi$ for $j_2 > j_1$, read off every $2^J$ pixels. The image is
    continued by reflection, so there are `ceil(height / 2^J)` by `ceil(width / 2^J)` of each.

    Args:
        scales: J: features are averages over about $2^J$ pixels.
        orientations: the number of directions between 0 and 180 degrees.
        order: 1 or 2: how many wavelets follow each other.
    """

    def __init__(self, scales: int = 2, orientations: int = 8, order: int = 2) -> None:
        super().__init__()
        for name, value in (("scales", scales), ("orientations", orientations)):
            if value < 1:
                raise UsageError(f"{name} is {value}: it must be 1 or more")
        if order not in (1, 2):
            raise UsageError(f"order is {order}: choose 1 or 2")
        self.scales, self.orientations, self.order = scales, orientations, order
        self._filters: dict[tuple[int, int, torch.device], _Filters] = {}

    @property
    def channels(self) -> int:
        """How many coefficients there are per input channel and place: 81 for the default settings."""
        pairs = self.scales * (self.scales - 1) // 2 if self.order == 2 else 0
        return 1 + self.scales * self.orientations + pairs * self.orientations**2

    def output_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """The shape of one image's features, given the image's. UsageError: it is no image, or too small for so many scales."""
        if len(shape) != 3 or min(shape) < 1:
            raise UsageError(
                f"scattering is for images (channels, height, width), and an example has shape {tuple(shape)}: leave it out"
            )
        step = 2**self.scales
        if min(shape[1:]) < 2 * step:
            raise UsageError(
                f"scattering with {self.scales} scales needs images of at least {2 * step} x {2 * step}, not {shape[1]} x "
                f"{shape[2]}: use fewer scales"
            )
        return shape[0] * self.channels, -(-shape[1] // step), -(-shape[2] // step)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels * coefficients, height, width): for each input channel, orders 0, 1 and 2 behind each other."""
        shape, step = self.output_shape(x.shape[1:]), 2**self.scales
        height, width = ((size + 2) * step for size in shape[1:])
        images = x.flatten(0, 1)[:, None].float()
        right, below = width - x.shape[3] - step, height - x.shape[2] - step
        padded = F.pad(images, (step, right, step, below), mode="reflect")[:, 0]
        key = height, width, x.device
        if key not in self._filters:
            self._filters[key] = _Filters(height, width, self.scales, self.orientations, x.device)
        return self._coefficients(padded, self._filters[key]).view(len(x), *shape)

    def _coefficients(self, x: Tensor, filters: "_Filters") -> Tensor:
        spectrum = torch.fft.fft2(x)[:, None]
        found, second = [filters.averaged(x[:, None], 0)], []
        for first in range(self.scales):
            envelope = filters.envelope(spectrum, 0, first)
            found.append(filters.averaged(envelope, first))
            if self.order == 2 and first + 1 < self.scales:
                of_envelope = torch.fft.fft2(envelope)[:, :, None]
                for j in range(first + 1, self.scales):
                    again = filters.envelope(of_envelope, first, j).flatten(1, 2)
                    second.append(filters.averaged(again, j))
        return torch.cat(found + second, 1)

    def extra_repr(self) -> str:
        """The settings; `repr` of a feature extractor is part of the key of its cached features."""
        return f"scales={self.scales}, orientations={self.orientations}, order={self.order}"


class _Filters:
    """Wavelets as spectra, and the averaging as two small matrices, for images padded to one size.

    A signal of resolution r has every $2^r$-th pixel of each direction. Wavelets of scale j lower the resolution to j, which
    loses little: an envelope is as smooth as its wavelet.
    """

    def __init__(self, height: int, width: int, scales: int, orientations: int, device: torch.device) -> None:
        self._waves: dict[tuple[int, int], Tensor] = {}
        for j in range(scales):
            angles = [math.pi * k / orientations for k in range(orientations)]
            waves = [morlet(height, width, j, angle, 4 / orientations) for angle in angles]
            for resolution in range(max(1, j)):
                step = 2**resolution
                thinned = np.stack([wave[::step, ::step] * step**2 for wave in waves])
                blocks = _folding(np.fft.fft2(thinned), 2 ** (j - resolution)).astype(np.complex64)
                self._waves[resolution, j] = torch.from_numpy(blocks).to(device)
        self._averages = [
            tuple(torch.from_numpy(_averaging(size, scales, j)).to(device) for size in (height, width))
            for j in range(scales)
        ]

    def envelope(self, spectrum: Tensor, resolution: int, j: int) -> Tensor:
        """|x * psi_j| in all directions, at resolution j, from the spectrum of x at `resolution`."""
        step = 2 ** (j - resolution)
        waves = self._waves[resolution, j]
        if step == 1:
            return _modulus(torch.fft.ifft2(spectrum * waves[0]))
        height, width = waves.shape[-2:]
        # to keep every step-th value is to add up the blocks of the spectrum
        rows = torch.split(spectrum, height, -2)
        blocks = [block for row in rows for block in torch.split(row, width, -1)]
        folded = blocks[0] * waves[0]
        for block, wave in zip(blocks[1:], waves[1:], strict=True):
            folded.addcmul_(block, wave)
        return _modulus(torch.fft.ifft2(folded))

    def averaged(self, x: Tensor, resolution: int) -> Tensor:
        """x * phi every 2^J pixels, without the padding."""
        rows, columns = self._averages[resolution]
        return rows @ (x @ columns.T)


def _modulus(z: Tensor) -> Tensor:
    """`z.abs()` in a sixth of its time: no care for overflow is needed here."""
    return z.real.square().addcmul_(z.imag, z.imag).sqrt_()


def morlet(height: int, width: int, j: int, angle: float, slant: float) -> Wave:
    r"""A Morlet wavelet $e^{-|u|^2_\theta / 2 \sigma^2} (e^{i \xi u_\theta} - K)$ around pixel (0, 0) of a periodic image.

    $\sigma = 0.8 \cdot 2^j$, $\xi = \frac{3 \pi}{4} 2^{-j}$; across its direction it is 1/slant times as
    wide; K makes its sum zero.
    """
    sigma, frequency = 0.8 * 2**j, 3 * math.pi / 4 / 2**j
    wave = np.zeros((height, width), dtype=np.complex128)
    bell = np.zeros((height, width))
    periods = range(-2, 3)  # on each side the bell has vanished there
    for up, aside in product(periods, periods):
        y, x = np.mgrid[:height, :width].astype(np.float64)
        y, x = y + up * height, x + aside * width
        along = x * math.cos(angle) + y * math.sin(angle)
        across = y * math.cos(angle) - x * math.sin(angle)
        here = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
        wave += here * np.exp(1j * frequency * along)
        bell += here
    wave -= bell * (wave.sum() / bell.sum())
    wave *= slant / (2 * math.pi * sigma**2)
    return wave


def _folding(spectra: Wave, step: int) -> Wave:
    """The spectra in step x step blocks, (blocks, directions, height / step, width / step), divided by the number of blocks."""
    count, height, width = spectra.shape
    blocks = spectra.reshape(count, step, height // step, step, width // step).transpose(1, 3, 0, 2, 4)
    folded: Wave = blocks.reshape(step**2, count, height // step, width // step) / step**2
    return folded


def _averaging(size: int, scales: int, resolution: int) -> npt.NDArray[Any]:
    """One direction of phi as a matrix: from a padded line at a resolution to its averages every 2^J pixels."""
    step, sigma = 2**scales, 0.8 * 2 ** (scales - 1)
    places = np.arange(step, size - step, step)[:, None]  # the first and the last are in the padding
    pixels = np.arange(0, size, 2**resolution)[None]
    away = (pixels - places + size / 2) % size - size / 2
    weights = np.exp(-(away**2) / (2 * sigma**2))
    normalised: npt.NDArray[Any] = weights / weights.sum(1, keepdims=True)
    return normalised.astype(np.float32)


@FEATURES.register("scattering")
def normalised_scattering(shape: Sequence[int]) -> nn.Module:
    """Scattering, then every example's coefficients normalised in groups of three (GroupNorm): `--features scattering`."""
    scattering = Scattering()
    channels, _, _ = scattering.output_shape(shape)
    return nn.Sequential(scattering, nn.GroupNorm(channels // 3, channels, affine=False))


class ColourScattering(nn.Module):
    """Scattering of colour images, with channels on one scale: `--features colour-scattering`.

    Red, green and blue become brightness and two differences of colour, which are less alike. Coefficients are averaged over 2 x 2
    places, and of orders 1 and 2 the logarithm is taken. Each channel is then shifted and scaled by its mean and standard deviation over synthetic images
    (overlapping discs of random colours), so no image of anybody is used. Last, every example has mean 0 and variance 1.

    Args:
        shape: of an image, (3, height, width).
    """

    colours: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.scattering = Scattering()
        self.scattering.output_shape(shape)
        if shape[0] != 3:
            raise UsageError(f"colour-scattering is for images of 3 channels, not {shape[0]}: use scattering")
        directions = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]])
        self.register_buffer("colours", directions / directions.norm(dim=1, keepdim=True))
        found = self._coefficients(_discs(64, int(shape[1]), int(shape[2])))
        self.register_buffer("shift", found.mean((0, 2, 3))[:, None, None])
        self.register_buffer("scale", found.std((0, 2, 3))[:, None, None])

    def _coefficients(self, x: Tensor) -> Tensor:
        mixed = torch.einsum("kc,nchw->nkhw", self.colours, x.float())
        found = F.avg_pool2d(self.scattering(mixed), 2, ceil_mode=True)
        found = found.view(len(x), 3, -1, *found.shape[2:])
        return torch.cat([found[:, :, :1], (found[:, :, 1:] + 0.02).log()], 2).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3 * coefficients, height, width)."""
        found = (self._coefficients(x) - self.shift) / self.scale
        return F.layer_norm(found, found.shape[1:])


def _discs(count: int, height: int, width: int) -> Tensor:
    """Images of overlapping discs, whose radii are as in photographs: many small ones, density $r^{-3}$ from 1 to 20 pixels."""
    draw = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width]
    images = np.empty((count, 3, height, width), np.float32)
    for image in images:
        image[:] = draw.uniform()
        for _ in range(400):  # those drawn later cover the earlier ones
            radius = draw.uniform(1 / 400, 1) ** -0.5
            row, column = draw.uniform(-8, height + 8), draw.uniform(-8, width + 8)
            colour = draw.uniform() + 0.15 * draw.normal(size=3)
            image[:, (x - column) ** 2 + (y - row) ** 2 < radius**2] = colour[:, None]
    return torch.from_numpy(images).clamp(0, 1)


FEATURES.register("colour-scattering")(ColourScattering)
