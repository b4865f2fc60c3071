"""The command line as a user meets it: files, exit codes, resuming, and every wrong request answered in one useful line."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpps.cli import COMMANDS, main
from dpps.config import TrainConfig, from_toml
from dpps.privacy.accountant import Charge, total

QUICK = ["--nodes", "4", "--epochs", "1", "--batch-size", "500", "--quiet"]


def train(out: Path, *options: str) -> dict:
    assert main(["train", *QUICK, "--out", str(out), *options]) == 0
    return json.loads((out / "summary.json").read_text())


def test_a_run_writes_the_files_of_the_contract(tmp_path, capsys):
    summary = train(tmp_path / "run", "--track-real")
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "epsilon 3" in shown
    assert str(tmp_path / "run") in shown
    assert set(summary) >= {
        *(
            "test_accuracy",
            "accuracy_by_epoch",
            "rounds",
            "shared_parameters",
            "real_sensitivity_mean",
            "real_sensitivity_max",
        ),
        *(
            "estimated_sensitivity_mean",
            "estimated_sensitivity_max",
            "rounds_real_above_estimated",
            "privacy",
        ),
        *("bytes_sent_per_node", "seconds", "config", "versions"),
    }
    assert set(summary["privacy"]) == {
        *(
            "unit",
            "mechanism",
            "epsilon_per_round_max",
            "epsilon_sum",
            "epsilon",
            "delta",
            "accountant",
            "statement",
        ),
    }
    assert set(summary["seconds"]) == {"total", "gradients", "protocol", "evaluation"}
    with (tmp_path / "run" / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["round", "real", "estimated", "used", "scale", "epsilon", "loss"]
    assert len(rows) == summary["rounds"] == 5
    assert summary["shared_parameters"] == 7850
    assert [sum(node) for node in summary["split"]] == [2500] * 4


def test_the_epsilon_of_the_summary_follows_from_the_ledger_alone(tmp_path):
    summary = train(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert len(lines) == summary["rounds"]
    charges = [
        Charge("gaussian", noise_multiplier=line["noise_multiplier"], sampling=line["sampling"])
        for line in lines
    ]
    assert total(charges, 1e-5).epsilon == pytest.approx(summary["privacy"]["epsilon"], abs=1e-3)
    # and by a call of dp-accounting that shares no code with this package
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for line in lines:
        accountant.compose(PoissonSampledDpEvent(line["sampling"], GaussianDpEvent(line["noise_multiplier"])))
    assert accountant.get_epsilon(1e-5) == pytest.approx(summary["privacy"]["epsilon"], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "unit", "words"),
    [
        (["--unit", "node-swap", "--sync-every", "3"], "node-swap", "no meaningful protection"),
        (["--unit", "node-swap", "--sensitivity", "paper"], "node-swap", "tuned by hand"),
        (["--unit", "contribution", "--epsilon", "8"], "contribution", "must never be published"),
        (["--unit", "contribution", "--mechanism", "gaussian"], "contribution", "epsilon 3"),
        (["--unit", "none"], "none", "without noise"),
        (["--algorithm", "sgp"], "none", "without noise"),
        (
            ["--algorithm", "sgpdp", "--unit", "node-swap", "--sensitivity", "oracle", "--sync-every", "2"],
            "node-swap",
            "measured",
        ),
        (["--algorithm", "pedfl", "--unit", "node-swap", "--budget", "1"], "node-swap", "measured"),
        (["--secure-noise"], "record", "one training example"),
        (["--records-per-user", "2"], "record", "up to 2"),
    ],
)
def test_units_and_algorithms(tmp_path, options, unit, words):
    privacy = train(tmp_path / "run", *options)["privacy"]
    assert privacy["unit"] == unit
    assert words in privacy["statement"]
    assert ("simulation" in privacy["statement"]) == ("--secure-noise" not in options and unit != "none")


def test_seeds_repeat_bit_for_bit(tmp_path):
    models = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        train(tmp_path / name, "--seed", seed)
        models.append((tmp_path / name / "models" / "node-3.safetensors").read_bytes())
    assert models[0] == models[1] != models[2]


def test_splits_and_their_own_held_out_data(tmp_path):
    summary = train(tmp_path / "run", "--split", "label:2", "--batch-size", "100")
    assert all(sum(count > 0 for count in node) == 2 for node in summary["split"])
    assert summary["own_accuracy"] > summary["test_accuracy"]  # what local heads are for


def test_a_configuration_file_gives_defaults_and_the_command_line_wins(tmp_path, capsys):
    file = tmp_path / "run.toml"
    assert main(["train", "--nodes", "7", "--print-config"]) == 0
    file.write_text(capsys.readouterr().out)
    assert from_toml(file) == TrainConfig(nodes=7)
    summary = train(tmp_path / "run", "--config", str(file), "--nodes", "3")
    assert summary["config"]["nodes"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('nodes = "many"', "nodes is 'many': expected int"),
        ("epsilon = true", "epsilon is True: expected float"),
        ("quiet = 1", "quiet is 1: expected bool"),
        ('norm = "bath"', "norm is 'bath': expected 'batch' or 'group'"),
        ("out = 3", "out is 3: expected a path"),
        ("ndoes = 3", "unknown option.*did you mean 'nodes'"),
        ("nodes =", "is not TOML"),
    ],
)
def test_a_wrong_configuration_file_is_refused_by_name(tmp_path, capsys, text, message):
    import re

    file = tmp_path / "run.toml"
    file.write_text(text)
    assert main(["train", "--config", str(file)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_tensorboard_events_are_written_when_asked_for(tmp_path):
    arguments = [
        sys.executable,
        "-m",
        "dpps",
        "train",
        *QUICK,
        "--out",
        str(tmp_path / "run"),
        "--tensorboard",
    ]
    subprocess.run(arguments, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    (events,) = (tmp_path / "run" / "tensorboard").glob("events*")
    content = events.read_bytes()
    assert all(name in content for name in (b"loss", b"sensitivity/used", b"noise/scale"))


def test_overwrite_and_resume_are_asked_for(tmp_path, capsys):
    out = tmp_path / "run"
    train(out)
    (out / "mine.txt").write_text("precious")
    assert main(["train", *QUICK, "--out", str(out)]) == 2
    assert "add --resume or --overwrite" in capsys.readouterr().err
    train(out, "--overwrite")
    assert (out / "mine.txt").read_text() == "precious"
    assert main(["train", *QUICK, "--out", str(out), "--resume", "--seed", "9"]) == 2
    assert "other settings (seed)" in capsys.readouterr().err


LONGER = [
    "--nodes",
    "4",
    "--epochs",
    "12",
    "--batch-size",
    "250",
    "--checkpoint-every",
    "5",
    "--quiet",
    "--unit",
    "node-swap",
    "--budget",
    "5",
    "--sync-every",
    "5",
]


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "dpps", "train", *LONGER, "--out", str(out), *options]


def finish(out: Path, *options: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(out, *options), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def stop(out: Path, number: int, checkpoints: int = 1) -> tuple[int, str]:
    """Start a run, signal it when it has so many checkpoints; its exit code and what it printed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command(out), env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        while len(list((out / "checkpoint").glob("round-*"))) < checkpoints:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        shown, _ = process.communicate()
        return process.returncode, shown


