"""Scattering against a version that is slow and obvious: sums over pixels, no transform."""

import itertools
import math

import numpy as np
import pytest
import torch

from dpps.errors import UsageError
from dpps.features import FEATURES, ColourScattering, Scattering, morlet, normalised_scattering


def circular(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """x * kernel on a periodic image, term by term."""
    out = np.zeros(x.shape, dtype=np.complex128)
    for (row, column), weight in np.ndenumerate(kernel):
        out += weight * np.roll(x, (row, column), axis=(0, 1))
    return out


def gauss(height: int, width: int, sigma: float, step: int) -> np.ndarray:
    """A bell around pixel (0, 0) of a periodic image that has every step-th pixel; its sum is 1."""
    lines = []
    for size in (height, width):
        away = (np.arange(0, size, step) + size / 2) % size - size / 2
        lines.append(np.exp(-(away**2) / (2 * sigma**2)))
    bell = np.outer(*lines)
    return bell / bell.sum()


def slow(image: np.ndarray, scales: int, orientations: int, order: int, thin: bool = True) -> np.ndarray:
    """The definition. thin=False keeps every pixel until the end."""
    step = 2**scales
    ends = [(step, (-(-size // step) + 1) * step - size) for size in image.shape]
    x = np.pad(image, ends, mode="reflect")
    angles = [np.pi * k / orientations for k in range(orientations)]

    def average(u: np.ndarray, resolution: int) -> np.ndarray:
        own = 2**resolution
        smooth = circular(u, gauss(*x.shape, 0.8 * 2 ** (scales - 1), own)).real
        return smooth[:: step // own, :: step // own][1:-1, 1:-1]

    def envelope(u: np.ndarray, resolution: int, j: int, angle: float) -> tuple[np.ndarray, int]:
        own = 2**resolution
        wave = morlet(*x.shape, j, angle, 4 / orientations)[::own, ::own] * own**2
        to = j if thin else resolution
        keep = 2 ** (to - resolution)
        return np.abs(circular(u, wave))[::keep, ::keep], to

    firsts = [(j, *envelope(x, 0, j, angle)) for j in range(scales) for angle in angles]
    found = [average(x, 0), *(average(u, r) for _, u, r in firsts)]
    if order == 2:
        for j1 in range(scales):
            for j2 in range(j1 + 1, scales):
                for (_, u, r), angle in itertools.product([f for f in firsts if f[0] == j1], angles):
                    found.append(average(*envelope(u, r, j2, angle)))
    return np.stack(found)


@pytest.mark.parametrize(
    ("shape", "scales", "orientations", "order"),
    [((12, 12), 2, 3, 2), ((9, 14), 1, 4, 2), ((16, 21), 3, 2, 2), ((11, 8), 2, 4, 1)],
)
def test_equals_the_definition(shape: tuple[int, int], scales: int, orientations: int, order: int) -> None:
    images = np.random.default_rng(3).random((2, 2, *shape))
    module = Scattering(scales, orientations, order)
    out = module(torch.from_numpy(images))
    assert tuple(out.shape[1:]) == module.output_shape((2, *shape))
    for image, features in zip(images, out.numpy(), strict=True):
        expected = np.concatenate([slow(channel, scales, orientations, order) for channel in image])
        np.testing.assert_allclose(features, expected, atol=2e-6)


def test_keeping_fewer_pixels_on_the_way_loses_little() -> None:
    image = np.random.default_rng(5).random((16, 16))
    whole = slow(image, 2, 4, 2, thin=False)
    features = Scattering(2, 4, 2)(torch.from_numpy(image)[None, None])[0].numpy()
    assert np.abs(features - whole).max() < 0.05 * np.abs(whole[1:]).max()


def test_default_settings_give_81_maps_of_7_by_7() -> None:
    module = Scattering()
    assert module.channels == 81
    assert module.output_shape((1, 28, 28)) == (81, 7, 7)
    assert module.output_shape((3, 32, 32)) == (243, 8, 8)


def test_a_constant_image_has_only_its_mean() -> None:
    out = Scattering()(torch.full((1, 1, 20, 24), 0.7))[0]
    torch.testing.assert_close(out[0], torch.full((5, 6), 0.7))
    assert float(out[1:].abs().max()) < 1e-6


def test_a_grating_excites_the_wavelet_of_its_scale_and_direction() -> None:
    across = torch.arange(32.0)
    waves = torch.cos(3 * torch.pi / 8 * across).expand(32, 32)[None, None]  # scale 1, along x
    first = Scattering(2, 8, 1)(waves)[0, 1:].mean((1, 2)).view(2, 8)
    assert divmod(int(first.argmax()), 8) == (1, 0)


def test_images_do_not_mix() -> None:
    x = torch.rand(5, 3, 16, 16)
    module = normalised_scattering((3, 16, 16))
    torch.testing.assert_close(module(x)[2:3], module(x[2:3]))


def test_normalised_in_groups_of_three() -> None:
    out = normalised_scattering((1, 28, 28))(torch.rand(4, 1, 28, 28)).view(4, 27, -1)
    torch.testing.assert_close(out.mean(2), torch.zeros(4, 27), atol=1e-5, rtol=0)
    assert bool((out.std(2) < 1.01).all())
    assert float(out.std(2).max()) > 0.9


def test_nothing_is_trained() -> None:
    assert not list(normalised_scattering((1, 28, 28)).parameters())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Scattering(scales=0), "scales is 0"),
        (lambda: Scattering(orientations=0), "orientations is 0"),
        (lambda: Scattering(order=3), "order is 3"),
        (lambda: normalised_scattering((30,)), "images"),
        (lambda: normalised_scattering((1, 7, 28)), "8 x 8"),
    ],
)
def test_bad_requests_are_refused(make: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()  # type: ignore[operator]


def test_colours_on_one_scale() -> None:
    module = FEATURES["colour-scattering"]((3, 16, 16))
    assert isinstance(module, ColourScattering)
    x = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = module(x)
    assert found.shape == (4, 243, 2, 2)
    torch.testing.assert_close(found.mean((1, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.var((1, 2, 3), correction=0), torch.ones(4), atol=1e-3, rtol=0)
    torch.testing.assert_close(module(x[:1]), found[:1], atol=1e-4, rtol=1e-4)
    grey = x[:, :1].expand(4, 3, 16, 16)  # a grey image has no differences of colour
    raw = module._coefficients(grey)[:, 81:]
    flat = torch.zeros_like(raw).unflatten(1, (2, 81))
    flat[:, :, 1:] = math.log(0.02)
    torch.testing.assert_close(raw, flat.flatten(1, 2), atol=1e-3, rtol=1e-3)


def test_its_constants_come_from_no_data() -> None:
    one, other = ColourScattering((3, 16, 16)), ColourScattering((3, 16, 16))
    assert torch.equal(one.shift, other.shift)
    assert torch.equal(one.scale, other.scale)
    assert not list(one.parameters())
    with pytest.raises(UsageError, match="3 channels"):
        ColourScattering((1, 28, 28))
