"""PartPSP, Algorithm 2 of the paper: every node steps its local parameters, then the shared ones go through DPPS."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpps.errors import RunError, UsageError
from dpps.fabric import Fabric, Stacked
from dpps.keystream import Keystream
from dpps.learning.batches import Cyclic, NodeData, Poisson, Sampler
from dpps.learning.engines import choose_engine
from dpps.learning.gradients import Engine, EngineName, Loss
from dpps.learning.partition import Partition
from dpps.learning.per_example import PerExample, per_example
from dpps.mechanisms import NoNoise
from dpps.noise import NoiseSource, Outgoing, Seeded
from dpps.privacy.units import Plan, Terms, Unit
from dpps.protocol import DPPS, Charges, Record, State
from dpps.secure import SecureNoise
from dpps.sensitivity import Sensitivity
from dpps.streams import fresh_seed
from dpps.topology import Topology

if TYPE_CHECKING:
    from dpps.learning.training import Callback, Run

LocalOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass
class PartPSP:
    r"""Partial communication push-sum SGD with differential privacy.

    A round, for each node i: a batch; $l_i \leftarrow l_i - \gamma_l \nabla_l F_i(y_i, l_i)$; on the same batch
    $g_i = \nabla_s F_i(y_i, l_i)$, clipped; then one round of DPPS with the perturbation $-\gamma_s g_i$.

    Args:
        model: any `nn.Module`; all nodes start from its parameters.
        shared: prefixes of the names of shared parameters, "all", or a predicate on names.
        topology: who sends to whom.
        privacy: `Record(...)`, `Contribution(...)`, `NodeSwap(...)`, or None for no noise.
        lr_shared: $\gamma_s$.
        lr_local: $\gamma_l$.
        lr_step: all rates divided by 10 at the start of epochs K, 2K, ... counted from 1 (0 = never), which also restarts
            the counters of topology and synchronisation. The noise rate $\gamma_n$ decays along in the unit node-swap.
        spare_rounds: rounds paid for beyond the plan, so that rounds repeated after a crash stay within a target epsilon.
        batch_size: examples per node and round (their expected number in the unit record).
        local_steps: gradient steps per round; the clipped total change is the perturbation.
        sync_every: P, the synchronisation period (0 = never).
        loss: of (outputs, targets), a mean over the batch.
        local_optimizer: what makes a `torch.optim` optimizer for one node's local parameters; plain SGD without it.
        seed: of noise and sampling in a simulation; None takes one from the operating system.
        noise: where noise comes from; by default seeded streams.
        engine: how gradients are computed; "auto" decides by the model.
        watch: sensitivities to evaluate along without using them.
        track_real: record the real sensitivity of every round.
        device: where tensors live.
        fabric: where the rows live; by default all in this process.
    """

    model: nn.Module
    shared: Sequence[str] | Callable[[str], bool]
    topology: Topology
    privacy: Unit | None = None
    lr_shared: float = 0.1
    lr_local: float = 0.1
    lr_step: int = 0
    spare_rounds: int = 0
    batch_size: int = 100
    local_steps: int = 1
    sync_every: int = 0
    loss: Loss = F.cross_entropy
    local_optimizer: LocalOptimizer | None = None
    seed: int | None = None
    noise: NoiseSource | None = None
    engine: EngineName = "auto"
    watch: Mapping[str, Sensitivity] = field(default_factory=dict)
    track_real: bool = False
    device: str = "cpu"
    fabric: Fabric | None = None

    def __post_init__(self) -> None:
        for name in ("lr_shared", "lr_local"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name} is {getattr(self, name)}: it must be 0 or more")
        for name in ("batch_size", "local_steps"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.lr_step < 0:
            raise UsageError(f"lr_step is {self.lr_step}: it must be 0 (never) or a number of epochs")
        if self.seed is None:
            self.seed = fresh_seed()
        self.partition = Partition(self.model, self.shared)

    def rate(self, epoch: int) -> float:
        """The factor on the rates in an epoch, counted from 1."""
        return 10.0 ** -(epoch // self.lr_step) if self.lr_step else 1.0

    def plan(self, data: NodeData, fabric: Fabric, epochs: int) -> Plan:
        """What a unit needs to know of a run over `epochs`."""
        sizes = fabric.gather(torch.tensor(data.sizes, dtype=torch.float64))
        per_epoch = max(1, int(sizes.sum()) // (fabric.nodes * self.batch_size * self.local_steps))
        rounds: dict[float, int] = {}
        for epoch in range(1, epochs + 1):
            rounds[self.rate(epoch)] = rounds.get(self.rate(epoch), 0) + per_epoch
        sampling = [min(1.0, self.batch_size / n) for n in sizes.tolist()]
        coordinates = self.partition.shared_size + self.partition.local_size
        return Plan(
            tuple(rounds.items()), self.lr_shared, self.batch_size, sampling, self.spare_rounds, coordinates
        )

    def start(
        self,
        datasets: Sequence[Dataset[Any]],
        epochs: int,
        ledger: Callable[[Plan, Terms], Charges] | None = None,
    ) -> "Learner":
        """All that a run needs, before its first round.

        Args:
            datasets: one map-style data set per node held here.
            epochs: how many passes over the data are planned: a target epsilon is spread over them.
            ledger: given the plan and the terms, what is charged with every message before it leaves.
        """
        fabric = self.fabric or Stacked(self.topology.nodes)
        if len(datasets) != len(fabric.rows):
            raise UsageError(f"{len(datasets)} data sets for {len(fabric.rows)} nodes: give one per node")
        if epochs < 1:
            raise UsageError(f"epochs is {epochs}: it must be 1 or more")
        data = NodeData(datasets, self.device)
        if 0 in data.sizes:
            raise UsageError(
                f"node {fabric.rows[data.sizes.index(0)]} has no examples: give every node at least one"
            )
        if self.privacy and self.lr_shared == 0 and self.partition.shared:
            raise UsageError(
                "lr_shared is 0: then nothing is learned from the others and there is nothing to protect; raise it, or share nothing"
            )
        plan = self.plan(data, fabric, epochs)
        terms = self.privacy.terms(plan) if self.privacy else None
        if terms and terms.example_clip is not None:
            self._check_record()
        protocol = DPPS(
            self.topology,
            terms.mechanism if terms else NoNoise(),
            terms.sensitivity if terms else None,
            sync_every=self.sync_every,
            noise=self.noise or Seeded(self.seed),
            fabric=fabric,
            watch=self.watch,
            track_real=self.track_real,
        )
        learner = Learner(self, data, epochs, plan, terms, protocol)
        if ledger and terms:  # last, when nothing can be refused any more
            protocol.ledger = ledger(plan, terms)
        return learner

    def _check_record(self) -> None:
        if self.local_steps > 1:
            raise UsageError(
                f"local_steps is {self.local_steps}: the unit record takes one step per round; raise the batch size instead"
            )
        if not self.partition.shared:
            raise UsageError(
                "nothing is shared: the unit record protects what is sent; share something, or train without a unit"
            )

    def fit(
        self,
        datasets: Sequence[Dataset[Any]],
        *,
        epochs: int,
        test: Dataset[Any] | tuple[Tensor, Tensor] | None = None,
        held_out: Sequence[tuple[Tensor, Tensor]] = (),
        callbacks: Sequence["Callback"] = (),
    ) -> "Run":
        """Train to the end in this process and return what came out.

        Args:
            datasets: one map-style data set of (input, target) per node.
            epochs: passes over the data (a target epsilon is spread over them).
            test: a data set, or (inputs, labels), evaluated after every epoch.
            held_out: per node, (inputs, labels) of the node's own kind, evaluated at the end.
            callbacks: called after every round with the training and the round's log.
        """
        from dpps.learning.training import Training, as_tensors, check_labels
        from dpps.privacy.statement import Tally

        tally = Tally()

        def charges(_: Plan, terms: Terms) -> Tally:
            tally.sampling = terms.sampling
            return tally

        learner = self.start(datasets, epochs, charges)
        whole = None if test is None else as_tensors(test)
        if whole is not None and self.loss is F.cross_entropy:
            check_labels(self.model, *whole)
        return Training(learner, epochs, tally, whole, held_out, callbacks).run()


class Learner:
    """A run in progress: the rows of s in a DPPS state, the rows of l, and what computes their gradients."""

    def __init__(
        self, config: PartPSP, data: NodeData, epochs: int, plan: Plan, terms: Terms | None, protocol: DPPS
    ) -> None:
        self.config, self.data, self.plan, self.terms, self.protocol = config, data, plan, terms, protocol
        self.rounds_per_epoch = plan.count // epochs
        self.partition = config.partition
        self.rows = protocol.fabric.rows
        s, l = (part.to(config.device) for part in self.partition.initial())
        self.state: State = protocol.start(s.repeat(len(self.rows), 1), common_start=True)
        self.local = l.repeat(len(self.rows), 1)
        self.sampler = self._sampler()
        self.engine = self._engine()
        self.per_example = self._per_example()
        self._local_noise = (
            protocol.noise.for_local_part() if self.per_example and self.partition.local else protocol.noise
        )
        self._optimizers = self._make_optimizers()
        self.protocol_seconds = 0.0
        """Of the last round."""

    # What a round is made of

    def round(self) -> tuple[Record | None, Tensor]:
        """One round of Algorithm 2: the protocol's record (None when nothing is shared) and every row's loss."""
        self._refuse_unpaid()
        present = self.protocol.topology.present(self.state.clock)
        away = None if present is None else torch.from_numpy(~present[list(self.rows)])
        self.engine.away = frozenset() if away is None else frozenset(away.nonzero().flatten().tolist())
        losses, local, perturbation = self._private_step() if self.per_example else self._step()
        if self._hides_failures():
            perturbation = torch.nan_to_num(perturbation, nan=0.0, posinf=0.0, neginf=0.0)
        bad = [k for k, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
        if bad and not self._hides_failures():
            raise RunError(
                f"the loss of node {self.rows[bad[0]]} is {float(losses[bad[0]])} in round {self.state.round}: nothing of this "
                "round was sent; lower the learning rates or clip more"
            )
        if away is not None:  # an absent node does nothing
            local = torch.where(away.to(local.device)[:, None], self.local, local)
        record, begun = None, time.perf_counter()
        if self.partition.shared:
            record = self.protocol.step(self.state, perturbation)
            self.protocol_seconds = time.perf_counter() - begun
        else:
            self.state.round, self.state.clock = self.state.round + 1, self.state.clock + 1
        self.local = local
        return record, losses

    def _hides_failures(self) -> bool:
        """Stopping because of one's data is a message without noise: where messages really leave, noise is sent instead."""
        sensitivity = self.protocol.sensitivity
        return not self.protocol.fabric.simulation and sensitivity is not None and sensitivity.base_is_public

    def _refuse_unpaid(self) -> None:
        """A target epsilon was spread over the planned rounds: a round beyond them would break the promise."""
        target = getattr(self.config.privacy, "epsilon", None)
        if target is not None and self.state.round >= self.plan.paid:
            raise RunError(
                f"round {self.state.round} refused before sending: epsilon {target:g} was spread over {self.plan.paid} rounds; "
                "plan more epochs (or spare rounds) from the start"
            )

    def _step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, new local parameters and the perturbation: Algorithm 2, lines 3 to 6."""
        if (
            self.config.local_steps > 1
        ):  # the engine's two memories take turns within the round: keep what a failed round returns to
            self.local = self.local.clone()
        y, local, rate = self.state.y, self.local, self.state.rate
        losses = total = torch.empty(0)
        for k in range(self.config.local_steps):
            x, target, _ = self.sampler.batch(self.state.round * self.config.local_steps + k)
            at = y if k == 0 else y - self.config.lr_shared * rate * total
            losses, local, gradient = self.engine.step(
                at, local, x, target, self._update(local), self.state.round
            )
            total = (
                gradient if self.config.local_steps == 1 else gradient.clone() if k == 0 else total + gradient
            )
        if self.terms and self.terms.gradient_clip is not None:
            total = clip_rows(total, self.terms.gradient_clip)
        return losses, local, total.mul_(-self.config.lr_shared * rate)

    def _update(self, local: Tensor) -> Callable[[Tensor, slice], Tensor]:
        lr = self.config.lr_local * self.state.rate
        if self._optimizers is None:
            return lambda gradient, rows: torch.add(local[rows].detach(), gradient, alpha=-lr, out=gradient)
        optimizers = self._optimizers

        def step(gradient: Tensor, rows: slice) -> Tensor:
            new = []
            mine = range(rows.start, rows.stop)
            for k, g, l, (parameter, optimizer) in zip(
                mine, gradient, local[rows], optimizers[rows], strict=True
            ):
                if k in self.engine.away:  # neither does its optimizer
                    new.append(l.clone())
                    continue
                parameter.data.copy_(l)
                parameter.grad = g.clone()
                optimizer.step()
                new.append(parameter.detach().clone())
            return torch.stack(new)

        return step

    def _private_step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Unit record: one joint, per-example clipped gradient at (y, l) for both parts; noise on both."""
        assert self.per_example is not None
        assert self.terms is not None
        rate, expected = self.state.rate, self.config.batch_size
        x, target, mask = self.sampler.batch(self.state.round)
        assert mask is not None
        losses, sum_s, sum_l = self.per_example.sums(self.state.y, self.local, x, target, mask)
        step = self.config.lr_local * rate / expected
        change = sum_l.mul_(-step)
        moved = self.local + change
        if self.local.shape[1]:
            out = Outgoing(self.local, change, moved, self.rows, self.state.round, base_is_public=True)
            self._local_noise.release(
                self.terms.mechanism, self._local_scale(step * self.per_example.clip), out
            )
        return losses, moved, sum_s.mul_(-self.config.lr_shared * rate / expected)

    def _local_scale(self, share: float) -> float:
        """Noise on the local part, as the message has it: what rounding to a grid adds is hidden, too."""
        assert self.terms is not None
        mechanism, noise = self.terms.mechanism, self._local_noise
        rough = 2 * mechanism.scale(share)
        extra = noise.discreteness(rough) + self.terms.sensitivity.rounding(
            0, noise.grid(rough), mechanism.norm
        )
        return mechanism.scale(share + extra)

    # Beginning and end of an epoch

    def start_epoch(self, epoch: int) -> None:
        """Set the rates of an epoch (counted from 1); when they change, the counters of topology and synchronisation restart."""
        rate = self.config.rate(epoch)
        if rate != self.state.rate:
            self.protocol.restart_clock(self.state, rate)

    def mean_shared(self) -> Tensor:
        """The averaged s, the output of Algorithm 2.

        In a distributed run of node-swap rows are what is to be hidden, and averaging would send them without noise: there each
        process averages its own rows only.
        """
        sensitivity, fabric = self.protocol.sensitivity, self.protocol.fabric
        if not fabric.simulation and sensitivity is not None and not sensitivity.base_is_public:
            return self.state.s.mean(0)
        return fabric.mean(self.state.s)

    def noise_distance(self, rounds: int) -> float:
        """Distance of the noise of so many rounds from the noise that is charged for (0 for continuous noise)."""
        dimension = self.partition.shared_size + (self.partition.local_size if self.per_example else 0)
        return self.protocol.noise.distance(self.protocol.mechanism, dimension, rounds)

    # To and from disk

    def tensors(self) -> dict[str, Tensor]:
        """Everything of a run that changes, but for the counters in `meta`."""
        named = {"s": self.state.s, "a": self.state.a, "l": self.local}
        named |= {f"memory/{k}": v for k, v in self.state.memory.items()}
        for name, memory in self.state.watched.items():
            named |= {f"watched/{name}/{k}": v for k, v in memory.items()}
        return named | {f"engine/{k}": v for k, v in self.engine.state().items()}

    def meta(self) -> dict[str, Any]:
        """The counters."""
        return {"clock": self.state.clock, "rate": self.state.rate}

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], round_: int) -> None:
        """Take up what `tensors` and `meta` gave after `round_` rounds."""
        for name in ("s", "l"):
            if tensors[name].shape != (own := self.state.s if name == "s" else self.local).shape:
                raise RuntimeError(
                    f"{name} has shape {tuple(tensors[name].shape)}, this run's {tuple(own.shape)}"
                )
        self.state.s, self.state.a = tensors["s"].to(self.state.s), tensors["a"]
        self.local = tensors["l"].to(self.local)
        self.state.memory = _below(tensors, "memory/")
        self.state.watched = {name: _below(tensors, f"watched/{name}/") for name in self.state.watched}
        self.engine.load_state(_below(tensors, "engine/"))
        self.state.round, self.state.clock, self.state.rate = round_, meta["clock"], meta["rate"]

    # Parts

    def _sampler(self) -> Sampler:
        if self.terms and self.terms.example_clip is not None:
            return Poisson(self.data, self.rows, self.config.batch_size, self._sampling_source())
        return Cyclic(self.data, self.config.batch_size)

    def _sampling_source(self) -> int | Keystream:
        noise = self.protocol.noise
        if isinstance(noise, SecureNoise):
            return noise.keystream
        assert self.config.seed is not None
        return self.config.seed

    def _engine(self) -> Engine:
        x, target, _ = Cyclic(self.data, min(2, *self.data.sizes)).batch(0)
        seed = self.config.seed or 0
        return choose_engine(
            self.partition, self.config.loss, self.rows, (x[0], target[0]), seed, self.config.engine
        )

    def _per_example(self) -> PerExample | None:
        if self.terms is None or self.terms.example_clip is None:
            return None
        x, _ = self.data.take(np.zeros((len(self.rows), 1), dtype=np.int64))
        return per_example(self.partition, self.config.loss, self.terms.example_clip, x[0, 0])

    def _make_optimizers(self) -> list[tuple[nn.Parameter, torch.optim.Optimizer]] | None:
        make = self.config.local_optimizer
        if make is None:
            return None
        if self.terms and self.terms.example_clip is not None:
            raise UsageError(
                "the unit record noises the local update itself: it works with plain SGD, leave local_optimizer out"
            )
        parameters = [nn.Parameter(row.clone()) for row in self.local]
        return [(p, make([p])) for p in parameters]


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def clip_rows(rows: Tensor, limit: float) -> Tensor:
    r"""Each row scaled to an L1 norm of at most `limit`: $g / \max(1, \|g\|_1 / \mathfrak{C})$."""
    norms = rows.abs().sum(1, keepdim=True)
    return rows / (norms / limit).clamp(min=1.0)