def test_a_lost_or_older_ledger_stops_a_resumed_run(tmp_path, capsys):
    out = tmp_path / "run"
    code, _ = stop(out, signal.SIGTERM)
    assert code == 3
    ledger = out / "ledger.jsonl"
    whole = ledger.read_bytes()
    for damaged in (None, b"".join(whole.splitlines(keepends=True)[:3])):
        ledger.unlink()
        if damaged is not None:
            ledger.write_bytes(damaged)
        assert main(["train", *LONGER, "--out", str(out), "--resume"]) == 1
        assert "what was spent is not known" in capsys.readouterr().err
        if damaged is None:
            assert ledger.exists()  # an empty one was begun; it does not count
    ledger.write_bytes(whole)
    assert main(["train", *LONGER, "--out", str(out), "--resume"]) == 0


def test_the_ledger_of_messages_that_left_is_never_deleted(tmp_path):
    train(tmp_path / "run", "--secure-noise")
    train(tmp_path / "run", "--secure-noise", "--overwrite")
    assert len(list((tmp_path / "run").glob("ledger-until-*.jsonl"))) == 1


def same_models(a: Path, b: Path) -> bool:
    return all(
        (a / "models" / f"node-{k}.safetensors").read_bytes()
        == (b / "models" / f"node-{k}.safetensors").read_bytes()
        for k in range(4)
    )


