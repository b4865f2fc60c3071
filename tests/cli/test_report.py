"""`dpps report`."""

import webbrowser
from pathlib import Path

import pytest

from dpps import cli
from dpps.report import read_folder
from dpps.runs import Options, Run
from tests.support.hospitals import write_hospitals


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    base = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        config = Options(out=base / name, nodes=5, batch_size=250, epochs=1, unit="none", quiet=True)
        Run.from_options(config).fit(1)
    return [base / "one", base / "two"]


def test_command_line(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.chdir(tmp_path)
    one, two = map(str, folders)
    assert cli.main(["report", one]) == cli.DONE
    said = capsys.readouterr().out
    for name in ("report.html", "model-card.md"):
        assert str(folders[0] / name) in said
        assert (folders[0] / name).exists()
    assert opened == []
    assert cli.main(["report", one, two, "--open"]) == cli.DONE
    assert opened == [(tmp_path / "comparison.html").as_uri()]
    assert cli.main(["report", one, "--out", "mine.html"]) == cli.DONE
    assert (tmp_path / "mine.html").exists()
    assert cli.main(["report", one, "--out", "mine.md"]) == cli.DONE
    assert (tmp_path / "mine.md").read_text().startswith("# Model card")


def test_a_comparison_is_not_overwritten(
    folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "comparison.html").write_text("of other runs")
    for name in ("comparison-2.html", "comparison-3.html"):
        assert cli.main(["report", *map(str, folders)]) == cli.DONE
        assert name in capsys.readouterr().out
    assert (tmp_path / "comparison.html").read_text() == "of other runs"


def test_wrong_requests(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "nowhere"]) == cli.WRONG
    assert "run.json" in capsys.readouterr().err
    assert cli.main(["report", *map(str, folders), "--out", "card.md"]) == cli.WRONG
    assert "--out card.md" in capsys.readouterr().err


def test_a_report_does_not_need_the_files_that_the_run_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the directory of `dpps train`, nor the schema, which the folder keeps; the command repeats the options as they were."""
    template = write_hospitals(tmp_path / "there").relative_to(tmp_path / "there")
    monkeypatch.chdir(tmp_path / "there")
    assert cli.main(["data", "describe", "node-2/train.csv", "--label", "diagnosis", "--out", "s.toml"]) == 0
    own = ["--nodes", "3", "--node-data", str(template), "--schema", "s.toml"]
    options = ["--model", "linear", "--shared", "all"]
    assert cli.main(["train", *own, *options, "--quiet", "--out", "run"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cli.main(["report", "../there/run"]) == 0
    (tmp_path / "there" / "s.toml").unlink()
    (tmp_path / "there" / "run").rename(tmp_path / "moved")
    assert cli.main(["report", "../moved"]) == 0
    command = read_folder(tmp_path / "moved", "run").command
    assert command is not None
    assert "--schema s.toml" in command
    assert f"--node-data '{template}'" in command
