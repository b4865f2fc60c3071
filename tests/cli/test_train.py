"""dpps train: what it shows, writes, and goes on with; dpps tune."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from safetensors.numpy import load_file

from dpps.cli import DONE, WRONG, main, say_outcome, stopped_by_signals
from dpps.cli.main import working
from dpps.privacy import SUM_OF_ROUNDS, Charge, NodeSwap, Privacy, Record, total
from dpps.report import read_folder
from dpps.runs import Options, Progress, RoundLog, Trial, Tuning
from tests.support import processes

# What `dpps train` does once the last round is over: a model card, and baselines when asked for


QUICK = ["--nodes", "4", "--epochs", "1", "--batch-size", "500", "--quiet"]


def test_baselines_stand_in_summary_report_and_two_lines(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *QUICK, "--out", str(out), "--baselines"]) == DONE
    shown = capsys.readouterr().out
    assert {"gain", "cost"} <= {line.split(" ")[0] for line in shown.splitlines()}
    from dpps.runs import OWN_EYES

    assert OWN_EYES in shown
    found = json.loads((out / "summary.json").read_text())["baselines"]
    assert set(found) == {"no privacy", "alone"}
    assert len(found["alone"]["accuracy_by_node"]) == 4
    assert read_folder(out, "run").summary.baselines == found
    assert "aseline" not in (out / "model-card.md").read_text()


def test_the_private_run_is_the_same_with_and_without_baselines(tmp_path):
    for name, options in (("plain", []), ("compared", ["--baselines"])):
        assert main(["train", *QUICK, "--out", str(tmp_path / name), *options]) == DONE
    summaries = [json.loads((tmp_path / n / "summary.json").read_text()) for n in ("plain", "compared")]
    assert "baselines" not in summaries[0]
    assert summaries[0]["privacy"] == summaries[1]["privacy"]
    files = [(tmp_path / n / "models" / "node-1.safetensors").read_bytes() for n in ("plain", "compared")]
    assert files[0] == files[1]


def test_baselines_are_refused_where_messages_leave(tmp_path, monkeypatch, capsys):
    options = ["--out", str(tmp_path / "run"), "--baselines"]
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *QUICK, *options]) == WRONG
    assert "--baselines" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# What `dpps train` writes and says: files, units, seeds, splits, and what is whose


def train(out, *options):
    assert main(["train", *QUICK, "--out", str(out), *options]) == 0
    return json.loads((out / "summary.json").read_text())


def test_a_run_writes_the_files_of_the_contract(tmp_path, capsys):
    summary = train(tmp_path / "run", "--track-real")
    shown = capsys.readouterr().out
    assert "accuracy" in shown
    assert "epsilon 3" in shown
    assert str(tmp_path / "run") in shown
    wanted = """test_accuracy accuracy_by_epoch rounds shared_parameters real_sensitivity_mean real_sensitivity_max
        estimated_sensitivity_mean estimated_sensitivity_max rounds_real_above_estimated privacy bytes_sent_per_node
        seconds config versions"""
    assert set(summary) >= set(wanted.split())
    wanted = """unit mechanism epsilon_per_round_max epsilon_sum epsilon_by_node epsilon delta accountant statement simulated
        epsilon_spent epsilon_replacement"""
    assert set(summary["privacy"]) == set(wanted.split())
    assert set(summary["seconds"]) == {"total", "gradients", "protocol", "evaluation"}
    with (tmp_path / "run" / "rounds.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = ["round", "real", "estimated", "used", "scale", "epsilon", "loss", "epsilon_total"]
    assert list(rows[0]) == columns
    assert len(rows) == summary["rounds"] == 5
    assert summary["shared_parameters"] == 7850
    assert [sum(node) for node in summary["split"]] == [2500] * 4


def test_the_epsilon_of_the_summary_follows_from_the_ledger_alone(tmp_path):
    summary = train(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[1:]]
    assert len(lines) == summary["rounds"]
    events = [
        (line["event"]["sampling_probability"], line["event"]["event"]["noise_multiplier"]) for line in lines
    ]
    charges = [Charge.gaussian(noise_multiplier=sigma, sampling=q) for q, sigma in events]
    assert total(charges, 1e-5).epsilon == pytest.approx(summary["privacy"]["epsilon"], abs=1e-3)
    # and by a call of dp-accounting that shares no code with this package
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for q, sigma in events:
        accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)))
    assert accountant.get_epsilon(1e-5) == pytest.approx(summary["privacy"]["epsilon"], abs=1e-3)


@pytest.mark.parametrize(
    ("options", "unit", "words"),
    [
        (["--unit", "node-swap", "--sync-every", "3"], "node-swap", "epsilon 25000"),
        (["--unit", "node-swap", "--sensitivity", "paper"], "node-swap", "measured"),
        (["--unit", "contribution", "--epsilon", "8"], "contribution", "epsilon 8"),
        (["--unit", "contribution", "--mechanism", "gaussian"], "contribution", "epsilon 3"),
        (["--unit", "none"], "none", "No protection"),
        (["--algorithm", "sgp"], "none", "No protection"),
        (
            ["--algorithm", "sgpdp", "--unit", "node-swap", "--sensitivity", "oracle", "--sync-every", "2"],
            "node-swap",
            "measured",
        ),
        (["--algorithm", "pedfl", "--unit", "node-swap", "--budget", "1"], "node-swap", "measured"),
        (["--secure-noise"], "record", "epsilon 3"),
        (["--records-per-user", "2", "--noise-multiplier", "4"], "record", "up to 2"),
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
    assert Options.from_toml(file) == Options(nodes=7)
    summary = train(tmp_path / "run", "--config", str(file), "--nodes", "3")
    assert summary["config"]["nodes"] == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('nodes = "many"', "nodes is 'many'"),
        ("epsilon = true", "epsilon is True"),
        ("quiet = 1", "quiet is 1"),
        ('norm = "bath"', "norm is 'bath'.*'batch'.*'group'"),
        ("out = 3", "out is 3"),
        ("ndoes = 3", "'ndoes'.*'nodes'"),
        ("nodes =", "run.toml.*TOML"),
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


def test_runs_on_own_data_are_called_so(tmp_path):
    for node in range(4):
        folder = tmp_path / f"node-{node}"
        folder.mkdir()
        rows = [f"{k % 3},{k % 5},{k % 2}" for k in range(20)]
        (folder / "train.csv").write_text("\n".join(["a,b,label", *rows]) + "\n")
    options = ["--node-data", str(tmp_path / "node-{rank}"), "--classes", "2", "--batch-size", "10"]
    summary = train(tmp_path / "run", *options)
    assert summary["config"]["data"] == "own data"
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"{tmp_path.name}, mlp, partpsp on 4 nodes" in page  # by the folder that holds the nodes' files
    assert "mnist-mini" not in page


def test_a_second_comparison_does_not_take_the_place_of_the_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        train(tmp_path / name)
    assert main(["report", "a", "b"]) == 0
    first = (tmp_path / "comparison.html").read_bytes()
    assert main(["report", "b", "a"]) == 0
    assert (tmp_path / "comparison.html").read_bytes() == first
    assert (tmp_path / "comparison-2.html").read_bytes() != first


def test_the_share_of_clipped_examples_is_in_the_summary_and_a_useless_clip_is_told(tmp_path, capsys):
    assert 0.01 < train(tmp_path / "a")["clipped_share"] <= 1
    assert train(tmp_path / "b", "--clip", "1e9")["clipped_share"] == 0
    assert "1e+09" in capsys.readouterr().err


def test_the_sum_of_node_swap_is_never_called_a_total(tmp_path, capsys):
    from dpps.privacy import SUM_OF_ROUNDS

    train(tmp_path / "run", "--unit", "node-swap", "--budget", "5", "--sync-every", "2")
    assert SUM_OF_ROUNDS in " ".join(capsys.readouterr().out.split())
    for command in ("plan", "train"):
        assert main([command, "--help"]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert "node-swap" in said
        assert SUM_OF_ROUNDS in said


@pytest.mark.parametrize("unit", ["record", "contribution", "node-swap"])
def test_the_statement_says_what_is_for_the_nodes_own_eyes(tmp_path, unit):
    from dpps.privacy.promise import OWN_EYES

    summary = train(tmp_path / "run", "--unit", unit, "--sync-every", "2")
    assert OWN_EYES in summary["privacy"]["statement"]


# `dpps train` stopped, killed and gone on with: nothing is lost, nothing is overwritten unasked


def test_overwrite_and_resume_are_asked_for(tmp_path, capsys):
    out = tmp_path / "run"
    train(out)
    (out / "mine.txt").write_text("precious")
    assert main(["train", *QUICK, "--out", str(out)]) == 2
    assert "add --resume or --overwrite" in capsys.readouterr().err
    train(out, "--overwrite")
    assert (out / "mine.txt").read_text() == "precious"
    assert main(["train", *QUICK, "--out", str(out), "--resume", "--seed", "9"]) == 2
    assert "(seed)" in capsys.readouterr().err


LONGER = ["--nodes", "4", "--epochs", "4", "--batch-size", "250", "--checkpoint-every", "5", "--quiet"]
LONGER += ["--unit", "node-swap", "--budget", "5", "--sync-every", "5"]


def finish(out, *options):
    """A whole run in a process of its own; what it printed."""
    log = out.with_suffix(".finished")
    process = processes.command(["train", *LONGER, "--out", str(out), *options], log)
    process.join(processes.PATIENCE)
    assert process.exitcode == 0, log.read_text()
    return log.read_text()


def stop(out, number, checkpoints=1):
    """Start a run, signal it when it has so many checkpoints; its exit code and what it printed."""
    log = out.with_suffix(".stopped")
    process = processes.command(["train", *LONGER, "--out", str(out)], log, hold_before=30)
    processes.until(lambda: len(list((out / "checkpoint").glob("round-*"))) >= checkpoints)
    os.kill(process.pid or 0, number)
    process.join(processes.PATIENCE)
    return process.exitcode, log.read_text()


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
        assert "ledger.jsonl" in capsys.readouterr().err
        if damaged is None:
            assert not ledger.exists()  # never started afresh
            ledger.touch()
    ledger.write_bytes(whole)
    assert main(["train", *LONGER, "--out", str(out), "--resume"]) == 0


def test_the_ledger_of_messages_that_left_is_never_deleted(tmp_path):
    train(tmp_path / "run", "--secure-noise")
    train(tmp_path / "run", "--secure-noise", "--overwrite")
    assert len(list((tmp_path / "run").glob("ledger-until-*.jsonl"))) == 1


def same_models(a, b):
    """Bit for bit; what the files say of privacy differs where rounds were repeated, which are charged again."""
    pairs = [[load_file(out / "models" / f"node-{k}.safetensors") for out in (a, b)] for k in range(4)]
    return all(x.keys() == y.keys() and all((x[n] == y[n]).all() for n in x) for x, y in pairs)


def test_sigterm_stops_resumably_kill_loses_nothing_and_a_damaged_checkpoint_is_passed_over(tmp_path):
    whole = tmp_path / "whole"
    finish(whole)
    for number, expected in ((signal.SIGTERM, 3), (signal.SIGKILL, -9)):
        out = tmp_path / number.name
        code, shown = stop(out, number, checkpoints=2)
        assert code == expected
        assert (f"dpps resume {out}" in shown) == (number == signal.SIGTERM)
        if number == signal.SIGKILL:
            newest = max((out / "checkpoint").glob("round-*")) / "tensors.safetensors"
            newest.write_bytes(newest.read_bytes()[:100])
        resumed = finish(out, "--resume")
        assert ("round-000000010" in resumed) == (number == signal.SIGKILL)
        assert same_models(out, whole)
        logs = [
            [line.split(",") for line in (o / "rounds.csv").read_text().splitlines()] for o in (out, whole)
        ]
        assert [line[:7] for line in logs[0]] == [line[:7] for line in logs[1]]
        repeated = logs[0][-1][7] != logs[1][-1][7]  # rounds that were sent again are charged again
        assert repeated == (number == signal.SIGKILL)


def test_resume_needs_nothing_but_the_folder(tmp_path, capsys, monkeypatch):
    """Not the options, and not the directory that relative paths of the first start began in."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    finish(whole)
    code, _ = stop(out, signal.SIGTERM)
    assert code == 3
    settings = json.loads((out / "run.json").read_text())
    assert settings["directory"] == str(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["resume", "../run"]) == 0
    assert Path.cwd() == tmp_path / "elsewhere"
    assert same_models(out, whole)
    assert (out / "rounds.csv").read_text() == (whole / "rounds.csv").read_text()
    capsys.readouterr()
    kept = [out / name for name in ("ledger.jsonl", "rounds.csv", "summary.json", "run.json")]
    before = [path.read_bytes() for path in kept]
    assert main(["resume", "../run"]) == WRONG, "it is finished"
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert [path.read_bytes() for path in kept] == before