def test_sigterm_stops_resumably_kill_loses_nothing_and_a_damaged_checkpoint_is_passed_over(tmp_path):
    whole = tmp_path / "whole"
    finish(whole)
    for number, expected in ((signal.SIGTERM, 3), (signal.SIGKILL, -9)):
        out = tmp_path / number.name
        code, shown = stop(out, number, checkpoints=2)
        assert code == expected
        assert ("--resume" in shown) == (number == signal.SIGTERM)
        if number == signal.SIGKILL:
            newest = max((out / "checkpoint").glob("round-*")) / "tensors.safetensors"
            newest.write_bytes(newest.read_bytes()[:100])
        resumed = finish(out, "--resume")
        assert ("is damaged" in resumed.stderr) == (number == signal.SIGKILL)
        assert same_models(out, whole)
        assert (out / "rounds.csv").read_text() == (whole / "rounds.csv").read_text()


WRONG = [
    (["trian"], "unknown command 'trian'.*did you mean 'train'"),
    (["train", "--data", "mnits"], "unknown data set 'mnits'.*did you mean 'mnist'"),
    (["train", "--model", "mpl"], "unknown model 'mpl'.*did you mean 'mlp'"),
    (["train", "--topology", "exq"], "unknown topology 'exq'.*did you mean 'exp'"),
    (["train", "--topology", "20-out"], "20"),
    (["train", "--split", "dirichelt:1"], "dirichlet"),
    (["train", "--split", "dirichlet:-1"], "-1"),
    (["train", "--split", "label:11"], "11"),
    (["train", "--shared", "layer7"], "layer7"),
    (["train", "--unit", "recrod"], "unknown unit 'recrod'.*did you mean 'record'"),
    (["train", "--nodes", "1"], "--nodes is 1"),
    (["train", "--nodes", "1000"], "10000 training examples, fewer than 1000 nodes"),
    (["train", "--epsilon", "0"], "epsilon is 0"),
    (["train", "--epsilon", "-3"], "epsilon is -3"),
    (["train", "--unit", "contribution", "--mechanism", "gaussian", "--delta", "0"], "delta is 0"),
    (["train", "--unit", "node-swap", "--budget", "-1"], "budget is -1"),
    (["train", "--unit", "node-swap", "--sensitivity", "paper", "--decay", "1"], "decay is 1"),
    (["train", "--model", "resnet18", "--nodes", "2"], "BatchNorm.*--norm group"),
    (["train", "--weights", "nowhere.pt"], "nowhere.pt"),
    (["train", "--data", "mnist", "--data-dir", "nowhere"], "nowhere"),
    (["train", "--config", "nowhere.toml"], "nowhere.toml cannot be read"),
    (["train", "--config"], "--config needs a file"),
    (["train", "--resume", "--overwrite"], "exclude each other"),
    (["train", "--resume", "--out", "nothing"], "no run in nothing"),
    (["train", "--hold-out", "1.5"], "--hold-out is 1.5"),
    (["train", "--dropouts", "1.5"], "1.5"),
    (["train", "--epsilon", "3", "--noise-multiplier", "1"], "both was given"),
    (["train", "--algorithm", "sgp", "--epsilon", "1"], "--epsilon has no meaning without noise"),
    (["train", "--unit", "none", "--clip", "1"], "--clip has no meaning without noise"),
    (["train", "--unit", "node-swap", "--noise-multiplier", "3"], "--noise-multiplier belongs to Gaussian"),
    (["train", "--unit", "node-swap", "--mechanism", "gaussian"], "defined with Laplace noise"),
    (["train", "--budget", "5"], "--budget belongs to Laplace"),
    (["train", "--unit", "contribution", "--budget", "5", "--noise-rate", "0"], "--noise-rate is 0"),
    (["train", "--out", "/proc/nope"], "/proc/nope cannot be made"),
    (["train", "--resume"], "--resume needs --out"),
    (["plan", "--epsilon", "0"], "epsilon is 0"),
    (["plan", "--rounds", "0"], "--rounds is 0"),
    (["topology", "base-0", "--nodes", "5"], "0"),
    (["topology", "exp", "--nodes", "5", "--plot", "x.bmp"], "bmp"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_a_wrong_request_gets_one_useful_line_and_exit_code_2(
    arguments, message, capsys, tmp_path, monkeypatch
):
    import re

    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert "Traceback" not in captured.err
    assert not (tmp_path / "runs").exists()  # refused before anything was written


@pytest.mark.parametrize(
    "arguments", [["train", "--nodes", "many"], ["train", "--unknown-option"], ["topology"]]
)
def test_what_the_parser_refuses_is_exit_code_2_too(arguments, capsys):
    assert main(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_no_arguments_show_what_to_do_next(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)
    assert "Start here" in shown
    assert main(["--version"]) == 0
    assert "torch 2" in capsys.readouterr().out


def test_every_module_of_the_command_line_is_a_command():
    import dpps.cli

    modules = {p.stem for p in Path(dpps.cli.__file__).parent.glob("*.py")} - {"__init__", "progress"}
    assert modules == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    assert len(capsys.readouterr().out) > 200


def test_plan_answers_both_ways(capsys):
    assert main(["plan", "--epsilon", "3", "--json"]) == 0
    forward = json.loads(capsys.readouterr().out)
    assert main(["plan", "--noise-multiplier", str(forward["noise_multiplier"]), "--json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert back["epsilon"] == pytest.approx(3, rel=2e-3)
    assert main(["plan", "--unit", "node-swap", "--budget", "5", "--parameters", "7850"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1.897" in shown  # 0.55 (1 + 2 x 0.78 x 0.001 x 7850 / 5)
    assert "no meaningful protection" in shown


def test_topology_reports_and_draws(tmp_path, capsys):
    assert main(["topology", "exp", "--nodes", "10", "--json", "--plot", str(tmp_path / "exp.svg")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        *(
            "nodes",
            "period",
            "degree",
            "doubly_stochastic",
            "connected_within",
            "diameter",
            "contraction",
            "exact_average_after",
        )
    }
    assert (report["period"], report["connected_within"], report["exact_average_after"]) == (4, 4, None)
    assert "<svg" in (tmp_path / "exp.svg").read_text()


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
    assert ("did you mean" in done.stderr or "choose one of" in done.stderr) == (code == 2)


def test_the_program_s_quick_end_forgets_nobody():
    asked = "sys.argv = ['dpps', '--version']; atexit.register(print, 'was asked for')"
    assert "was asked for" in as_program(asked, stdout=subprocess.PIPE).stdout
    busy = "sys.argv = ['dpps', '--version']\nthreading.Thread(target=lambda: (time.sleep(0.5), print('worked'))).start()"
    assert "worked" in as_program(busy, stdout=subprocess.PIPE).stdout


def test_a_listener_who_left_is_no_error_and_does_not_change_the_code():
    stopped = "import dpps.cli\ndpps.cli._dispatch = lambda *_: print('said') or 3"
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


def test_only_the_program_takes_modules_out_of_the_collector_s_sight():
    code = "import gc, sys\nfrom dpps.cli import main\nmain(['topology', 'ring', '--help'], alone=sys.argv[1] == 'alone')\n"
    code += "assert gc.isenabled()\nprint('frozen', gc.get_freeze_count() > 0)"
    for how in ("alone", "guest"):
        done = subprocess.run([sys.executable, "-c", code, how], check=True, capture_output=True, text=True)
        assert f"frozen {how == 'alone'}" in done.stdout
