"""`dpps train`."""

import dataclasses
import logging
import os
import sys
from pathlib import Path

from rich.console import Console

from dpps.cli import DONE, STOPPED
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.cli.outcome import say_outcome
from dpps.cli.progress import Progress, stopped_by_signals
from dpps.errors import DppsError, UsageError
from dpps.logs import only_from
from dpps.runs.baselines import ALONE, NO_PRIVACY, Baseline, compare
from dpps.runs.config import TrainConfig
from dpps.runs.config_files import RETIRED, from_toml
from dpps.runs.configured import make_run
from dpps.runs.deployment import Deployment, Here
from dpps.runs.options import refuse_idle_training
from dpps.runs.run import Run
from dpps.runs.torch_distributed import TorchDistributed
from dpps.transport.cluster import Rendezvous, started_distributed


def main(arguments: list[str]) -> int:
    """Train as told; results go to a folder."""
    arguments, default = take_config(arguments)
    if "--print-config" in arguments:
        arguments.remove("--print-config")
        print(parse_options(TrainConfig, arguments, "dpps train", default).to_toml(), end="")
        return DONE
    config = parse_options(TrainConfig, arguments, "dpps train", default)
    refuse_idle_training(arguments, config)
    return _train(config, Here()) if not started_distributed() else _train_together(config)


def _train_together(config: TrainConfig) -> int:
    """As one of many processes. Each tells of its own nodes; of several on one machine only the first shows how far it is."""
    if config.baselines:
        raise UsageError(
            "--baselines in a run of several processes: they would be messages without noise; use them in a simulation "
            "(dpps train by itself)"
        )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        config = dataclasses.replace(config, quiet=True)
    options = {name: getattr(config, name) for name in ("timeout", "join_timeout", "seeded_noise")}
    try:
        with TorchDistributed.from_environment(**options) as where:
            return _train(config, where)
    except DppsError as error:
        raise type(error)(f"rank {Rendezvous.from_environment().rank}: {error}") from error


def _train(config: TrainConfig, where: Deployment) -> int:
    console = plain_console()
    with Progress(config, console) as progress:
        config = config.resolved()
        run = make_run(config, (progress.after_round,), where)
        with stopped_by_signals(run):
            run.start(config.epochs)
            progress.begin(run)
            run.fit(config.epochs)
        if run.stopped:
            _say_stopped(console, run)
            return STOPPED
        _write_card(run)
        # the run itself has warned of what there is to warn of; its baselines need not say it again
        with only_from(logging.ERROR, logging.getLogger("dpps")):
            done = not config.baselines or _compare(run, progress)
    private = run.protocol.noise.private
    say_outcome(console, run.told, run.out, private_noise=private, voice=run.where.voice)
    if not done:
        console.print("stopped before the baselines were done; the run itself is complete")
    return DONE if done else STOPPED


def _write_card(run: Run) -> None:
    """What a reader must know before using or passing on the models."""
    from dpps.report import write_card

    assert run.folder is not None
    write_card(run.folder.path, run.folder.card)


def _compare(run: Run, progress: Progress) -> bool:
    """The baselines go into the summary; false when somebody asked to stop before they were done."""
    found: dict[str, Baseline] = {}
    for name in (NO_PRIVACY, ALONE):
        baseline = Baseline(run, alone=name == ALONE, callbacks=(progress.after_round,))
        with stopped_by_signals(baseline):
            baseline.start(run.epochs)
            progress.begin(baseline)
            baseline.fit(run.epochs)
        if baseline.stopped:
            return False
        found[name] = baseline
    assert run.folder is not None
    accuracies = {name: baseline.accuracies() for name, baseline in found.items()}
    compared = compare(run, found[NO_PRIVACY], found[ALONE])
    by_data = {which: {k: v.to_json() for k, v in each.items()} for which, each in compared.items()}
    run.told = {**run.told, "baselines": accuracies, "comparisons": by_data}
    run.folder.write_summary(run.told)
    return True


def take_config(arguments: list[str]) -> tuple[list[str], TrainConfig | None]:
    """--config FILE gives the defaults; options on the command line win."""
    for word in arguments:
        if (name := word.partition("=")[0].removeprefix("--")) in RETIRED and word.startswith("--"):
            raise UsageError(f"--{name} is no longer an option: {RETIRED[name]}")
    for k, word in enumerate(arguments):
        if word == "--config":
            if k + 1 == len(arguments):
                raise UsageError("--config needs a file: dpps train --print-config > run.toml writes one")
            return arguments[:k] + arguments[k + 2 :], from_toml(Path(arguments[k + 1]))
        if word.startswith("--config="):
            return arguments[:k] + arguments[k + 1 :], from_toml(Path(word.removeprefix("--config=")))
    return list(arguments), None


def _say_stopped(console: Console, run: Run) -> None:
    assert run.out is not None
    done, planned, voice = run.state.round, run.plan.count, run.where.voice
    console.print(f"{voice}stopped after round {done} of {planned}; everything is in {run.out}", markup=False)
    again = f"dpps train {_again(run.out)} --resume"
    if started_distributed():
        again = "the same command and --resume, for all processes"
    console.print(f"{voice}go on with: {again}", markup=False)


def _again(folder: Path) -> str:
    import shlex

    words = [w for w in sys.argv[2:] if w not in ("--resume", "--overwrite")]
    return shlex.join(words if "--out" in words else [*words, "--out", str(folder)])
