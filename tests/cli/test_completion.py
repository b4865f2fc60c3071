"""dpps completion: what a shell offers at a place of a command line."""

import shutil
import subprocess

import pytest

from dpps.cli import COMMANDS, DONE, WRONG, main


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(["completion", "bash"]) == DONE
    path = tmp_path_factory.mktemp("completion") / "dpps.bash"
    path.write_text(said.getvalue())
    return path


def offered(script, *words):
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("dpps", *words))
    program = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _dpps; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, check=True, cwd=script.parent
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_and_groups(script):
    assert set(offered(script, "")) == {*COMMANDS, "--help", "--version"}
    assert offered(script, "tr") == ["train"]
    assert set(offered(script, "federation", "")) >= {"key", "create", "join", "show", "--help"}
    assert offered(script, "federation", "k") == ["key"]


def test_options_and_their_values(script):
    assert offered(script, "train", "--noise-") == ["--noise-multiplier", "--noise-rate"]
    assert set(offered(script, "train", "--unit", "")) == {"record", "contribution", "node-swap", "none"}
    assert offered(script, "train", "--unit", "none", "--mo") == ["--model", "--momentum"]
    assert offered(script, "train", "--schedule", "--sch") == ["--schema"], "no option that is gone"
    assert "--out" not in offered(script, "plan", "--")
    assert set(offered(script, "topology", "ri")) == {"ring"}
    assert offered(script, "completion", "b") == ["bash"]


def test_files_complete_paths_and_nothing_else(script):
    (script.parent / "some-run").mkdir(exist_ok=True)
    assert offered(script, "resume", "some") == ["some-run"]
    assert offered(script, "train", "--out", "some") == ["some-run"]
    assert offered(script, "train", "--nodes", "some") == []


def test_a_shell_that_is_not_known_is_refused(capsys):
    assert main(["completion", "fish"]) == WRONG
    assert "'zsh'" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_reads_its_script(capsys):
    assert main(["completion", "zsh"]) == DONE
    subprocess.run(["zsh", "-fc", capsys.readouterr().out], check=True)
