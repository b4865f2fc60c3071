"""Images read off messages: without noise, and not with it."""

from pathlib import Path

import pytest

from dpps.audit import inversion, invert
from dpps.audit.inversion import picture
from dpps.errors import UsageError
from dpps.noise import events


def test_images_are_read_off_messages_without_noise_and_not_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = {events.laplace: 1 / 0.0629, events.gaussian: 0.954}  # what noise_for finds, in seconds
    monkeypatch.setattr(inversion, "noise_for", lambda *given, **_: solved[given[3]])
    images, probes = invert(images=20, seed=3)
    plain, paper, contribution, record = probes
    assert plain.correlation > 0.999
    assert plain.identified == 20
    assert paper.correlation > 0.6  # the paper's noise blurs the image and does not hide it
    for protected in (contribution, record):
        assert abs(protected.correlation) < 0.2
        assert protected.identified <= 1
    picture(tmp_path / "read.png", images, probes)
    assert (tmp_path / "read.png").stat().st_size > 1_000
    with pytest.raises(UsageError, match="png"):
        picture(tmp_path / "read.txt", images, probes)
    with pytest.raises(UsageError, match=r"5 images: .*10"):
        invert(images=5)
