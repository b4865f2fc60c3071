"""`dpps train`, `dpps resume` and `dpps tune`."""

import logging
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar

from rich.console import Console
from tyro.conf import Positional, arg

from dpps.cli.main import DONE, STOPPED, parse_options, plain_console, stopped_by_signals
from dpps.errors import DppsError, UsageError
from dpps.logs import only_from
from dpps.privacy.accountant import SUM_OF_ROUNDS, label
from dpps.privacy.promise import Privacy
from dpps.privacy.units import UNITS
from dpps.runs import tuning
from dpps.runs.baselines import ALONE, NO_PRIVACY, OWN_EYES, Baseline, compare, gained
from dpps.runs.callbacks import Progress
from dpps.runs.deployment import Deployment, Simulation
from dpps.runs.folder import RunFolder, new_folder
from dpps.runs.from_options import kept_options
from dpps.runs.options import RETIRED, Options, refuse_ignored
from dpps.runs.run import Run
from dpps.runs.summary import DATA, Summary
from dpps.runs.torch_distributed import TorchDistributed
from dpps.tasks import METRICS, TASKS, Estimates
from dpps.transport.cluster import Rendezvous, started_distributed


def train(arguments: list[str]) -> int:
    """Train; results go to a folder."""
    arguments, default = take_config(arguments)
    if "--print-config" in arguments:
        arguments.remove("--print-config")
        print(parse_options(Options, arguments, "dpps train", default).to_toml(), end="")
        return DONE
    options = parse_options(Options, arguments, "dpps train", default)
    refuse_ignored(arguments, options, together=started_distributed())
    return _train_together(options) if started_distributed() else _train(options, Simulation())


def take_config(arguments: list[str]) -> tuple[list[str], Options | None]:
    """--config FILE gives the defaults; options on the command line win."""
    for word in arguments:
        if (name := word.partition("=")[0].removeprefix("--")) in RETIRED and word.startswith("--"):
            raise UsageError(f"--{name} is no longer an option: {RETIRED[name].instead}")
    for k, word in enumerate(arguments):
        name, given, file = word.partition("=")
        if name == "--config":
            before, after = arguments[:k], arguments[k + 1 :]
            if not given and not after:
                raise UsageError("--config needs a file: dpps train --print-config > run.toml writes one")
            file, rest = (file, after) if given else (after[0], after[1:])
            return before + rest, Options.from_toml(Path(file))
    return list(arguments), None


def _train_together(options: Options) -> int:
    """As one of many processes. Each prints about its own nodes; of several on one machine only the first shows a bar."""
    if options.baselines:
        raise UsageError(
            "--baselines in a run of several processes: they would be messages without noise; use them in a simulation "
            "(dpps train by itself)"
        )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        options = replace(options, quiet=True)
    given = {name: getattr(options, name) for name in ("timeout", "seeded_noise")}
    try:
        with TorchDistributed.from_environment(**given) as deployment:
            return _train(options, deployment)
    except DppsError as error:
        raise type(error)(f"rank {Rendezvous.from_environment().rank}: {error}") from error


def _train(options: Options, deployment: Deployment) -> int:
    from dpps.report import write_card

    console = plain_console()
    folder = options.out
    if folder is None and isinstance(deployment, Simulation) and not options.resume:
        folder = new_folder()
    with Progress(console, shown=not options.quiet) as progress:
        run = Run.from_options(options, folder, callbacks=(progress.after_round,), deployment=deployment)
        with stopped_by_signals(run.stop):
            progress.begin(run.start())
            run.fit(progress=False)  # whose bar is up already
        if run.stopped:
            _print_stopped(console, run)
            return STOPPED
        assert run.folder is not None
        write_card(run.folder.path, run.folder.card)
        # the run itself has warned of what there is to warn of; its baselines need not say it again
        with only_from(logging.ERROR, logging.getLogger("dpps")):
            done = not options.baselines or _compare(run, progress)
    private = run.protocol.noise.private
    say_outcome(console, run.summary, run.out, private_noise=private, prefix=deployment.log_prefix)
    if not done:
        console.print("stopped before the baselines were done; the run itself is complete")
    return DONE if done else STOPPED