def test_resume_as_several_processes(tmp_path, capsys):
    options = ["--nodes", "4", "--epochs", "4", "--batch-size", "250", "--checkpoint-every", "5", "--quiet"]
    out = tmp_path / "run"
    started = processes.Trainers(2, out, *options, "--spare-rounds", "20", "--timeout", "120", hold_before=30)
    started.until(6)
    os.kill(started.all[0].pid or 0, signal.SIGTERM)
    started.let_go()
    assert started.wait() == [3, 3], started.said()
    assert main(["resume", str(out)]) == WRONG
    assert f"torchrun --nproc-per-node 2 -m dpps resume {out}" in capsys.readouterr().err
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*torchrun, "-m", "dpps", "resume", str(out)], env=environment, check=False)
    assert done.returncode == 0
    assert json.loads((out / "summary.json").read_text())["rounds"] == 40


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (None, "run"),
        ({"config": {"model": "Net"}}, "Python"),
        ({"config": {"data": "mnist-mini", "colour": "red"}}, "colour"),
        ({"config": {"data": "mnist-mini"}, "federation": True}, "dpps federation join"),
    ],
)
def test_a_folder_that_cannot_be_resumed_is_one_line(settings, told, tmp_path, capsys):
    out = tmp_path / "run"
    if settings is not None:
        out.mkdir()
        (out / "run.json").write_text(json.dumps(settings))
    assert main(["resume", str(out)]) == WRONG
    said = capsys.readouterr().err
    assert told in said
    assert str(out) in said
    assert len(said.splitlines()) == 1


