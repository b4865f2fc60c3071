"""How a data set is found and read: the first layout that is whole, and labels that make sense."""

from pathlib import Path

import numpy as np
import pytest

from dpps.data import DATA_SETS, Layout, Recipe, Source
from dpps.errors import RunError

LAYOUTS = (Layout(("a/train",), ("a/test",)), Layout(("train",), ("test",)))


def _recipe(labels: list[int]) -> Recipe:
    found = np.zeros((2, 1, 2, 2), np.uint8), np.array(labels, np.uint8)
    return Recipe(LAYOUTS, lambda files: found, "nobody", classes=3)


def test_the_first_whole_layout_is_taken_plain_or_compressed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/train", "train.gz", "test.xz"):
        (tmp_path / name).touch()
    found = _recipe([0, 1]).find(tmp_path)
    assert found == ((tmp_path / "train.gz",), (tmp_path / "test.xz",))
    (tmp_path / "a" / "test").touch()
    assert _recipe([0, 1]).find(tmp_path) == ((tmp_path / "a/train",), (tmp_path / "a/test",))
    assert _recipe([0, 1]).find(tmp_path / "b") is None


@pytest.mark.parametrize(
    ("labels", "said"), [([0], "2 images, 1 labels"), ([0, 3], r"expected labels 0\.\.2, found 3")]
)
def test_labels_that_make_no_sense_are_refused_with_the_file(
    tmp_path: Path, labels: list[int], said: str
) -> None:
    with pytest.raises(RunError, match=rf"train.*{said}"):
        _recipe(labels).images((tmp_path / "train",))


def test_every_data_set_that_does_not_come_with_the_package_has_verified_sources() -> None:
    for name in DATA_SETS.names():
        recipe = DATA_SETS[name]
        assert bool(recipe.sources) != bool(recipe.embedded), name
        assert all(source.hash.startswith("sha256:") and len(source.mirrors) > 1 for source in recipe.sources)
    assert Source("x.gz", ("https://one/", "https://two"), "").addresses == (
        "https://one/x.gz",
        "https://two/x.gz",
    )