def _compare(run: Run, progress: Progress) -> bool:
    """The baselines go into the summary; false when somebody asked to stop before they were done."""
    found: dict[str, Baseline] = {}
    for name in (NO_PRIVACY, ALONE):
        baseline = Baseline(run, alone=name == ALONE, callbacks=(progress.after_round,))
        with stopped_by_signals(baseline.stop):
            progress.begin(baseline.start(run.epochs))
            baseline.fit(progress=False)
        if baseline.stopped:
            return False
        found[name] = baseline
    accuracies = {name: baseline.accuracies() for name, baseline in found.items()}
    compared = compare(run, found[NO_PRIVACY], found[ALONE])
    run.write_summary(replace(run.summary, baselines=accuracies, comparisons=compared))
    return True


# When it is over


def say_outcome(
    console: Console, summary: Summary, out: Path | None, *, private_noise: bool, prefix: str = ""
) -> None:
    """Accuracy, metrics, privacy and where the files are; every line begins with the prefix."""

    measured = list(results(summary))
    width = max(9, *(len(what) for what, _ in measured)) + 1

    def say(what: str, words: str) -> None:
        console.print(f"{prefix}{what:<{width}}{words}")

    privacy = summary.privacy
    for what, line in measured:
        say(what, line)
    if privacy.unit == "none":
        say("privacy", "[bold red]none[/]: messages were sent without noise")
    else:
        epsilon = label(float("inf") if privacy.epsilon is None else privacy.epsilon)
        note = "" if UNITS[privacy.unit].has_total else f" ({SUM_OF_ROUNDS})"
        unit = f"delta {privacy.delta:g}, unit {privacy.unit}, {summary.rounds} rounds"
        colluders = summary.config.get("colluders")  # None: nothing rests on the other nodes
        against = "" if colluders is None else f", against {colluders or 'no'} colluders"
        say("privacy", f"[bold]{epsilon}[/]{note}, {unit}{against}")
        for remark in _other_epsilons(privacy):
            say("", remark)
        if not private_noise:
            say(
                "",
                "(simulated, with seeded noise: what a run with --secure-noise would cost; these messages are not private)",
            )
    if summary.comparisons and (lines := gained(summary)):
        for what, line in [*lines, ("", f"({OWN_EYES})")]:
            say(what, line)
    say("files", str(out))


def results(summary: Summary) -> Iterator[tuple[str, str]]:
    """How good the models are."""
    accuracy, own, scores = summary.test_accuracy, summary.own_accuracy, summary.scores or {}
    if accuracy is not None:
        nodes = len(summary.accuracy_by_node)
        yield "accuracy", f"[bold]{accuracy:.2f} %[/] on the test set, mean over {nodes} nodes"
    if own is not None and "own" not in scores:
        yield "accuracy" if accuracy is None else "", f"[bold]{own:.2f} %[/] on each node's own test data"
    for which, found in scores.items():
        yield from _scores(summary, which, found)
    if (
        accuracy is None
        and own is None
        and not (summary.metrics_by_node or scores)
        and summary.config.get("node-data")
    ):
        remedy = "there is no test file (add one, or use --hold-out 0.2)"
        if summary.members:
            remedy = "there is no test file (add one to --node-data, or --hold-out 0.2 to the next plan)"
        yield summary.metric.name, f"not measured: {remedy}"
    for which, metrics in summary.metrics_by_node.items():
        for name, values in metrics.items():
            shown = ", ".join("undefined" if v is None else f"{v:.3f}" for v in values)
            yield name, f"{shown} {DATA[which]}, by node"


def _scores(summary: Summary, which: str, scores: Mapping[str, Estimates]) -> Iterator[tuple[str, str]]:
    """The task's metrics, pooled and as the mean over the nodes."""
    assert summary.task is not None
    for name in TASKS[summary.task].metrics:
        if name not in scores or (name == "accuracy" and which == "test"):
            continue
        metric, found = METRICS[name], scores[name]
        over = f", mean over nodes {metric.interval(found.mean)}" if len(found.by_node) > 1 else ""
        yield name, f"{metric.interval(found.pooled)} {DATA[which]}{over}"


def _other_epsilons(privacy: Privacy) -> Iterator[str]:
    """Those that differ from the epsilon of the guarantee."""
    if privacy.epsilon_replacement not in (None, privacy.epsilon):
        epsilon = label(privacy.epsilon_replacement)
        yield f"{epsilon} for replacing an example by another, instead of by one that teaches nothing"
    if privacy.epsilon_spent not in (None, privacy.epsilon):
        yield f"{label(privacy.epsilon_spent)} spent so far, which is no guarantee: the run ended early"


def _print_stopped(console: Console, run: Run) -> None:
    assert run.out is not None
    done, planned, prefix = run.state.round, run.plan.count, run.deployment.log_prefix
    console.print(
        f"{prefix}stopped after round {done} of {planned}; everything is in {run.out}", markup=False
    )
    started = "torchrun ... -m " if started_distributed() else ""
    console.print(f"{prefix}continue with: {started}dpps resume {shlex.quote(str(run.out))}", markup=False)


