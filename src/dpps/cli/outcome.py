"""What is said when a run is over: the same lines for one process and for many on one machine."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from dpps.privacy.accountant import SUM_OF_ROUNDS, label
from dpps.privacy.units import UNITS
from dpps.runs.baselines import OWN_EYES, gained
from dpps.runs.folder import RunFolder

_WHERE = {"test": "on the test set", "own": "on its own test data"}


def say_outcome(
    console: Console, told: Mapping[str, Any], out: Path | None, *, private_noise: bool, voice: str = ""
) -> None:
    """Accuracy, metrics, privacy and where the files are.

    Args:
        console: where to print.
        told: as in summary.json.
        out: the run's folder.
        private_noise: whether nobody can know the noise.
        voice: who speaks, before every line.
    """

    def say(what: str, words: str) -> None:
        console.print(f"{voice}{what:<10}{words}")

    privacy = told["privacy"]
    accuracy, own, nodes = told["test_accuracy"], told["own_accuracy"], told["accuracy_by_node"]
    if accuracy is not None:
        say("accuracy", f"[bold]{accuracy:.2f} %[/] on the test set, mean over {len(nodes)} nodes")
    if own is not None:
        say("accuracy" if accuracy is None else "", f"[bold]{own:.2f} %[/] on each node's own test data")
    if accuracy is None and own is None and not told["metrics_by_node"] and told["config"].get("node-data"):
        say(
            "accuracy",
            "not measured: there is no test file (--hold-out 0.2 keeps part of each node's examples back)",
        )
    for which, metrics in told["metrics_by_node"].items():
        for name, values in metrics.items():
            shown = ", ".join("undefined" if v is None else f"{v:.3f}" for v in values)
            console.print(f"{voice}{name:<10}{' ' * (len(name) >= 10)}{shown} {_WHERE[which]}, by node")
    if privacy["unit"] == "none":
        say("privacy", "[bold red]none[/]: messages were sent without noise")
    else:
        epsilon = label(float("inf") if privacy["epsilon"] is None else privacy["epsilon"])
        note = "" if UNITS[privacy["unit"]].has_total else f" ({SUM_OF_ROUNDS})"
        unit = f"delta {privacy['delta']:g}, unit {privacy['unit']}, {told['rounds']} rounds"
        colluders = told["config"].get("colluders")  # None: nothing rests on the other nodes
        against = "" if colluders is None else f", against {colluders or 'no'} colluders"
        say("privacy", f"[bold]{epsilon}[/]{note}, {unit}{against}")
        for remark in _beside(privacy):
            say("", remark)
        if not private_noise:
            say(
                "",
                "(simulated, with seeded noise: what a run with --secure-noise would cost; these messages are not private)",
            )
    if "baselines" in told:
        for what, words in gained(told):
            say(what, words)
        if gained(told):
            say("", f"({OWN_EYES})")
    say("files", str(out))


def _beside(privacy: Mapping[str, Any]) -> Iterator[str]:
    """Other epsilons than that of the guarantee, where they differ from it."""
    other, spent = (privacy.get(f"epsilon_{name}") for name in ("replacement", "spent"))
    if other not in (None, privacy["epsilon"]):
        yield f"{label(other)} for replacing an example by another, instead of by one that teaches nothing"
    if spent not in (None, privacy["epsilon"]):
        yield f"{label(spent)} spent so far, which is no guarantee: the run ended early"


def put_together(out: Path, processes: int) -> dict[str, Any] | None:
    """The summary of all processes, with what each of them measured on data that everybody has; None where one has not finished.

    Only for named data sets, which are public: nobody is told anything that it could not compute of the final models. They lie on
    this machine, so nothing is sent.
    """
    common = RunFolder(out).summary
    files = [RunFolder(out / f"rank-{rank}").summary for rank in range(processes)]
    if not all(file.exists() for file in (common, *files)):
        return None
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    whole: dict[str, Any] = json.loads(common.read_text(encoding="utf-8"))
    by_node, own = (_joined(parts, name) for name in ("accuracy_by_node", "own_accuracy_by_node"))
    sizes = [len(part["accuracy_by_node"]) for part in parts]
    epochs = zip(*(part["accuracy_by_epoch"] for part in parts), strict=True)
    whole |= {
        "test_accuracy": fmean(by_node) if by_node else None,
        "accuracy_by_node": by_node,
        "accuracy_by_epoch": [fmean(epoch, weights=sizes) for epoch in epochs],
        "own_accuracy": fmean(own) if own else None,
        "own_accuracy_by_node": own,
        "metrics_by_node": _metrics([part["metrics_by_node"] for part in parts]),
    }
    RunFolder(out).write_summary(whole)
    return whole


def _joined(parts: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for part in parts for value in part[name]]


def _metrics(parts: Sequence[Mapping[str, Mapping[str, Sequence[float | None]]]]) -> dict[str, Any]:
    """The nodes behind each other, by data and name."""
    return {
        which: {name: [value for part in parts for value in part[which][name]] for name in metrics}
        for which, metrics in parts[0].items()
    }
