"""Deployments: where the nodes of a run are. The base class, and the simulation, which has all nodes in
this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpps.errors import RunError, UsageError
from dpps.noise.source import NoiseSource, SecureNoise, Seeded
from dpps.privacy.ledger import LedgerFile
from dpps.runs.folder import RunFolder
from dpps.transport import Fabric, Stacked

if TYPE_CHECKING:
    from dpps.runs.run import Run
    from dpps.runs.summary import Summary

TRACKED = (
    "Also not covered: the real and the watched sensitivities of every round (--track-real), which are "
    "computed of rows without noise."
)


class Deployment(ABC):
    """How a run is carried out. One object serves one run."""

    durable = False
    """Whether every charge must be on disk before its message leaves."""
    processes = 1
    """How many processes the run has."""
    rank: int | None = None
    """Which of several processes this is."""
    log_prefix = ""
    """What this process puts before each line it prints or logs."""
    ledger: type[LedgerFile] = LedgerFile
    """What charges are written with."""
    repeats_rounds = True
    """Whether a process that was killed computes its last rounds again, and so pays for them again."""

    members: tuple[str, ...] = ()
    """Where the nodes are organisations under a contract, the names of all of them. One cannot repeat the run alone."""

    def rows(self, nodes: int) -> range:
        """The nodes held here."""
        return range(nodes)

    def folder(self, out: Path) -> RunFolder:
        """Where this process writes."""
        return RunFolder(out)

    def decide_resume(self, folder: RunFolder | None, resume: bool, overwrite: bool) -> tuple[bool, bool]:
        """Whether a run is resumed and whether one is replaced, as this process carries it out."""
        return resume, overwrite

    @abstractmethod
    def noise(self, secure: bool, seed: int) -> NoiseSource:
        """Where noise comes from."""

    @abstractmethod
    def connect(self, run: Run) -> Fabric:
        """How the nodes reach each other; nothing private has moved yet."""

    def header(self) -> dict[str, Any]:
        """What the ledger's first line says beside the contract; a resumed run must have the same."""
        return {}

    @abstractmethod
    def resume(self, run: Run) -> None:
        """Go on from a checkpoint if that was asked for."""

    def before_round(self, run: Run) -> bool:
        """Called before every round. False: the nodes here take no further part."""
        return True

    def after_round(self, run: Run) -> None:  # noqa: B027 - most have nothing to do
        """A round is complete."""

    def after_last_round(self, run: Run) -> None:  # noqa: B027 - most have nothing to do
        """The last round is complete, and nothing of the results is written yet."""

    def after_results(self, run: Run) -> None:  # noqa: B027 - most have nothing to do
        """The results of all rounds are written: be there for others who still need something."""

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """The run is over, finished or failed: end what goes on beside it."""

    @property
    def preface(self) -> str:
        """What a statement of privacy begins with: where messages left without private noise, that there is none."""
        return ""

    def remarks(self, run: Run) -> list[str]:
        """What it ends with, about the run as it was carried out here."""
        return []

    def summary(self, own: Summary, run: Run) -> Summary | None:
        """The summary of all nodes from that of the nodes here; None where there is none to write."""
        return own


class Simulation(Deployment):
    """All nodes in this process.

    Args:
        fabric: how rows are exchanged, for experiments; by default all rows are one tensor.
    """

    def __init__(self, fabric: Fabric | None = None) -> None:
        self._fabric = fabric

    def noise(self, secure: bool, seed: int) -> NoiseSource:
        """Seeded noise, or the keystream if secure noise is requested."""
        return SecureNoise() if secure else Seeded(seed)

    def connect(self, run: Run) -> Fabric:
        return self._fabric or Stacked(run.topology.nodes)

    def rows(self, nodes: int) -> range:
        return range(nodes) if self._fabric is None else range(len(self._fabric.rows))

    def resume(self, run: Run) -> None:
        """Go on from the newest whole checkpoint.

        Raises:
            RunError: the ledger was replaced, or the remaining rounds cost more than the remaining budget.
        """
        if not run.resumed:
            return
        assert run.folder is not None
        if finished(run):
            raise nothing_left(run, run.folder.path)
        found = run.restore()
        if not run.affords_rest(found):
            folder = run.folder.checkpoints
            where = (
                f"the newest whole checkpoint in {folder}" if found else f"no whole checkpoint in {folder}"
            )
            raise too_dear(run, found, where, "")

    def remarks(self, run: Run) -> list[str]:
        return [TRACKED] if run.protocol.watch else []


def finished(run: Run) -> bool:
    """Whether the folder holds the results of all planned rounds."""
    folder = run.folder
    return (
        folder is not None
        and folder.summary.exists()
        and folder.read_summary().get("rounds", 0) >= run.plan.count
    )


def nothing_left(run: Run, place: Path) -> UsageError:
    """The refusal to go on with a run whose results are there."""
    return UsageError(
        f"the run in {place} is finished ({run.plan.count} of {run.plan.count} rounds), so there is nothing to "
        "continue, and nothing was sent; dpps.load opens its models"
    )


def too_dear(run: Run, position: int, where: str, whose: str) -> RunError:
    """The refusal to go on from a round where what is left to do costs more than what is left to spend."""
    return RunError(
        f"from round {position} ({where}) {run.plan.count - position} rounds are to come, and what is left of the "
        f"budget{whose} does not pay for them; nothing was sent; restore the lost checkpoint, or start a new run in another "
        "folder (with --checkpoint-every, and --spare-rounds for rounds that are repeated; in Python checkpoint_every and spare_rounds)"
    )
