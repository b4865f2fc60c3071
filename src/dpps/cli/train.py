"""`dpps train`."""

import atexit
import dataclasses
import os
import sys
from pathlib import Path

from rich.console import Console

from dpps.cli import DONE, FAILED, STOPPED, WRONG
from dpps.cli.progress import Progress, StopRequested
from dpps.cluster import SECRET, Cluster, Place, started_distributed
from dpps.config import TrainConfig, from_toml, parse_arguments
from dpps.errors import DppsError, UsageError
from dpps.learning import Stopped
from dpps.privacy.accountant import label
from dpps.simulation import Job, prepare
from dpps.site import Process, Site


def main(arguments: list[str]) -> int:
    """Train as told; results go to a folder."""
    arguments, default = _take_config(arguments)
    if "--print-config" in arguments:
        arguments.remove("--print-config")
        print(parse_arguments(arguments, "dpps train", default).to_toml(), end="")
        return DONE
    config = parse_arguments(arguments, "dpps train", default)
    return _train(config, Site()) if not started_distributed() else _train_together(config)


def _train_together(config: TrainConfig) -> int:
    """As one of many processes: only rank 0 speaks, unless something fails."""
    secret = os.environ.get(SECRET, "").encode()
    cluster = Cluster(Place.from_environment(), config.timeout, secret)
    if cluster.rank != 0:
        config = dataclasses.replace(config, quiet=True)
    try:
        return _train(config, Process(cluster.join()))
    except DppsError as error:
        cluster.give_up(error)
        cluster.leave()
        if cluster.stuck:
            atexit.register(os._exit, WRONG if isinstance(error, UsageError) else FAILED)
        raise type(error)(f"rank {cluster.rank}: {error}") from error


def _train(config: TrainConfig, site: Site) -> int:
    console = Console(highlight=False, soft_wrap=True, quiet=not site.speaks)
    stop = StopRequested()
    with Progress(config, console) as progress, stop.listening():
        job = prepare(config, (progress.after_round, stop.after_round), site)
        progress.begin(job)
        try:
            summary = job.run()
        except Stopped:
            _say_stopped(console, job)
            return STOPPED
    _say_done(console, job, summary)
    return DONE


def read_config(arguments: list[str]) -> TrainConfig:
    """The options are those of dpps train: see dpps train --help."""
    arguments, default = _take_config(arguments)
    return parse_arguments(arguments, "dpps train", default)


def _take_config(arguments: list[str]) -> tuple[list[str], TrainConfig | None]:
    """--config FILE gives the defaults; options on the command line win."""
    for k, word in enumerate(arguments):
        if word == "--config":
            if k + 1 == len(arguments):
                raise UsageError("--config needs a file: dpps train --print-config > run.toml writes one")
            return arguments[:k] + arguments[k + 2 :], from_toml(Path(arguments[k + 1]))
        if word.startswith("--config="):
            return arguments[:k] + arguments[k + 1 :], from_toml(Path(word.removeprefix("--config=")))
    return list(arguments), None


def _say_stopped(console: Console, job: Job) -> None:
    done, planned = job.training.learner.state.round, job.training.total_rounds
    console.print(f"stopped after round {done} of {planned}; everything is in {job.folder}")
    again = f"dpps train {_again(job.folder)} --resume"
    if started_distributed():
        again = "the same command and --resume, for all processes"
    console.print(f"go on with: {again}", markup=False)


def _again(folder: Path) -> str:
    import shlex

    words = [w for w in sys.argv[2:] if w not in ("--resume", "--overwrite")]
    return shlex.join(words if "--out" in words else [*words, "--out", str(folder)])


def _say_done(console: Console, job: Job, summary: dict[str, object]) -> None:
    privacy = job.privacy
    accuracy, own = summary["test_accuracy"], summary["own_accuracy"]
    if accuracy is not None:
        console.print(
            f"accuracy  [bold]{accuracy:.2f} %[/] on the test set, mean over {job.config.nodes} nodes"
        )
    if own is not None:
        console.print(f"          [bold]{own:.2f} %[/] on data of each node's own kind")
    if privacy.unit == "none":
        console.print("privacy   [bold red]none[/]: messages were sent without noise")
    else:
        epsilon = label(float("inf") if privacy.epsilon is None else privacy.epsilon)
        console.print(
            f"privacy   [bold]{epsilon}[/], delta {privacy.delta:g}, unit {privacy.unit}, {summary['rounds']} rounds"
        )
        if not job.training.learner.protocol.noise.private:
            console.print(
                "          (seeded noise: what a run with --secure-noise would cost; these messages are not private)"
            )
    console.print(f"files     {job.folder}")
