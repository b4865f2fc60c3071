"""What every registered data set keeps: a new one is tested by being registered.

The files of those that do not come with the package are looked for in $DPPS_DATA, in tests marked slow.
"""

import hashlib
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from dpps.data import DATA_SETS, load
from dpps.errors import RunError, UsageError

PUBLISHED = [name for name in DATA_SETS.names() if not DATA_SETS[name].embedded]
every_set = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in PUBLISHED else []) for n in DATA_SETS.names()]
)
every_published_set = pytest.mark.parametrize("name", PUBLISHED)


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own, and no address to reach."""

    def refuse(*_: object) -> Path:
        raise AssertionError("nothing may be downloaded here")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("dpps.data.catalog.fetch", refuse)


def folder(name: str) -> Path | None:
    if name not in PUBLISHED:
        return None
    if not os.environ.get("DPPS_DATA"):
        pytest.skip("needs $DPPS_DATA")
    return Path(os.environ["DPPS_DATA"])


@every_set
def test_the_facts_are_those_of_the_files(name: str) -> None:
    recipe, found = DATA_SETS[name], load(name, folder(name), progress=False)
    assert (found.name, found.classes, found.citation) == (name, recipe.classes, recipe.citation)
    assert recipe.citation
    for part in (found.train, found.test):
        assert set(part.labels.tolist()) == set(range(recipe.classes))
        assert part.pixels.dtype == torch.uint8
        inputs = part.inputs(slice(0, 100))
        assert inputs.shape == (100, *part.shape)
        assert torch.isfinite(inputs).all()
        assert torch.equal(part[3][0], inputs[3])
    if recipe.examples is not None:
        assert (len(found.train), tuple(found.train.pixels.shape[1:])) == (recipe.examples, recipe.shape)
        assert found.train.shape == recipe.input_shape


@pytest.mark.parametrize("name", DATA_SETS.names())
def test_it_comes_with_the_package_or_has_verified_sources(name: str) -> None:
    recipe = DATA_SETS[name]
    assert bool(recipe.sources) != bool(recipe.embedded)
    for source in recipe.sources:
        assert source.hash.startswith("sha256:")
        assert len(source.hash) == 7 + 64
        assert len(source.mirrors) > 1, "one address may be gone tomorrow"


def test_every_published_file_has_a_hash_of_its_own() -> None:
    hashes = Counter(source.hash for name in PUBLISHED for source in DATA_SETS[name].sources)
    assert max(hashes.values()) == 1


@every_published_set
def test_a_folder_without_the_files_is_an_error_and_no_download(name: str, tmp_path: Path) -> None:
    for directory in (tmp_path, str(tmp_path)):
        with pytest.raises(UsageError) as caught:
            load(name, directory)
        told = str(caught.value)
        assert str(tmp_path / name) in told
        assert all(file in told for layout in DATA_SETS[name].layouts for file in layout.files)
        assert "\n" not in told


@every_published_set
@pytest.mark.parametrize("content", [b"", b"<html>no such file</html>"])
@pytest.mark.parametrize("ending", ["", ".gz", ".xz"])
def test_a_file_of_something_else_is_refused_by_its_name(
    name: str, content: bytes, ending: str, tmp_path: Path
) -> None:
    for layout in DATA_SETS[name].layouts[:1]:
        for file in layout.files:
            path = tmp_path / name / f"{file}{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with pytest.raises(RunError) as caught:
            load(name, tmp_path)
        assert str(tmp_path / name / layout.train[0]) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
@every_published_set
def test_published_hashes_are_those_of_the_files(name: str) -> None:
    own = folder(name)
    assert own is not None
    for source in DATA_SETS[name].sources:
        file = own / name / source.file
        if not file.exists():
            pytest.skip(f"{file} is not kept as published")
        assert source.hash == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
