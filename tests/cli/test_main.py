"""The command line as a user meets it: what the parser refuses, what is printed, how the program ends."""

import logging
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from tyro.conf import Positional

from dpps.cli import COMMANDS, WRONG, commands, main, parse_options
from dpps.cli.main import log_lines, plain_console
from dpps.errors import UsageError

# What the parser refuses is one line


@dataclass(frozen=True)
class Options:
    """For tests."""

    file: Positional[Path]
    """A file."""
    nodes: int = 10
    """How many."""
    delta: float | None = None
    """A number or nothing."""
    norm: Literal["batch", "group"] = "batch"
    """One of two."""
    quiet: bool = False
    """Say nothing."""


def test_right_words_are_taken():
    found = parse_options(
        Options, ["a.csv", "--nodes", "3", "--quiet"], "dpps x", Options(Path("b"), delta=0.1)
    )
    assert found == Options(Path("a.csv"), 3, 0.1, quiet=True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("a --ndoes 3", "--nodes"),
        ("a --nodes x", "--nodes is 'x'"),
        ("a --delta x", "--delta is 'x'"),
        ("a --norm layer", "'batch', 'group'"),
        ("a --nodes", "--nodes"),
        ("a --quiet 3", " 3: "),
        ("", "PATH"),
    ],
)
def test_wrong_words_are_one_line(words, told, capsys):
    with pytest.raises(UsageError) as caught:
        parse_options(Options, words.split(), "dpps x")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "─" not in str(caught.value)
    assert "---" not in str(caught.value)
    assert "dpps x --help" in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_help_is_printed(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_options(Options, ["--help"], "dpps x")
    assert not caught.value.code
    assert "--nodes" in capsys.readouterr().out


# The command line as a user meets it: every wrong request answered in one useful line, every command explained


NO_CARD = pytest.mark.skipif(
    "__import__('torch').cuda.is_available()", reason="this machine has such a device"
)

REFUSED = [
    ("trian", "'trian'.*'train'"),
    ("train --data mnits", "'mnits'.*'mnist'"),
    ("train --model mpl", "'mpl'.*'mlp'"),
    ("train --topology exq", "'exq'.*'exp'"),
    ("train --topology 20-out", "20"),
    ("train --split dirichelt:1", "dirichlet"),
    ("train --shared layer7", "layer7"),
    ("train --unit recrod", "'recrod'.*'record'"),
    ("train --nodes 1", "--nodes is 1"),
    ("train --nodes 1000 --batch-size 100", "10000.*1000 nodes.*batch 100"),
    ("train --epsilon 0", "epsilon is 0"),
    ("train --epsilon -3", "epsilon is -3"),
    ("train --unit contribution --mechanism gaussian --delta 0", "delta is 0"),
    ("train --unit node-swap --budget -1", "budget is -1"),
    ("train --unit node-swap --sensitivity paper --decay 1", "decay is 1"),
    ("train --model resnet18 --norm batch --nodes 2", "BatchNorm.*--norm group"),
    ("train --weights nowhere.pt", "nowhere.pt"),
    ("train --data mnist --data-dir nowhere", "nowhere"),
    ("train --config nowhere.toml", "nowhere.toml"),
    ("train --config", "--config"),
    ("train --resume --overwrite", "--resume.*--overwrite"),
    ("train --resume --out nothing", "nothing.*--resume"),
    ("train --hold-out 1.5", "--hold-out is 1.5"),
    ("train --dropouts 1.5", "1.5"),
    ("train --epsilon 3 --noise-multiplier 1", "epsilon.*noise.multiplier"),
    ("train --algorithm sgp --epsilon 1", "--epsilon"),
    ("train --unit none --clip 1", "--clip"),
    ("train --unit node-swap --noise-multiplier 3", "--noise-multiplier.*Gaussian"),
    ("train --unit node-swap --mechanism gaussian", "Laplace"),
    ("train --budget 5", "--budget.*Laplace"),
    ("train --unit contribution --budget 5 --noise-rate 0", "--noise-rate is 0"),
    ("train --out /proc/nope", "/proc/nope"),
    ("train --resume", "--resume needs --out"),
    ("plan --epsilon 0", "epsilon is 0"),
    ("plan --rounds 0", "--rounds is 0"),
    ("plan --out x", "--out"),
    ("plan --device cpu", "--device"),
    ("tune --baselines", "--baselines"),
    ("train --timeout 5", "--timeout.*torchrun"),
    ("train --seeded-noise", "--seeded-noise.*torchrun"),
    ("plan --examples 50 --batch-size 100", "--batch-size is 100.* 50 "),
    ("plan --delta 1e-3", "delta is 0.001.*1000 records"),
    ("plan --mechanism laplace", "--mechanism.*contribution"),
    ("train --mechanism laplace", "--mechanism.*contribution"),
    ("train --unit node-swap --epsilon 3", "round [0-9]+"),
    ("train --unit node-swap", "--sync-every 3"),
    ("train --seed -1", "--seed is -1"),
    ("train --device quantum", "device is 'quantum'.*cuda"),
    ("train --device mps", "device is 'mps'.*float64.*cpu"),
    pytest.param("train --device cuda", "device is 'cuda'.*cpu", marks=NO_CARD),
    ("train --delta 0.1", "delta is 0.1"),
    ("train --delta 0.002", "delta is 0.002.*1000 records"),
    ("topology base-0 --nodes 5", "0"),
    ("topology exp --nodes 5 --plot x.bmp", "bmp"),
    ("train --nodes many", "--nodes is 'many'"),
    ("train --unknown-option", "--unknown-option"),
    ("topology", "dpps topology needs"),
    ("train --threads 2", "OMP_NUM_THREADS"),
    ("tune --threads=2", "OMP_NUM_THREADS"),
    ("plan --threads 2", "OMP_NUM_THREADS"),
    ("train --schedule cosine", "--lr-step"),
    ("train --averaging 0.5", "averaging="),
    ("train --join-timeout=900", "300 seconds"),
    ("train --nodes 1000000", "--nodes is 1000000: mnist-mini"),
    ("train --batch-size 3/2", "--batch-size is 1.5"),
    ("report run --out data.csv", ".html"),
    ("audit --samples 10", "1000 or more"),
    ("audit --plot x.png", "--attack"),
    ("audit --thorough --samples 5000", "--thorough"),
    ("audit --unit record --sensitivity paper", "--sensitivity"),
    ("audit --epsilon 0", "above 0"),
    ("attack --attacker 10", "0 to 9"),
    ("attack --rounds 0", "rounds is 0"),
    ("attack --epsilon 0", "above 0"),
    ("attack --epsilon", "--epsilon"),
    ("attack --topology rong", "ring"),
    ("attack --nodes 1", "2 or more"),
    ("attack --nodes 1000", "512 or fewer"),
    ("attack --seed -1", "0 or more"),
    ("attack --plot x.png", "add --images"),
    ("attack --images --plot x.pdf", ".png or .svg"),
    ("attack --images --plot nowhere/x.png", "nowhere"),
    ("plan --local-steps 2", "local_steps"),
    ("plan --algorithm pedfl", "unit record"),
    ("plan --model resnet18 --norm batch", "BatchNorm"),
    ("plan --unit node-swap --mixes 2", "mixes"),
    ("tune --trials 0 --out x", "--trials is 0"),
    ("tune --mixes 0 --out x", "--mixes is 0"),
    ("tune --trials x --out x", "--trials is 'x'"),
    ("tune --epsilon 0 --out x", "epsilon is 0"),
]


@pytest.mark.parametrize(("words", "told"), REFUSED)
def test_a_wrong_request_gets_one_useful_line_and_exit_code_2(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == WRONG
    said = capsys.readouterr().err
    assert re.search(told, said)
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "refused before anything was written"


def test_no_arguments_show_what_to_do_next(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert main(["--version"]) == 0
    assert "torch 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("launch --nproc 4 --out train", "torchrun --nproc-per-node 4 -m dpps train"),
        ("member init --name a --out a", "dpps federation key"),
        ("member show a", "dpps federation show DIR"),
        ("join f/federation.toml --member a --out run", "dpps federation join"),
        ("status run", "dpps federation status"),
        ("leave run", "dpps federation leave"),
        ("secret", "openssl rand -hex 32"),
    ],
)
def test_a_command_that_is_gone_names_what_to_use(words, instead, capsys):
    assert main(words.split()) == WRONG
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert instead in said.err
    assert said.out == ""


# `dpps` as a program: what it loads, how it ends, and who still listens


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


def as_program(code, **settings):
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
def test_ctrl_c_is_a_request_to_stop_wherever_it_comes(words, place, tmp_path, monkeypatch, capsys):
    """Not only between two rounds: while data is fetched, features are computed, noise is solved for."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, interrupted)
    assert main(words.split()) == 3
    assert (
        len(capsys.readouterr().err.splitlines()) <= 2
    )  # what the command announces, and that it has stopped
    assert not list(tmp_path.iterdir())


def test_a_program_that_is_interrupted_ends_with_one_line():
    words = [sys.executable, "-m", "dpps", "audit", "--samples", "1000000", "--unit", "record"]
    # a shell in the background ignores SIGINT, and its children would, too
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, preexec_fn=heard) as program:  # noqa: PLW1509
        assert program.stderr is not None
        assert "audits" in program.stderr.readline()  # it is at work
        program.send_signal(signal.SIGINT)
        said = program.stderr.read()
    assert program.returncode == 3
    assert len(said.splitlines()) == 1, said


# What commands print is what they were given


def test_names_between_colons_are_no_pictures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models_x.py").write_text("def x(shape, classes): raise ValueError('no')\n")
    assert main(["train", "--model", "own_models_x:x", "--quiet"]) == WRONG
    assert "--model own_models_x:x: " in capsys.readouterr().err


def test_long_lines_stay_one_line(capsys):
    plain_console().print("word " * 100)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_log_lines_go_to_the_standard_error_and_leave_no_handler_behind(capsys):
    root, logger = logging.getLogger(), logging.getLogger("dpps.somewhere")
    before = list(root.handlers)
    with log_lines():
        logger.warning("in words")
        with log_lines(logging.Formatter("<%(message)s>")):
            logger.warning("inner")
            logger.info("too low")
        logger.warning("again")
    assert capsys.readouterr().err.splitlines() == ["in words", "<inner>", "again"]
    assert root.handlers == before
    assert main(["--version"]) == 0
    assert root.handlers == before, "a program that calls the command line keeps its own logging"


# What fits on a screen


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (100, 40)])
def test_help_fits_the_screen(columns, lines, capsys, monkeypatch):
    """The overview as a whole, the options of a command by group."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in ([], *(list(words) for words, _ in commands())):
        assert main([*words, "--help"]) == 0
        said = capsys.readouterr().out
        assert max(map(len, said.splitlines())) <= columns, words
        for group in said.split("\n\n") if words else [said]:
            assert len(group.splitlines()) < lines, (words, group)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["federation", "--help"]], ids=" ".join)
def test_help_and_version_do_not_load_torch(words):
    code = f"import sys, dpps.cli\nassert dpps.cli.main({words}) == 0\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