# The live display, and signals that stop a run after its round


def run(unit, *, simulated=False):
    return SimpleNamespace(
        unit=unit,
        plan=SimpleNamespace(count=10),
        state=SimpleNamespace(round=0),
        protocol=SimpleNamespace(noise=SimpleNamespace(private=not simulated)),
    )


def shown(finished, epsilon, *, terminal=True, quiet=False):
    console = Console(file=StringIO(), force_terminal=terminal, width=150)
    with Progress(console, shown=not quiet) as progress:
        progress.begin(finished)
        for k in range(10):
            log = RoundLog(k, None, None, 2.0, 0.0, None, 0.5, epsilon_total=epsilon if k == 4 else None)
            progress.after_round(finished, log)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("unit", "epsilon", "words"),
    [
        (Record(epsilon=3), 1.5, "epsilon 1.5"),
        (Record(epsilon=3), 1e6, "(no protection)"),
        (NodeSwap(), 1.5, "sum of rounds 1.5"),
        (None, None, "S 2"),
    ],
)
def test_what_was_spent_is_called_what_it_is(unit, epsilon, words):
    said = shown(run(unit), epsilon)
    assert words in said
    assert "loss 0.500" in said
    assert ("epsilon" in said) == isinstance(unit, Record)


@pytest.mark.parametrize("simulated", [True, False])
def test_what_was_spent_on_seeded_noise_is_called_simulated(simulated):
    assert ("simulated" in shown(run(Record(epsilon=3), simulated=simulated), 1.5)) == simulated


