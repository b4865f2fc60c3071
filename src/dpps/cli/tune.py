"""`dpps tune`."""

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from dpps.cli import DONE
from dpps.cli.arguments import parse_options
from dpps.cli.console import plain_console
from dpps.cli.train import take_config
from dpps.errors import UsageError
from dpps.privacy.accountant import label
from dpps.runs.config import TrainConfig
from dpps.runs.options import refuse_idle_training
from dpps.runs.tuning import Trial, Tuning, tune
from dpps.transport.cluster import started_distributed


@dataclass(frozen=True)
class TuneConfig(TrainConfig):
    """Search batch, epochs, clip and rate for a run, in simulation on public or stand-in data.

    Takes what dpps train takes; options that are given are kept, those left open are tried around what dpps train would use. Trials are
    scored on examples held out of the training data, not on the test set.

    Every trial learns from its data. Tuning on private data therefore costs privacy: dpps tune refuses it, unless --charge pays for it.

    Examples:
      dpps tune --model linear --features scattering --shared all --epsilon 1     around the rule of docs/recipes.md
      dpps tune --model cnn --shared all --epsilon 3 --trials 20 --clip 1         the clip is kept
      dpps tune --node-data site-{rank} --schema s.toml --epsilon 1 --charge      the search spends epsilon 1 of the data at hand
    """

    trials: int = 12
    """How many settings are tried; the first is what dpps train would use."""
    charge: bool = False
    """The data is private: every trial gets an equal part of --epsilon and --delta, and scores are noised, so that the whole search costs one example --epsilon (unit record)."""


def main(arguments: list[str]) -> int:
    """Search, and say what to use."""
    arguments, default = take_config(arguments)
    start = TuneConfig(**vars(default)) if default else TuneConfig()
    config = parse_options(TuneConfig, arguments, "dpps tune", default=start)
    if started_distributed():
        raise UsageError("dpps tune is a simulation: run it by itself, not under torchrun")
    mine = {f.name: getattr(config, f.name) for f in fields(TrainConfig)}
    train = TrainConfig(**mine)
    refuse_idle_training([a for a in arguments if a.partition("=")[0] not in ("--trials", "--charge")], train)
    out = config.out or Path("runs") / datetime.now(UTC).strftime("tune-%Y%m%d-%H%M%S")
    console = plain_console()
    found = tune(train, config.trials, out, config.charge, lambda trial: console.print(_line(trial)))
    _say(console, found, out)
    return DONE


def _line(trial: Trial) -> str:
    return f"{trial.accuracy:6.2f} %  {_options(trial)}"


def _options(trial: Trial) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in trial.options.items())


def _say(console: Console, found: Tuning, out: Path) -> None:
    console.print(f"[bold]best[/]      {_options(found.best)}")
    if found.epsilon is None:
        console.print("privacy   nothing was charged: true of public or stand-in data only")
    else:
        console.print(
            f"privacy   the search cost {label(found.epsilon)}, delta {found.delta:g}; training costs what it costs in addition"
        )
    console.print(f"files     {out}", markup=False)
