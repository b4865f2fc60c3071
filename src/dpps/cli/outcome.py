"""What is said when a run is over."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dpps.privacy.accountant import SUM_OF_ROUNDS, label
from dpps.privacy.units import UNITS
from dpps.runs.baselines import OWN_EYES, gained

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