@pytest.mark.parametrize("how", [{"terminal": False}, {"quiet": True}])
def test_nothing_is_shown_to_nobody(how):
    assert "loss" not in shown(run(Record(epsilon=3)), 1.0, **how)


def test_a_spinner_only_on_a_terminal():
    quiet = Console(file=StringIO(), force_terminal=False)
    with working(quiet, "solving"):
        pass
    assert quiet.file.getvalue() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_run_and_afterwards_means_what_it_did_before(number):
    before = signal.getsignal(number)
    asked = []
    with stopped_by_signals(lambda: asked.append(True)):
        os.kill(os.getpid(), number)
    assert asked == [True]
    assert signal.getsignal(number) is before


# What is said when a run is over


PRIVACY = Privacy("record", "gaussian", None, None, 2.5, 1e-5, "PLD", "")
SUMMARY = SimpleNamespace(
    test_accuracy=91.234,
    own_accuracy=None,
    accuracy_by_node=[90.0, 92.5],
    metrics_by_node={},
    task="classification",
    scores=None,
    rounds=8,
    config={},
    privacy=PRIVACY,
    comparisons=None,
    baselines=None,
)


def _said(privacy=PRIVACY, config=None, **options):
    text = io.StringIO()
    summary = SimpleNamespace(**vars(SUMMARY) | {"privacy": privacy, "config": config or {}})
    options = {"private_noise": True, **options}
    say_outcome(Console(file=text, width=200, highlight=False), summary, Path("runs/x"), **options)
    return text.getvalue()