# dpps resume


@dataclass(frozen=True)
class ResumeConfig:
    """Continue a run that was stopped or has crashed, from its newest checkpoint.

    The folder holds everything that is needed: options, checkpoint and ledger. The ledger decides what may still be spent.
    For a run of several processes, start them all: torchrun ... -m dpps resume DIR

    Example: dpps resume out/demo
    """

    run: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder of the run, written by dpps train --out."""
    device: Annotated[str | None, arg(metavar="{auto,cpu,cuda,cuda:N}", help_behavior_hint="")] = None
    """Device, if not that of the first start."""
    quiet: bool = False
    """No progress display."""


def resume(arguments: list[str]) -> int:
    """Continue the run in a folder as its options say."""
    config = parse_options(ResumeConfig, arguments, "dpps resume")
    together = started_distributed()
    options = kept_options(config.run, Rendezvous.from_environment().rank if together else None)
    options = replace(options, out=config.run.resolve(), resume=True, overwrite=False)
    options = replace(options, device=config.device or options.device, quiet=config.quiet or options.quiet)
    with _first_directory(config.run):
        return _train_together(options) if together else _train(options, Simulation())


@contextmanager
def _first_directory(out: Path) -> Iterator[None]:
    """Within, the directory is that of the run's first start, which paths in its options are relative to."""
    folders = [RunFolder(path) for path in (out, *sorted(out.glob("rank-*")))]
    kept = next((f.read_settings().get("directory") for f in folders if f.settings.exists()), None)
    if kept is None or not Path(kept).is_dir():  # of an earlier version, or of another machine
        yield
        return
    with chdir(kept):
        yield


# dpps tune


@dataclass(frozen=True)
class TuneConfig(Options):
    """Search batch, epochs, clip and rate for a run, in simulation on public or stand-in data.

    Options that are given are kept. Those left open are tried around what dpps train would use. Trials are scored on
    examples held out of the training data, not on the test set.

    Every trial learns from its data, so tuning on private data costs privacy. It is refused unless --charge pays for it.

    Examples:
      dpps tune --model linear --features scattering --shared all --epsilon 1
      dpps tune --model cnn --shared all --epsilon 3 --trials 20 --clip 1
      dpps tune --node-data site-{rank} --schema s.toml --epsilon 1 --charge
    """

    groups: ClassVar[Mapping[str, str]] = {**Options.groups, "trials": "tune"}
    also: ClassVar[Mapping[str, tuple[str, str]]] = {"--config": Options.also["--config"]}
    unused: ClassVar[frozenset[str]] = frozenset(
        (
            *("overwrite", "resume", "checkpoint_every", "metrics", "baselines", "tensorboard", "quiet"),
            *("timeout", "seeded_noise", "track_real"),
        )
    )

    trials: int = 12
    """Number of settings to try.

    The first is what dpps train would use.
    """
    charge: bool = False
    """Pay for the search with --epsilon: the data is private.

    Every trial gets an equal part of --epsilon and --delta, and scores are noised, so that the whole search costs one example
    --epsilon (unit record). Nothing of it is left for training.
    """


def tune(arguments: list[str]) -> int:
    """Search, and say what to use."""
    arguments, default = take_config(arguments)
    start = TuneConfig(**vars(default)) if default else TuneConfig()
    config = parse_options(TuneConfig, arguments, "dpps tune", default=start)
    if started_distributed():
        raise UsageError("dpps tune is a simulation: run it by itself, not under torchrun")
    options = Options(**{f.name: getattr(config, f.name) for f in fields(Options)})
    refuse_ignored(arguments, options)
    out = config.out or new_folder("tune-")
    console = plain_console()

    def say(what: str, trial: tuning.Trial) -> None:
        tried = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in trial.options.items())
        console.print(f"{what}  {tried}")

    def tell(trial: tuning.Trial) -> None:
        say(f"{trial.accuracy:6.2f} %", trial)

    found = tuning.tune(options, config.trials, out, config.charge, tell)
    say("[bold]best[/]    ", found.best)
    cost = "nothing was charged: true of public or stand-in data only"
    if found.epsilon is not None:
        spent = f"{label(found.epsilon)}, delta {found.delta:g}"
        cost = f"the search cost {spent}; training costs what it costs in addition"
    console.print(f"privacy   {cost}\nfiles     {out}", markup=False)
    return DONE
