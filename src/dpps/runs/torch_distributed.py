"""Some of a run's nodes, in one of many processes over torch.distributed."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from dpps.errors import DppsError, RunError, UsageError
from dpps.noise.pairs import IdentityKey, PairKeys
from dpps.noise.source import NoiseSource, SecureNoise, Seeded
from dpps.privacy.ledger import LedgerFile, unused
from dpps.privacy.partners import Pairs
from dpps.privacy.promise import Privacy
from dpps.runs.deployment import Deployment, finished, nothing_left, too_dear
from dpps.runs.folder import RunFolder, set_aside_after, whole_rounds
from dpps.runs.summary import Summary, weights_of
from dpps.transport import Distributed
from dpps.transport.cluster import SECRET, Cluster, Rendezvous, read_secret, restarted
from dpps.transport.distributed import blocks
from dpps.version import __version__

if TYPE_CHECKING:
    from dpps.runs.run import Run

log = logging.getLogger(__name__)

JOINING = 300.0
"""Seconds to wait at the start until all processes are there, at least; longer if the timeout is."""
SEEDED = (
    "No privacy: the noise of this distributed run came from a seed that all processes know (--seeded-noise, for tests), "
    "so everybody can subtract it. With noise of its own at every node it would be:"
)


class TorchDistributed(Deployment):
    """Some of the nodes, in one of several processes started by torchrun or by the user.

    Args:
        cluster: the connected processes.
        seeded_noise: take noise and sampling from the seed, as in a simulation. For tests: nothing is
            private then.
    """

    durable = True

    def __init__(self, cluster: Cluster, *, seeded_noise: bool = False) -> None:
        self.cluster, self.seeded_noise = cluster, seeded_noise
        self.log_prefix = f"rank {cluster.rank}: "
        self.processes, self.rank = cluster.rendezvous.size, cluster.rank
        self._fabric: Distributed | None = None
        self._asked = self._had_run = False
        self._sent: list[int] = []
        self._began: list[int] = []

    @classmethod
    def from_environment(cls, *, timeout: float = 60.0, seeded_noise: bool = False) -> Self:
        """Connect to the other processes that torchrun started.

        Use it in a `with` statement, so that the other processes are told at once if this one fails:
        `with TorchDistributed.from_environment() as deployment: Run(..., deployment=deployment).fit(epochs=5)`.

        Args:
            timeout: seconds after which a dead or hung process is noticed. Must be longer than the longest
                round.
            seeded_noise: as in the constructor.
        """
        cluster = Cluster(Rendezvous.from_environment(), timeout, read_secret(), max(JOINING, timeout))
        try:
            return cls(cluster.join(), seeded_noise=seeded_noise)
        except DppsError as error:
            cluster.give_up(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self.cluster.give_up(error)

    def rows(self, nodes: int) -> range:
        return blocks(nodes, self.cluster.rendezvous.size)[self.cluster.rank]

    def folder(self, out: Path) -> RunFolder:
        return RunFolder(out / f"rank-{self.cluster.rank}")

    def decide_resume(self, folder: RunFolder | None, resume: bool, overwrite: bool) -> tuple[bool, bool]:
        """A process that died before it wrote anything starts afresh among others that resume."""
        if folder is None:
            raise UsageError(
                "a distributed run needs --out DIR (in Python folder=DIR): every process writes to DIR/rank-K"
            )
        self._had_run = folder.settings.exists()
        self._asked = self._asked or resume or restarted()
        return self._asked and self._had_run, overwrite and not restarted()

    def noise(self, secure: bool, seed: int) -> NoiseSource:
        self._source = SecureNoise()
        return Seeded(seed) if self.seeded_noise else self._source

    def connect(self, run: Run) -> Distributed:
        """Shake hands with all processes, then agree where the run stands."""
        identity = self._identity(run)
        wire = self.cluster.meet(self._facts(run))
        self._fabric = Distributed(run.topology.nodes, wire)
        self._agree(run)
        if identity is not None:
            self._source.pair_keys = self._pair_keys(identity, run, self._fabric)
        return self._fabric

    def _identity(self, run: Run) -> IdentityKey | None:
        """The key that makes this process a partner, where the run has partners; its public half is said in the handshake."""
        if run.unit is None or not isinstance(run.unit.trust, Pairs) or self.seeded_noise:
            return None
        if not self.cluster.secret:
            raise UsageError(
                f"--trust pairs: without ${SECRET} nobody knows whose keys are whose; set the same secret "
                "for all processes (openssl rand -hex 32 makes one)"
            )
        assert run.folder is not None
        identity = IdentityKey.kept_in(run.folder.identity)
        self.cluster.public_key = identity.public
        return identity

    def _pair_keys(self, identity: IdentityKey, run: Run, fabric: Distributed) -> PairKeys:
        """Of this start: its number holds fresh random bits of this process, so no key was ever used before."""
        publics = [
            key for key, rows in zip(self.cluster.public_keys, fabric.blocks, strict=True) for _ in rows
        ]
        return PairKeys(identity, publics, run.description.fingerprint, self.cluster.attempt)

    def header(self) -> dict[str, Any]:
        """Whose keys they are cannot change during a run."""
        keys = self._source.pair_keys
        return {} if keys is None else {"public_keys": keys.publics}

    def _facts(self, run: Run) -> dict[str, Any]:
        partners = None if run.unit is None else run.unit.trust.partners(run.topology.nodes)
        return {
            "version": __version__,
            "processes": self.cluster.rendezvous.size,
            "configuration": run.description.common,
            "weights of the topology": weights_of(run.topology),
            **run.description.model,
            "partners": None if partners is None else partners.to_json(),
            "--checkpoint-every": run.checkpoint_every,
            "--resume": self._asked,
        }

    def _agree(self, run: Run) -> None:
        """Whether there is something to resume; and nobody may have lost what it once paid."""
        assert run.folder is not None
        ledger, out = run.folder.ledger, run.folder.path.parent
        had_run = self._of_ranks(self._had_run)
        had_ledger = self._of_ranks(ledger.exists())
        had_charges = self._of_ranks(run.resumed and not unused(ledger))
        if self._asked and not any(had_run) and not restarted():
            raise UsageError(f"--resume: no process has a run in {out}; leave --resume out to start one")
        lost = [r for r, had in enumerate(zip(had_run, had_ledger, strict=True)) if not all(had)]
        if self._asked and lost and any(had_charges):
            raise RunError(
                f"rank {_listed(lost)} has no ledger in {out} and the run has sent messages: what it has spent "
                "is not known, so the run cannot go on"
            )

    def resume(self, run: Run) -> None:
        """Go on from the newest checkpoint that everybody has. Nothing is renamed before everybody has agreed."""
        assert run.folder is not None
        ledger = run.ledger
        if isinstance(ledger, LedgerFile):
            self._compare_received(ledger)
        if self._asked:
            if all(self._of_ranks(finished(run))):
                raise nothing_left(run, run.folder.path.parent)
            folder = run.folder.checkpoints
            common = self._common_checkpoint(run, folder)
            set_aside_after(folder, common)
            if common:
                run.restore(at=common)
        self._began = list(self._sent)
        if self._fabric is not None:
            self._fabric.heard.clear()

    def _compare_received(self, ledger: LedgerFile) -> None:
        """A ledger that lacks messages which another process has received was replaced by an older one."""
        sent = self._of_ranks(ledger.messages)
        for rank, own in enumerate(sent):
            received = self._of_ranks(ledger.received[rank])
            if max(received) > own:
                witness = received.index(max(received))
                raise RunError(
                    f"the ledger of rank {rank} has {own:.0f} messages and rank {witness} knows of "
                    f"{max(received):.0f}: it was replaced by "
                    f"an older copy, so what rank {rank} has spent is not known; restore it, or start a new "
                    "run in another folder; "
                    "nothing was sent"
                )
        self._sent = [int(own) for own in sent]

    def after_round(self, run: Run) -> None:
        """Note what has arrived from whom. All processes charge the same rounds,
        so the others' ledgers grow as the own one does."""
        assert self._fabric is not None
        heard, ledger = self._fabric.heard, run.ledger
        if not isinstance(ledger, LedgerFile):
            return
        more = ledger.messages - self._began[self.cluster.rank]
        for rank in heard:
            ledger.received[rank] = self._began[rank] + more
        heard.clear()

    def _common_checkpoint(self, run: Run, folder: Path) -> int:
        """The newest round of which everybody has a checkpoint, 0 for none; who lacks it is logged."""
        newest, older = ([*reversed(whole_rounds(folder)), 0, 0][k] for k in (0, 1))
        found = [
            {int(round_) for round_ in pair}
            for pair in zip(self._of_ranks(newest), self._of_ranks(older), strict=True)
        ]
        common, last = max(set.intersection(*found), default=0), max(set.union(*found))
        lacking = [rank for rank, rounds in enumerate(found) if last not in rounds]
        where = "no process has a whole checkpoint"
        if last:
            without = f"rank {_listed(lacking)} has no whole checkpoint of round {last}"
            where = without if lacking else "the newest checkpoint"
        poor = [r for r, ok in enumerate(self._of_ranks(run.affords_rest(common))) if not ok]
        if poor:
            raise too_dear(run, common, where, f" of rank {_listed(poor)}")
        if lacking:
            log.warning("everybody goes on from round %d: %s", common, where)
        return common

    @property
    def preface(self) -> str:
        return SEEDED if self.seeded_noise else ""

    def summary(self, own: Summary, run: Run) -> Summary | None:
        """Rank 0 writes what everybody may know: the largest epsilon, and nothing that was measured without noise."""
        assert self._fabric is not None
        privacy = self._largest(own.privacy)
        sent = self._of_ranks(self._fabric.sent_bytes)
        if self.cluster.rank != 0:
            return None
        return replace(
            own,
            test_accuracy=None,
            accuracy_by_node=[],
            accuracy_by_epoch=[],
            own_accuracy=None,
            own_accuracy_by_node=[],
            held_out_examples=None,  # how many each process held out depends on its data
            metrics_by_node={},
            metrics_by_epoch=[],
            scores=None,
            comparisons=None,
            by_class={},
            update_to_noise=None,
            final_loss=None,
            clipped_share=None,
            split=None,
            node_names=None,
            privacy=privacy,
            bytes_sent_by_rank=sent,
        )

    def _largest(self, privacy: Privacy) -> Privacy:
        """The total of the process that paid most: one that repeated rounds after a crash paid for them twice."""
        if privacy.unit == "none":
            return privacy
        own, remark = privacy.to_json(), ""
        largest: dict[str, Any] = {}
        for name in ("epsilon", "epsilon_sum", "epsilon_spent", "epsilon_replacement"):
            totals = self._of_ranks(-1.0 if own[name] is None else own[name])
            largest[name] = None if min(totals) < 0 else max(totals)
            if name == "epsilon" and largest[name] != own[name]:
                most = totals.index(min(totals) if min(totals) < 0 else max(totals))
                remark = f" Rank {most} paid most: epsilon {largest[name] or math.inf:.4g}."
        by_node = self._of_nodes(own["epsilon_by_node"])
        return replace(privacy, **largest, epsilon_by_node=by_node, statement=privacy.statement + remark)

    def _of_nodes(self, values: Sequence[float]) -> list[float]:
        """One number per node, of all nodes; none when the nodes here have none (then nobody has)."""
        assert self._fabric is not None
        filled = values if len(values) == len(self._fabric.rows) else [-1.0] * len(self._fabric.rows)
        everybody = self._fabric.gather(torch.tensor(filled, dtype=torch.float64)).tolist()
        return [] if min(everybody) < 0 else everybody

    def _of_ranks(self, value: float) -> list[Any]:
        """One number per process, of all processes."""
        assert self._fabric is not None
        return self._fabric.everybody(value)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