def test_accuracy_privacy_and_files():
    said = _said(prefix="rank 0: ")
    assert "rank 0: accuracy  91.23 % " in said
    assert "2 nodes" in said
    assert "epsilon 2.5, delta 1e-05, unit record, 8 rounds\n" in said
    assert " 3 colluders" in _said(config={"trust": "pairs", "colluders": 3})
    assert "no colluders" in _said(config={"trust": "pairs", "colluders": 0})
    assert "runs/x" in said
    assert "--secure-noise" in _said(private_noise=False)


def test_no_noise_and_no_guarantee_are_said_so():
    assert "epsilon" not in _said(replace(PRIVACY, unit="none"))
    assert SUM_OF_ROUNDS in _said(replace(PRIVACY, unit="node-swap", epsilon=None, delta=0.0))


def test_other_epsilons_are_told_where_they_differ_from_the_guarantee():
    said = _said(replace(PRIVACY, epsilon=3.0, epsilon_replacement=7.25, epsilon_spent=1.125))
    assert "7.25" in said
    assert "1.13" in said, "rounded up"
    same = _said(replace(PRIVACY, epsilon=3.0, epsilon_replacement=3.0, epsilon_spent=3.0))
    assert len(same.splitlines()) == len(said.splitlines()) - 2


# `dpps tune`: what is refused, and what is said at the end


def test_a_folder_that_is_not_empty_is_no_place_for_trials(tmp_path, refused):
    (tmp_path / "file").write_text("")
    refused(["tune", "--out", tmp_path], "--out")


def test_the_best_setting_is_said_as_options_with_what_the_search_cost(tmp_path, capsys, monkeypatch):
    best = Trial({"lr_shared": 2.0, "batch_size": 100}, 91.5, None, tmp_path)

    def found(config, trials, out, charge, tell):
        tell(best)
        return Tuning((best,), 1.0 if charge else None, 1e-5)

    monkeypatch.setattr("dpps.runs.tuning.tune", found)
    for options, charged in (([], False), (["--charge"], True)):
        assert main(["tune", *options, "--out", str(tmp_path / "x")]) == 0
        said = capsys.readouterr().out
        assert " 91.50 %  --lr-shared 2.0 --batch-size 100" in said
        assert ("epsilon 1, delta 1e-05" in said) == charged
