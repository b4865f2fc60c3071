"""A search for batch, epochs, clip and rate: short trials in simulation, on public or stand-in data.

Every trial learns from the data, so on private data a search costs privacy,
and so does choosing by accuracies on private examples. When asked to (`charge`),
the search pays for itself by the simplest composition: each of k trials is a run of its own with epsilon / k
and delta / k, noise that nobody knows and a ledger in its folder, and is scored by a count of right answers.
These k counts, and the number of examples held out, get discrete Laplace noise of scale (k + 1) / epsilon,
and are charged to a ledger of the search, all of them before the first one is drawn.
An example is either trained on, or held out for scoring, where it changes each of the k + 1 numbers by at most 1;
so each pays at most epsilon (and delta) for the whole search. That is a promise for one example:
who owns several, or a whole node, is on both sides, so other units are refused.
Whatever is trained afterwards is paid for in addition.

A bound for choosing the best of a *random* number of trials would be less (Liu and Talwar,
"Private Selection from Private Candidates", STOC 2019; Papernot and Steinke,
"Hyperparameter Tuning with Renyi Differential Privacy", ICLR 2022), but only the winner may be looked at
then, and here every trial leaves a folder.
"""

import itertools
import json
import random
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpps.disk import private_folder, write_private
from dpps.errors import UsageError
from dpps.learning.sampling import parse_batch
from dpps.noise.events import laplace
from dpps.noise.sampler import Keystream
from dpps.privacy.ledger import LedgerFile, Release
from dpps.runs.data_ledger import note_ledger
from dpps.runs.folder import RunFolder
from dpps.runs.options import Options
from dpps.runs.run import Run

FACTORS: dict[str, tuple[float, ...]] = {
    "lr_shared": (1, 1 / 3, 3),
    "batch_size": (1, 1 / 2, 2),
    "epochs": (1, 1 / 2, 2),
    "clip": (1, 1 / 4, 4),
}
"""By which the options left open are multiplied; the clip at the same rate x clip,
which is what matters when most examples are clipped."""

HELD_OUT = 0.1
"""Part of each node's training examples that trials are scored on; the test set is not looked at."""


@dataclass(frozen=True)
class Trial:
    """One setting and how it did.

    Attributes:
        options: what was tried.
        accuracy: percent on held-out examples, with noise when the search is charged for.
        epsilon: what this trial cost an example.
        folder: where its run is.
    """

    options: dict[str, Any]
    accuracy: float
    epsilon: float | None
    folder: Path


@dataclass(frozen=True)
class Tuning:
    """All trials, best first, and what they cost together."""

    trials: tuple[Trial, ...]
    epsilon: float | None
    """None: nothing was charged, for the data is public or a stand-in."""
    delta: float | None

    @property
    def best(self) -> Trial:
        """The setting to take."""
        return self.trials[0]

    def to_json(self) -> dict[str, Any]:
        """For tuning.json."""
        found = [{**vars(t), "folder": t.folder.name} for t in self.trials]
        composed = None if self.epsilon is None else "sum of the trials' epsilons and deltas"
        return {"trials": found, "epsilon": self.epsilon, "delta": self.delta, "composition": composed}


def candidates(options: Options, full: Options, trials: int) -> list[dict[str, Any]]:
    """Settings to try, at most so many: first what a run would do anyway, then others around it in an order drawn from the seed. Options that
    the user gave are kept; `full` are the same, resolved."""
    names = [name for name in FACTORS if getattr(options, name) is None and getattr(full, name) is not None]
    if not names:
        raise UsageError(
            "nothing is left to tune: leave at least one of --lr-shared, --batch-size, --epochs, --clip open"
        )
    first, *others = itertools.product(*(FACTORS[name] for name in names))
    random.Random(full.seed).shuffle(others)
    found: list[dict[str, Any]] = []
    for mixture in (first, *others):
        factors = dict(zip(names, mixture, strict=True))
        setting = {name: _scaled(name, getattr(full, name), factor) for name, factor in factors.items()}
        if "lr_shared" in setting and "clip" in setting:
            setting["lr_shared"] = float(f"{setting['lr_shared'] / factors['clip']:.3g}")
        if setting not in found:
            found.append(setting)
    return found[:trials]


def _scaled(name: str, value: Any, factor: float) -> Any:
    """A batch stays within a node's examples: a part stays one, and a number is at most doubled where the default is an eighth."""
    if name == "epochs":
        return max(1, round(value * factor))
    if name != "batch_size":
        return float(f"{value * factor:.3g}")
    batch = parse_batch(value)
    if isinstance(batch, float):
        return f"{min(0.9, batch * factor):.3g}"
    return max(1, round(batch * factor)) if isinstance(batch, int) else str(value)


