"""Pictures of attacks: what is drawn, and file names that are refused."""

from pathlib import Path

import numpy as np
import pytest

from dpps.audit import check_picture, draw
from dpps.errors import UsageError


def test_lines_of_images_are_drawn_with_their_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    images = list(np.random.default_rng(0).random((3, 4, 4)))
    flat = [np.zeros((4, 4))] * 3  # no range of greys at all
    draw(tmp_path / "lines.svg", [("the truth", images), ("nothing", flat)], ["a", "b", "c"], "a title")
    drawing = (tmp_path / "lines.svg").read_text()
    assert drawing.count("<image ") == 6
    assert all(f"<!-- {text} -->" in drawing for text in ("the truth", "nothing", "a", "b", "c", "a title"))


@pytest.mark.parametrize(("name", "remedy"), [("read.txt", "png or .svg"), ("nowhere/read.png", "nowhere")])
def test_a_wrong_file_name_is_refused_before_anything_is_computed(
    tmp_path: Path, name: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=remedy):
        check_picture(tmp_path / name)
