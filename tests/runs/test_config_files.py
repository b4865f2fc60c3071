"""Options in files: TOML by the names of the options, JSON as a run keeps them."""

from pathlib import Path

import pytest

from dpps.errors import UsageError
from dpps.runs import Options


def test_what_is_written_is_read(tmp_path: Path) -> None:
    config = Options(nodes=7, data_dir=Path("x"), epsilon=2.0, quiet=True)
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    assert Options.from_toml(file) == config
    assert Options.from_json(config.to_json(), "other") == config


def test_a_configuration_of_own_data_does_not_name_another(tmp_path):
    config = Options(node_data=Path("d/node-{rank}"), classes=2)
    assert 'data = "own data"\n' in config.to_toml()
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    Options.from_toml(file).check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodse = 3", "run.toml.*'nodse'.*'nodes'"),
        ("nodes = 'three'", "run.toml.*nodes.*'three'"),
        ("secure-noise = 'yes'", "secure-noise.*'yes'.*true.*false"),
        ("nodes = true", "nodes.*True"),
        ("weights = 3", "weights.*3.*path"),
        ("nodes = ", "run.toml.*TOML"),
    ],
)
def test_what_is_no_option_or_no_value_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        Options.from_toml(file)


def test_a_file_that_is_not_there_and_options_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--config.*no\.toml"):
        Options.from_toml(tmp_path / "no.toml")
    for found in ({}, {"algorithm": "partpsp"}, {"data": "mnist", "colour": "red"}):
        with pytest.raises(UsageError, match="otherwise"):
            Options.from_json(found, "otherwise")


def test_an_option_of_an_earlier_version_is_dropped_from_a_folder_and_refused_in_a_file(tmp_path):
    """A run that was started with --threads can be opened; a file to write settings in says what to do instead."""
    kept = Options(seed=3).to_json() | {"threads": 2}
    assert Options.from_json(kept, "not options") == Options(seed=3)
    (tmp_path / "old.toml").write_text("threads = 2\n")
    with pytest.raises(UsageError, match="OMP_NUM_THREADS"):
        Options.from_toml(tmp_path / "old.toml")
