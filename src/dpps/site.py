"""Where a run happens: all nodes in this process (a simulation), or some of them in one of many processes."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpps.checkpoint import forget_after, whole_rounds
from dpps.cluster import Cluster, restarted
from dpps.config import TrainConfig
from dpps.errors import RunError, UsageError
from dpps.fabric import Distributed, Fabric
from dpps.fabric.distributed import blocks
from dpps.learning.training import Run, Training
from dpps.noise import NoiseSource, Seeded
from dpps.privacy.statement import SIMULATED, Privacy
from dpps.secure import SecureNoise
from dpps.version import __version__

SHARED_METRICS = "accuracies and losses, which the nodes told each other (--share-metrics)"
SEEDED = (
    "No privacy: the noise of this distributed run came from a seed that all processes know (--seeded-noise, for tests), "
    "so everybody can subtract it. With noise of its own at every node it would be: "
)


class Site:
    """All nodes here."""

    durable = False
    """Whether every charge must be on disk before its message leaves."""
    speaks = True
    """Whether this process tells the user how the run goes."""

    def rows(self, config: TrainConfig) -> range:
        """The nodes held here."""
        return range(config.nodes)

    def folder(self, out: Path) -> Path:
        """Where this process writes."""
        return out

    def settle(self, config: TrainConfig, out: Path) -> TrainConfig:
        """The configuration as this process carries it out."""
        return config

    def noise(self, config: TrainConfig) -> NoiseSource:
        """Seeded for simulation, the keystream when asked for."""
        return SecureNoise() if config.secure_noise else Seeded(config.seed)

    def fabric(self, config: TrainConfig, model: nn.Module) -> Fabric | None:
        """How the nodes reach each other; None: they are all here."""
        return None

    def take_up(self, training: Training, config: TrainConfig) -> None:
        """Go on from a checkpoint if that was asked for."""
        if config.resume:
            training.resume()

    def privacy(self, privacy: Privacy, config: TrainConfig) -> Privacy:
        """What can be said about the run as it was carried out here."""
        return privacy

    def network_summary(
        self, summary: dict[str, Any], run: Run, config: TrainConfig
    ) -> dict[str, Any] | None:
        """The summary of all nodes from that of the nodes here; None where there is none to write."""
        return summary


class Process(Site):
    """Some of the nodes, in one of many processes."""

    durable = True

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.speaks = cluster.rank == 0
        self._fabric: Distributed | None = None
        self._asked = self._had_run = False
        self._rounds: list[int] = []

    def rows(self, config: TrainConfig) -> range:
        return blocks(config.nodes, self.cluster.place.size)[self.cluster.rank]

    def folder(self, out: Path) -> Path:
        return out / f"rank-{self.cluster.rank}"

    def settle(self, config: TrainConfig, out: Path) -> TrainConfig:
        """A process that died before it wrote anything starts afresh among others that resume."""
        if config.out is None:
            raise UsageError("a distributed run needs --out DIR: every process writes to DIR/rank-K")
        self._had_run = (self.folder(out) / "run.json").exists()
        self._asked = config.resume or restarted()
        overwrite = config.overwrite and not restarted()
        return replace(config, resume=self._asked and self._had_run, overwrite=overwrite)

    def noise(self, config: TrainConfig) -> NoiseSource:
        return Seeded(config.seed) if config.seeded_noise else SecureNoise()

    def fabric(self, config: TrainConfig, model: nn.Module) -> Distributed:
        """Shake hands with all processes, then agree where the run stands. Nothing private has moved yet."""
        wire = self.cluster.meet(self._facts(config, model))
        self._fabric = Distributed(config.nodes, wire)
        self._agree(self.folder(config.out or Path()), config)
        return self._fabric

    def _facts(self, config: TrainConfig, model: nn.Module) -> dict[str, Any]:
        parameters = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
        start = hashlib.sha256()
        for parameter in model.parameters():
            start.update(parameter.detach().cpu().numpy().tobytes())
        return {
            "version": __version__,
            "processes": self.cluster.place.size,
            "configuration": config.common(),
            "topology": str(config.network()),
            "model": hashlib.sha256(repr(parameters).encode()).hexdigest()[:16],
            "start weights": start.hexdigest()[:16],
            "--checkpoint-every": config.checkpoint_every,
            "--resume": self._asked,
        }

    def _agree(self, folder: Path, config: TrainConfig) -> None:
        """Which checkpoint everybody has; and nobody may have lost what it once paid."""
        ledger = folder / "ledger.jsonl"
        charged = config.resume and ledger.exists() and ledger.read_bytes().count(b"\n") > 1
        had_run, had_charges = self._of_ranks(self._had_run), self._of_ranks(charged)
        if self._asked and not any(had_run) and not restarted():
            raise UsageError(
                f"--resume: no process has a run in {config.out}; leave --resume out to start one"
            )
        lost = [r for r, had in enumerate(had_run) if not had]
        if self._asked and lost and any(had_charges):
            raise RunError(
                f"rank {', '.join(map(str, lost))} has no ledger in {config.out} and the run has sent messages: what it has spent "
                "is not known, so the run cannot go on"
            )
        found = whole_rounds(folder / "checkpoint") if config.resume else []
        newest, older = ([*reversed(found), -1, -1][k] for k in (0, 1))
        everywhere = set.intersection(
            *(set(pair) for pair in zip(self._of_ranks(newest), self._of_ranks(older), strict=True))
        )
        common = max(everywhere - {-1}, default=0)
        if config.resume:
            forget_after(folder / "checkpoint", common)
        self._rounds = [common] if common else []

    def take_up(self, training: Training, config: TrainConfig) -> None:
        for round_ in self._rounds:
            training.resume(at=round_)

    def privacy(self, privacy: Privacy, config: TrainConfig) -> Privacy:
        words = privacy.statement
        if config.share_metrics and privacy.unit != "none":
            words = f"{words} Also not covered: {SHARED_METRICS}."
        if config.seeded_noise and privacy.unit != "none":
            words = SEEDED + words.replace(f"{SIMULATED} ", "")
        return replace(privacy, statement=words)

    def network_summary(
        self, summary: dict[str, Any], run: Run, config: TrainConfig
    ) -> dict[str, Any] | None:
        """Rank 0 writes what everybody may know: with --share-metrics the metrics of all nodes, and always the largest epsilon."""
        assert self._fabric is not None
        metrics = self._metrics(summary, run) if config.share_metrics else _NO_METRICS
        privacy = self._largest(summary["privacy"])
        sent = self._of_ranks(self._fabric.sent_bytes)
        if self.cluster.rank != 0:
            return None
        return {**summary, **metrics, "privacy": privacy, "bytes_sent_by_rank": sent, "split": None}

    def _metrics(self, summary: dict[str, Any], run: Run) -> dict[str, Any]:
        by_node = self._of_nodes(run.accuracy_by_node)
        own = self._of_nodes(run.own_accuracy_by_node)
        by_epoch = [_mean(self._of_nodes([mean] * len(run.local))) for mean in run.accuracy_by_epoch]
        loss = summary["final_loss"]
        return {
            "test_accuracy": _mean(by_node),
            "accuracy_by_node": by_node,
            "accuracy_by_epoch": by_epoch,
            "own_accuracy": _mean(own),
            "own_accuracy_by_node": own,
            "final_loss": _mean(self._of_nodes([] if loss is None else [loss] * len(run.local))),
        }

    def _largest(self, privacy: dict[str, Any]) -> dict[str, Any]:
        """The total of the process that paid most: one that repeated rounds after a crash paid for them twice."""
        if privacy["unit"] == "none":
            return privacy
        result = dict(privacy)
        for name in ("epsilon", "epsilon_sum"):
            totals = self._of_ranks(-1.0 if privacy[name] is None else privacy[name])
            result[name] = None if min(totals) < 0 else max(totals)
            if name == "epsilon" and result[name] != privacy[name]:
                most = totals.index(min(totals) if min(totals) < 0 else max(totals))
                result["statement"] += f" Rank {most} paid most: epsilon {result[name] or math.inf:.4g}."
        return result

    def _of_nodes(self, values: Sequence[float]) -> list[float]:
        """One number per node, of all nodes; none when the nodes here have none (then nobody has)."""
        assert self._fabric is not None
        filled = values if len(values) == len(self._fabric.rows) else [-1.0] * len(self._fabric.rows)
        everybody = self._fabric.gather(torch.tensor(filled, dtype=torch.float64)).tolist()
        return [] if min(everybody) < 0 else everybody

    def _of_ranks(self, value: float) -> list[Any]:
        """One number per process, of all processes."""
        assert self._fabric is not None
        kind = torch.uint8 if isinstance(value, bool) else torch.float64
        everybody = self._fabric.gather(torch.full((len(self._fabric.rows),), value, dtype=kind)).tolist()
        return [everybody[block.start] for block in self._fabric.blocks]


_NO_METRICS: dict[str, Any] = {
    "test_accuracy": None,
    "accuracy_by_node": [],
    "accuracy_by_epoch": [],
    "own_accuracy": None,
    "own_accuracy_by_node": [],
    "final_loss": None,
}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
