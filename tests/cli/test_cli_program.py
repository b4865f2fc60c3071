"""`dpps` as a program: what it loads, how it ends, and who still listens."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dpps.cli import main


def test_the_package_loads_torch_when_it_is_needed_and_not_before():
    code = (
        "import sys, dpps, dpps.cli\n"
        "assert 'torch' not in sys.modules and 'PartPSP' in dir(dpps) and not hasattr(dpps, 'no_such_thing')\n"
        "assert dpps.topology.Ring is dpps.Ring and dpps.data.load and dpps.__version__ and dpps.privacy.accountant\n"
        "from dpps import *\n"
        "assert all(getattr(dpps, name) is globals()[name] for name in dpps.__all__) and 'torch' in sys.modules\n"
        "import dpps.protocol\n"
        "assert dpps.DPPS is dpps.protocol.DPPS is DPPS"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def as_program(code: str, **settings) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, and then the program with what it left in sys.argv."""
    text = f"import atexit, sys, threading, time\nfrom dpps.__main__ import program\n{code}\nprogram()"
    return subprocess.run(
        [sys.executable, "-c", text], text=True, stderr=subprocess.PIPE, check=False, **settings
    )


@pytest.mark.parametrize(("words", "code"), [(["--version"], 0), (["nonsense"], 2)])
def test_the_program_ends_with_its_code_and_everything_said(words, code):
    done = as_program(f"sys.argv = ['dpps', *{words}]", stdout=subprocess.PIPE)
    assert done.returncode == code
    assert ("torch" in done.stdout) == (code == 0)
    assert ("'nonsense'" in done.stderr) == (code == 2)


def test_the_end_of_the_program_forgets_nobody():
    asked = "sys.argv = ['dpps', '--version']; atexit.register(print, 'asked')"
    assert "asked" in as_program(asked, stdout=subprocess.PIPE).stdout
    busy = "sys.argv = ['dpps', '--version']\nthreading.Thread(target=lambda: (time.sleep(0.5), print('worked'))).start()"
    assert "worked" in as_program(busy, stdout=subprocess.PIPE).stdout


def test_a_listener_who_left_is_no_error_and_does_not_change_the_code():
    stopped = "sys.modules['dpps.cli.main']._dispatch = lambda *_: print('said') or 3"
    for code, expected in (("sys.argv = ['dpps', '--version']", 0), (stopped, 3)):
        read, write = os.pipe()
        os.close(read)
        done = as_program(code, stdout=write, env=os.environ | {"PYTHONUNBUFFERED": ""})
        os.close(write)
        assert (done.returncode, done.stderr) == (expected, "")


def test_closed_streams_are_no_failure():
    for closed in ("stdout", "stderr"):
        done = as_program(f"sys.argv = ['dpps', '--version']; sys.{closed} = None", stdout=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_profiler_gets_its_results():
    command = [sys.executable, "-m", "cProfile", "-m", "dpps", "--version"]
    assert "function calls" in subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("train --data mnist", "dpps.data.load"),
        ("train --features scattering --model linear", "dpps.features.of_data_set"),
        ("plan", "dpps.cli.plan.answer"),
        ("tune --trials 2", "dpps.runs.tuning.tune"),
        ("audit", "dpps.cli.privacy.audit_case"),
        ("attack", "dpps.cli.privacy.reconstruct"),
    ],
)
def test_ctrl_c_is_a_request_to_stop_wherever_it_comes(
    words: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not only between two rounds: while data is fetched, features are computed, noise is solved for."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, interrupted)
    assert main(words.split()) == 3
    assert (
        len(capsys.readouterr().err.splitlines()) <= 2
    )  # what the command announces, and that it has stopped
    assert not list(tmp_path.iterdir())


def test_a_program_that_is_interrupted_ends_with_one_line() -> None:
    words = [sys.executable, "-m", "dpps", "audit", "--samples", "1000000", "--unit", "record"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        assert "audits" in program.stderr.readline()  # it is at work
        program.send_signal(signal.SIGINT)
        said = program.stderr.read()
    assert program.returncode == 3
    assert len(said.splitlines()) == 1, said
