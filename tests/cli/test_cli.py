"""The command line as a user meets it: every wrong request answered in one useful line, every command explained."""

import pytest

from dpps.cli import COMMANDS, main

WRONG = [
    (["trian"], "'trian'.*'train'"),
    (["train", "--data", "mnits"], "'mnits'.*'mnist'"),
    (["train", "--model", "mpl"], "'mpl'.*'mlp'"),
    (["train", "--topology", "exq"], "'exq'.*'exp'"),
    (["train", "--topology", "20-out"], "20"),
    (["train", "--split", "dirichelt:1"], "dirichlet"),
    (["train", "--split", "dirichlet:-1"], "-1"),
    (["train", "--split", "label:11"], "11"),
    (["train", "--shared", "layer7"], "layer7"),
    (["train", "--unit", "recrod"], "'recrod'.*'record'"),
    (["train", "--nodes", "1"], "--nodes is 1"),
    (["train", "--nodes", "1000", "--batch-size", "100"], "10000.*1000 nodes.*batch 100"),
    (["train", "--epsilon", "0"], "epsilon is 0"),
    (["train", "--epsilon", "-3"], "epsilon is -3"),
    (["train", "--unit", "contribution", "--mechanism", "gaussian", "--delta", "0"], "delta is 0"),
    (["train", "--unit", "node-swap", "--budget", "-1"], "budget is -1"),
    (["train", "--unit", "node-swap", "--sensitivity", "paper", "--decay", "1"], "decay is 1"),
    (["train", "--model", "resnet18", "--nodes", "2"], "BatchNorm.*--norm group"),
    (["train", "--weights", "nowhere.pt"], "nowhere.pt"),
    (["train", "--data", "mnist", "--data-dir", "nowhere"], "nowhere"),
    (["train", "--config", "nowhere.toml"], "nowhere.toml"),
    (["train", "--config"], "--config"),
    (["train", "--resume", "--overwrite"], "--resume.*--overwrite"),
    (["train", "--resume", "--out", "nothing"], "nothing.*--resume"),
    (["train", "--hold-out", "1.5"], "--hold-out is 1.5"),
    (["train", "--dropouts", "1.5"], "1.5"),
    (["train", "--epsilon", "3", "--noise-multiplier", "1"], "epsilon.*noise.multiplier"),
    (["train", "--algorithm", "sgp", "--epsilon", "1"], "--epsilon"),
    (["train", "--unit", "none", "--clip", "1"], "--clip"),
    (["train", "--unit", "node-swap", "--noise-multiplier", "3"], "--noise-multiplier.*Gaussian"),
    (["train", "--unit", "node-swap", "--mechanism", "gaussian"], "Laplace"),
    (["train", "--budget", "5"], "--budget.*Laplace"),
    (["train", "--unit", "contribution", "--budget", "5", "--noise-rate", "0"], "--noise-rate is 0"),
    (["train", "--out", "/proc/nope"], "/proc/nope"),
    (["train", "--resume"], "--resume needs --out"),
    (["plan", "--epsilon", "0"], "epsilon is 0"),
    (["plan", "--rounds", "0"], "--rounds is 0"),
    (["plan", "--examples", "50", "--batch-size", "100"], "--batch-size is 100.* 50 "),
    (["plan", "--delta", "1e-3"], "delta is 0.001.*1000 records"),
    (["plan", "--mechanism", "laplace"], "--mechanism.*contribution"),
    (["train", "--mechanism", "laplace"], "--mechanism.*contribution"),
    (["train", "--unit", "node-swap", "--epsilon", "3"], "round [0-9]+"),
    (["train", "--unit", "node-swap"], "--sync-every 3"),
    (["train", "--seed", "-1"], "--seed is -1"),
    (["train", "--delta", "0.1"], "delta is 0.1"),
    (["train", "--delta", "0.002"], "delta is 0.002.*1000 records"),
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
    assert main(["--version"]) == 0
    assert "torch 2" in capsys.readouterr().out


def test_a_command_that_is_gone_names_what_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    """`dpps launch` was; torchrun starts the processes."""
    assert main(["launch", "--nproc", "4", "--out", "train"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "torchrun --nproc-per-node 4 -m dpps train" in said
    assert main(["train", "--share-metrics"]) == 2