def tune(
    options: Options,
    trials: int,
    out: Path,
    charge: bool = False,
    after_trial: Callable[[Trial], None] | None = None,
) -> Tuning:
    """Try settings and order them by accuracy.

    Args:
        options: of the run that is tuned for; those left open are searched.
        trials: how many settings.
        out: a new folder for the trials and tuning.json.
        charge: whether the data is private, so that the search has to stay within the epsilon of `options`.
        after_trial: called with every trial when it is done.
    """
    if trials < 1:
        raise UsageError(f"--trials is {trials}: it must be 1 or more")
    if options.node_data is not None and not charge:
        raise UsageError(
            "tuning on --node-data learns from it in every trial, which costs privacy: tune on public or "
            "stand-in data of the same shape, "
            "or give --charge to pay for the search with --epsilon (nothing of it is left for training then)"
        )
    if out.exists() and any(out.iterdir()):
        raise UsageError(f"--out {out} holds something already: choose a new folder")
    full = options.resolve()
    if charge:
        _check_charged(full)
    settings = candidates(options, full, trials)
    full.privacy()  # refuses what no trial could promise, before there is a folder
    private_folder(out)
    done: list[Trial] = []
    examples: int | None = None
    base, scored = full, None
    if charge:
        assert full.epsilon is not None
        scored, count = full.epsilon / (len(settings) + 1), len(settings)
        base = replace(full, epsilon=full.epsilon / count, delta=full.delta / count, secure_noise=True)
    for k, setting in enumerate(settings):
        same_rate = options.lr_local is None and "lr_shared" in setting
        local = {"lr_local": setting["lr_shared"]} if same_rate else {}
        held_out = options.hold_out or HELD_OUT
        trial = replace(base, **setting, **local, hold_out=held_out, quiet=True)
        run = Run.from_options(trial, out / f"trial-{k}").fit(progress=False)
        if examples is None:
            if scored is not None:
                _charge_scores(run, out, len(settings) + 1, scored)
            examples = _noised(sum(_sizes(run)), scored)
        accuracy = min(100.0, max(0.0, 100 * _noised(_right(run), scored) / max(1, examples)))
        done.append(Trial(setting, accuracy, run.privacy.epsilon, out / f"trial-{k}"))
        if after_trial:
            after_trial(done[-1])
    done.sort(key=lambda trial: -trial.accuracy)
    spent = (full.epsilon, full.delta) if charge else (None, None)
    found = Tuning(tuple(done), *spent)
    write_private(out / "tuning.json", json.dumps(found.to_json(), indent=1, default=str).encode())
    return found


def _check_charged(full: Options) -> None:
    """Refuse, before anything is spent, what the promise of a charged search does not hold for."""
    if full.node_data is None:
        raise UsageError("--charge is for private data (--node-data): that of --data is public")
    if not full.per_example or full.records_per_user != 1:
        raise UsageError(
            f"--charge promises something for one example: --unit {full.unit} with --records-per-user "
            f"{full.records_per_user} hides more; use --unit record and --records-per-user 1, or tune on stand-in data"
        )
    if full.epsilon is None:
        raise UsageError("--charge divides --epsilon among the trials: give one")


def _charge_scores(run: Run, out: Path, numbers: int, epsilon: float) -> None:
    """Write down what all noised numbers of the search cost, before there is one, where `dpps ledger` finds it.

    One example changes each of them by at most 1. So all together are a Laplace mechanism of sensitivity `numbers`, whose
    cost is the sum of theirs, in whichever order they are drawn.
    """
    rows = list(run.nodes.rows)
    header = {
        "run": "scores of dpps tune",
        "unit": "record",
        "mechanism": "laplace",
        "rows": rows,
        "durable": True,
        "nonce": secrets.token_hex(16),
    }
    with LedgerFile.create(RunFolder(out).ledger, header, durable=True) as ledger:
        note_ledger(ledger, run, delta=0.0, records_per_user=1, promised=numbers * epsilon)
        cost = laplace(1 / (numbers * epsilon))
        ledger.charge(Release(0, cost, "laplace", float(numbers), 1 / epsilon))


def _sizes(run: Run) -> list[int]:
    return [len(labels) for _, labels in run.held_out]


def _right(run: Run) -> int:
    """How many of the held-out examples the nodes' models get right."""
    return sum(round(p * n / 100) for p, n in zip(run.own_accuracy_by_node, _sizes(run), strict=True))


def _noised(count: int, epsilon: float | None) -> int:
    """A number that one example changes by at most 1, with noise that pays for it; None: as it is."""
    return count if epsilon is None else count + int(Keystream().discrete_laplace(1 / epsilon, 1)[0])
