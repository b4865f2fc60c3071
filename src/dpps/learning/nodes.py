"""The nodes held here, as an algorithm sees them: what each wants to change in a round (`update`), and the protocol that joins
them (`exchange`)."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.frozen import Frozen
from dpps.learning.gradients.batch import Engine, EngineName
from dpps.learning.gradients.calling import one_number, pick, unwritten, weighted
from dpps.learning.gradients.choose import choose_engine, choose_per_example
from dpps.learning.gradients.clipped import PerExample, full_precision
from dpps.learning.preflight import check_model, why_not_finite
from dpps.learning.released import LocalOptimizers, ReleasedOptimizer
from dpps.learning.sampling import Cyclic, NodeData, Poisson, Sampler
from dpps.noise import Keystream, NoiseSource, Outgoing, SecureNoise, calibrate
from dpps.privacy import Calibration, Plan
from dpps.protocol import DPPS, RoundRecord

if TYPE_CHECKING:
    from dpps.learning.algorithms import Algorithm, TrainState

_VELOCITY, _AVERAGE = "released/", "average/"  # what is kept of an optimizer and of averaging
_ONLY_AS_CLIPPED = (
    "in the unit record one example's share is bounded in what Nodes.update gives, and in nothing else; send its perturbation as "
    "it is, once a round, or use the unit contribution, which clips whatever is sent"
)


class Update(NamedTuple):
    """One row per node held here."""

    losses: Tensor
    local: Tensor
    """The new local parameters."""
    perturbation: Tensor
    """Of the shared parameters: $-\\gamma_s g_i$."""


class Updates(Frozen, ABC):
    """Computes an update of every node held here."""

    fixed = frozenset({"engine", "per_example", "sampler", "plan", "calibration", "noise", "clip", "rows"})

    sampler: Sampler

    @abstractmethod
    def compute(self, state: TrainState, away: Tensor | None = None) -> Update:
        """The update of the next round; nothing of `state` changes. `away` marks the rows of absent nodes."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What is kept from round to round apart from the state, for checkpoints."""

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""


class BatchUpdates(Updates):
    """Algorithm 2, lines 3 to 6: gradients of whole batches, the shared one clipped to an L1 norm of `clip` (unit node-swap); None
    leaves it to the protocol. `local` is the local parameters before round 0."""

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        sampler: Cyclic,
        plan: Plan,
        clip: float | None,
        local: Tensor,
    ) -> None:
        self.engine, self.sampler, self.plan, self.clip = engine, sampler, plan, clip
        self.steps, make = algorithm.local_steps, algorithm.local_optimizer
        self._optimizers = None if make is None else LocalOptimizers(make, local)

    def compute(self, state: TrainState, away: Tensor | None = None) -> Update:
        y, rate, local = state.shared.y, state.shared.rate, state.local
        losses, total = torch.empty(0), torch.zeros(())
        for k in range(self.steps):
            x, target, _ = self.sampler.batch(state.round * self.steps + k)  # line 3: a batch
            at = y if k == 0 else y - self.plan.lr_shared * rate * total
            before = self.state() if self.engine.hides_failures else {}
            undo = partial(self.load_state, before)  # some nodes' optimizers may have taken their step
            step = self._local_step(local, rate)
            # lines 4 and 5: the local step, then the shared gradient at the new local parameters
            losses, local, gradient = self.engine.step(at, local, x, target, step, state.round, undo)
            total = gradient if self.steps == 1 else total + gradient
        if self.clip is not None:
            total = clip_rows(total, self.clip)  # line 6
        return Update(losses, local, total.mul_(-self.plan.lr_shared * rate))

    def _local_step(self, local: Tensor, rate: float) -> Callable[[Tensor, slice], Tensor]:
        """Turns local gradients of some rows into their new local parameters."""
        optimizers, lr = self._optimizers, self.plan.lr_local * rate
        if optimizers is None:
            return lambda gradient, rows: torch.add(local[rows].detach(), gradient, alpha=-lr, out=gradient)
        return lambda gradient, rows: optimizers.step(local, gradient, rows, self.engine.away)

    def state(self) -> dict[str, Tensor]:
        return {} if self._optimizers is None else self._optimizers.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        if self._optimizers is not None:
            self._optimizers.load_state(state)


class RecordUpdates(Updates):
    """Unit record: one joint, per-example clipped gradient at (y, l) for both parts; the local part is noised here.

    Both gradients are taken at l(t), where the paper's line 5 (and `BatchUpdates`, for the other units) takes the shared one
    at l(t+1): a joint clip needs both parts of an example's gradient at once. `noise` is that of the local part.
    """

    def __init__(
        self,
        per_example: PerExample,
        sampler: Poisson,
        plan: Plan,
        calibration: Calibration,
        noise: NoiseSource,
        rows: Sequence[int],
        optimizer: ReleasedOptimizer | None,
    ) -> None:
        self.optimizer, self._kept = optimizer, dict[str, Tensor]()
        self.per_example, self.sampler, self.plan = per_example, sampler, plan
        self.calibration, self.noise, self.rows = calibration, noise, rows
        self.clipped = ClipCount()
        self._by_batch: dict[float, list[int]] = {}
        """The rows, by what their nodes are expected to draw."""
        for k, row in enumerate(rows):
            # rows beyond the nodes: the audit holds many networks side by side
            expected = plan.batch_of(row % plan.nodes if plan.batches else row)
            self._by_batch.setdefault(expected, []).append(k)

    def compute(self, state: TrainState, away: Tensor | None = None) -> Update:
        x, target, mask = self.sampler.batch(state.round)
        assert mask is not None
        with full_precision(state.local.device):
            sums = self.per_example.sums(state.shared.y, state.local, x, target, mask)
        losses, sum_s, sum_l = sums
        drawn, rate = mask.sum(1), state.shared.rate
        self.clipped.add(sums.clipped, drawn)
        local = self._released(state, sum_l) if state.local.shape[1] else state.local
        if self.optimizer is not None and state.local.shape[1]:
            # post-processing of the released local update, as with the shared one; sums of large batches are float64
            released = (local - state.local).to(state.local)
            change, kept = self.optimizer.advance(self._kept, released, away)
            self._kept, local = dict(kept), state.local + change
        step = self.plan.lr_shared * rate / self.plan.batch_size
        change, limit = sum_s.mul_(-step), self.calibration.sensitivity.largest_perturbation(rate)
        if int(drawn.max()) * step * self.per_example.clip > limit:
            change = into_ball(change, limit)
        # sums of large batches are float64 until they are noised; parameters stay what they are
        return Update(losses, local.to(state.local.dtype), change)

    def _released(self, state: TrainState, sums: Tensor) -> Tensor:
        """The local parameters after a noised step. A local part is averaged with nobody's, so it is divided by what its own node is
        expected to draw (never by what it drew); nodes that draw equally many are noised in one go."""
        moved = state.local.to(sums.dtype, copy=True)
        mechanism, sensitivity = self.calibration.mechanism, self.calibration.sensitivity
        # as the message has it: what rounding to a grid adds is hidden, too
        rounding = partial(sensitivity.rounding, 0, norm=mechanism.norm)
        for batch, chosen in self._by_batch.items():
            at = slice(None) if len(chosen) == len(sums) else torch.tensor(chosen, device=sums.device)
            step = self.plan.lr_local * state.shared.rate / batch
            change = sums[at] * -step
            half = state.local[at] + change
            level = calibrate(mechanism, self.noise, step * self.per_example.clip, rounding)
            nodes = [self.rows[k] for k in chosen]
            out = Outgoing(
                state.local[at], change, half, nodes, state.round, base_is_public=True, step=level.step
            )
            self.noise.release(mechanism, level.scale, out)
            moved[at] = half
        return moved

    def state(self) -> dict[str, Tensor]:
        return self._kept

    def load_state(self, state: dict[str, Tensor]) -> None:
        self._kept = dict(state)


def clip_rows(rows: Tensor, limit: float) -> Tensor:
    r"""Each row scaled to an L1 norm of at most `limit`: $g / \max(1, \|g\|_1 / \mathfrak{C})$."""
    norms = rows.abs().sum(1, keepdim=True)
    return rows / (norms / limit).clamp(min=1.0)


def into_ball(rows: Tensor, limit: float) -> Tensor:
    """Each row as near as possible to what it was within an L2 norm of `limit`, beyond which others refuse it.

    A node that declared far fewer examples than it holds would draw that many. Projections move no two vectors apart, so what one
    example adds stays bounded.
    """
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    return rows * (limit * (1 - 1e-6) / norms).clamp(max=1.0).to(rows.dtype)


class Nodes(Frozen):
    """The rows held here with their data, what computes their updates, and the protocol they take part in.

    Args:
        algorithm: what is computed.
        data: of the rows held here.
        protocol: joins them with the others.
        plan: rates and batch size, to which the noise was calibrated.
        calibration: what the run must do to keep its unit's promise; None without noise.
        seed: of sampling and dropout in a simulation.
        engine: how gradients are computed; "auto" decides by the model.
    """

    fixed = frozenset(
        {"algorithm", "data", "plan", "calibration", "protocol"}
        | {"partition", "loss", "updates", "_clips_examples"}
    )

    def __init__(
        self,
        algorithm: Algorithm,
        data: NodeData,
        protocol: DPPS,
        plan: Plan,
        calibration: Calibration | None,
        seed: int,
        engine: EngineName = "auto",
    ) -> None:
        self.algorithm, self.data, self.protocol = algorithm, data, protocol
        self.plan, self.calibration, self._seed = plan, calibration, seed
        self.partition, self.rows, self.device = algorithm.partition, protocol.fabric.rows, data.device
        self.loss = one_number(algorithm.loss)
        whole = self.loss if algorithm.task is None else weighted(self.loss, algorithm.task.weigh)
        data.hides_failures = protocol.hides_failures
        x, target, _ = Cyclic(data, 1).batch(0)
        example, batch = (pick(x, (0, 0)), pick(target, (0, 0))), math.ceil(plan.largest_batch)
        self._clips_examples = calibration is not None and calibration.example_clip is not None
        if calibration is not None and not self._clips_examples:
            check_model(self.partition, self.loss, example, per_example=False)
        self.engine = choose_engine(
            self.partition, whole, example, self.rows, batch=batch, seed=seed, name=engine
        )
        self.engine.hides_failures = protocol.hides_failures
        self.updates: Updates = self._updates(example, batch)
        self._due: tuple[Tensor, int] | None = None
        """The last update's perturbation, and how often it had been written to, until it is sent."""
        self.protocol_seconds = 0.0
        """Of the last exchange."""

    def _updates(self, example: tuple[Any, Any], batch: int) -> Updates:
        algorithm, calibration, plan = self.algorithm, self.calibration, self.plan
        if calibration is None or calibration.example_clip is None:
            if plan.batches:
                raise UsageError(
                    "batches that differ from node to node belong to the unit record: use one number for all nodes"
                )
            local = self.partition.initial()[1].to(self.device).repeat(len(self.rows), 1)
            sampler = Cyclic(self.data, int(plan.batch_size))
            clip = None if calibration is None else calibration.gradient_clip
            return BatchUpdates(algorithm, self.engine, sampler, plan, clip, local)
        check_record(algorithm)
        weigh = None if algorithm.task is None else algorithm.task.weigh
        clipped = choose_per_example(
            self.partition, self.loss, example, calibration.example_clip, batch=batch, weigh=weigh
        )
        clipped.hides_failures = self.protocol.hides_failures
        noise: NoiseSource = self.protocol.noise
        # whoever can foretell the batches gains more than was accounted for: never from a seed where the noise is secret
        coins: int | Keystream = Keystream() if noise.private else self._seed
        if isinstance(noise, SecureNoise):
            coins = noise.keystream
        # the audit holds many networks side by side: rows beyond the first one repeat it
        rates = [plan.sampling[row % self.protocol.fabric.nodes] for row in self.rows]
        poisson = Poisson(self.data, self.rows, rates, coins)
        of_local = noise.for_local_part() if self.partition.local else noise
        return RecordUpdates(clipped, poisson, plan, calibration, of_local, self.rows, algorithm.optimizer)

    # What a step is made of

    def update(self, state: TrainState) -> Update:
        """A batch, the local step and the clipped shared gradient of every node; an absent one does nothing."""
        if self._due is not None and self._clips_examples:
            raise UsageError(
                f"a second update in one round, of which only one is paid for: {_ONLY_AS_CLIPPED}"
            )
        away = self._away(state)
        frozen = (p for p in self.partition.model.parameters() if not p.requires_grad)
        with nullcontext() if self.calibration is None else unwritten((state.shared.s, state.local, *frozen)):
            update = self.updates.compute(state, away)
        self._refuse_non_finite(update.losses, state)
        self._due = update.perturbation, update.perturbation._version
        if away is None:
            return update
        kept = torch.where(away.to(update.local.device)[:, None], state.local, update.local)
        return update._replace(local=kept)

    def gradients(self, y: Tensor, state: TrainState) -> tuple[Tensor, Tensor]:
        """Losses and shared gradients at `y` on this round's batch, nothing clipped: for algorithms without noise."""
        if self._clips_examples:
            raise UsageError(f"gradients of whole batches: {_ONLY_AS_CLIPPED}")
        self._away(state)
        x, target, _ = self.updates.sampler.batch(state.round)
        losses, _, gradient = self.engine.step(y, state.local, x, target, lambda g, _: g, state.round)
        self._refuse_non_finite(losses, state)
        return losses, gradient.clone()

    def exchange(self, state: TrainState, perturbation: Tensor) -> RoundRecord | None:
        """One round of DPPS with this perturbation; None when nothing is shared, for then nothing is sent.

        In the unit record it must be that of `update`, as it is and once: what one example adds is bounded in that only, and the
        protocol, which sees sums, cannot bound it.
        """
        begun = time.perf_counter()
        due, self._due = self._due, None
        as_clipped = due is not None and due[0] is perturbation and due[1] == perturbation._version
        if self._clips_examples and not as_clipped:
            raise UsageError(f"a perturbation that is not the update of this round: {_ONLY_AS_CLIPPED}")
        if not self.partition.shared:
            self._skip_round(state)
            return None
        record = self._round(state, perturbation)
        self.protocol_seconds = time.perf_counter() - begun
        self._average(state)
        return record

    def _round(self, state: TrainState, perturbation: Tensor) -> RoundRecord:
        """One round of DPPS, in which an optimizer makes of every released update the one that is sent."""
        optimizer, shared, protocol = self.algorithm.optimizer, state.shared, self.protocol
        if optimizer is None:
            return protocol.step(shared, perturbation)
        if protocol.hides_rows:
            # node-swap: rows are what is hidden, so nothing is post-processing. The optimizer works on the node's own updates
            # before noise, and the sensitivity counts the norm of what it makes of them: each round's promise holds for any
            # perturbation
            return protocol.step(shared, self._optimized(optimizer, state, perturbation))
        message = protocol.release(shared, perturbation)
        change = self._optimized(optimizer, state, message.rows - shared.s)
        return protocol.exchange(shared, protocol.post_process(shared, message, change, optimizer.gain))

    def _optimized(self, optimizer: ReleasedOptimizer, state: TrainState, update: Tensor) -> Tensor:
        """What the optimizer makes of an update. What it remembers is in the state before anything leaves: a fabric may put the
        state on disk first."""
        change, kept = optimizer.advance(_below(state.kept, _VELOCITY), update, self._away(state))
        state.kept = state.kept | {f"{_VELOCITY}{name}": rows for name, rows in kept.items()}
        return change

    def _skip_round(self, state: TrainState) -> None:
        state.shared.round, state.shared.clock = state.round + 1, state.shared.clock + 1

    def still_to_come(self, state: TrainState, released: Tensor | None) -> Tensor:
        """By how much rows would still move after the last round, if nothing but this (or nothing at all) were released any more."""
        optimizer, last = self.algorithm.optimizer, torch.zeros_like(state.shared.s)
        if released is not None:
            last = last + released.to(last)
        return last if optimizer is None else optimizer.rest(_below(state.kept, _VELOCITY), last)

    def _average(self, state: TrainState) -> None:
        """The mean of the rows over the last part of the run; the rows themselves until it begins. It costs no privacy: it is made
        of what was released, and used for what comes out only."""
        last, rounds = self.algorithm.averaging, self.plan.count
        if not last:
            return
        mean = self.algorithm.shared_parameters(self._estimates(state)).clone()
        old = _below(state.kept, _AVERAGE)
        count = old.get("count", torch.zeros((), dtype=torch.int64))
        if state.round > rounds - max(1, round(last * rounds)):
            count = count + 1
            mean = torch.lerp(old.get("mean", mean), mean, 1 / int(count))
        state.kept = state.kept | {f"{_AVERAGE}mean": mean, f"{_AVERAGE}count": count}

    def _away(self, state: TrainState) -> Tensor | None:
        """Which rows' nodes are absent in this round; the engine keeps their buffers as they are."""
        present = self.protocol.present(state.shared)
        away = None if present is None else torch.from_numpy(~present[list(self.rows)])
        self.engine.away = frozenset() if away is None else frozenset(away.nonzero().flatten().tolist())
        return away

    def _refuse_non_finite(self, losses: Tensor, state: TrainState) -> None:
        bad = [k for k, loss in enumerate(losses.tolist()) if not math.isfinite(loss)]
        if bad and not self.protocol.hides_failures:
            raise RunError(
                f"the loss of node {self.rows[bad[0]]} is {float(losses[bad[0]])} in round {state.round}: nothing of this "
                f"round was sent; {why_not_finite(self.data.datasets[bad[0]], f'node {self.rows[bad[0]]}')}"
            )

    # What a run asks

    @property
    def clipping(self) -> tuple[float, ClipCount] | None:
        """The clip of an example's gradient and how many were clipped (unit record); None where examples are not clipped."""
        if not isinstance(self.updates, RecordUpdates):
            return None
        return self.updates.per_example.clip, self.updates.clipped

    @contextmanager
    def transaction(self, state: TrainState) -> Iterator[None]:
        """A round: it completes, or `state`, buffers and optimizers are as they were."""
        if self.algorithm.local_steps > 1:
            # the engine's memories take turns between steps, and would overwrite these rows
            state.local = state.local.clone()
        before, shared = replace(state), replace(state.shared)
        # the unit record leaves the engine's buffers alone
        buffers = {} if self._clips_examples else {n: b.clone() for n, b in self.engine.state().items()}
        optimizers = self.updates.state()
        self._due = None  # an earlier round may have failed before it was sent
        try:
            yield
        except BaseException:
            state.local, state.kept = before.local, before.kept
            vars(state.shared).update(vars(shared))
            if buffers:
                self.engine.load_state(buffers)
            self.updates.load_state(optimizers)
            if self.clipping is not None:
                self.clipping[1].take()
            raise

    def start_epoch(self, state: TrainState, epoch: int) -> None:
        """Set the rates of an epoch (counted from 1); when they change, the counters of topology and synchronisation restart."""
        rate = self.algorithm.rate(epoch)
        if rate != state.shared.rate:
            self.protocol.restart_clock(state.shared, rate)

    def mean_shared(self, state: TrainState) -> Tensor:
        """The averaged s, the output of Algorithm 2.

        In a distributed run of node-swap rows are what the noise hides, and averaging would send them without it: there each
        process averages its own rows only.
        """
        fabric, rows = self.protocol.fabric, self.shared_rows(state)
        return rows.mean(0) if self.protocol.hides_rows and not fabric.simulation else fabric.mean(rows)

    def shared_rows(self, state: TrainState) -> Tensor:
        """The shared parameters that come out of every row held here, before they are averaged with the others'."""
        averaged = state.kept.get(f"{_AVERAGE}mean")
        return self.algorithm.shared_parameters(self._estimates(state)) if averaged is None else averaged

    def _estimates(self, state: TrainState) -> Tensor:
        """Of the averaged s: rows whose mean over all nodes it is, or where nodes do not meet each node's own y."""
        return state.shared.s if self.protocol.fabric.meets else state.shared.y

    def set_mean(self, state: TrainState, mean: Tensor) -> None:
        """Replace the shared parameters by what nodes that do not meet have agreed on at the end."""
        state.shared.s = mean.to(state.shared.s) * state.shared.a.to(state.shared.s)[:, None]
        if f"{_AVERAGE}mean" in state.kept:
            state.kept = state.kept | {f"{_AVERAGE}mean": mean.to(state.shared.s).expand_as(state.shared.s)}

    def skip_to(self, state: TrainState, round_: int, per_epoch: int) -> None:
        """Rounds without the nodes here: nothing is computed, released or paid in them, and rates and counters go on as for all others."""
        while state.round < round_:
            if state.round % per_epoch == 0:
                self.start_epoch(state, state.round // per_epoch + 1)
            self._skip_round(state)

    def noise_distance(self, rounds: int) -> float:
        """Distance of the noise of so many rounds from the noise that is charged for (0 for continuous noise)."""
        dimension = self.partition.shared_size + (self.partition.local_size if self._clips_examples else 0)
        return self.protocol.noise.distance(self.protocol.mechanism, dimension, rounds)

    # To and from disk

    def tensors(self, state: TrainState) -> dict[str, Tensor]:
        """Everything of a run that changes, but for the counters in `meta`."""
        shared = state.shared
        groups = {"memory": shared.memory, "link": shared.link, "kept": state.kept}
        groups |= {f"watched/{name}": memory for name, memory in shared.watched.items()}
        groups |= {"optimizer": self.updates.state(), "engine": self.engine.state()}
        named = {f"{group}/{name}": t for group, own in groups.items() for name, t in own.items()}
        return {"s": shared.s, "a": shared.a, "l": state.local, **named}

    def meta(self, state: TrainState) -> dict[str, Any]:
        """The counters."""
        return {"clock": state.shared.clock, "rate": state.shared.rate}

    def load(
        self, state: TrainState, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], round_: int
    ) -> None:
        """Take up what `tensors` and `meta` gave after `round_` rounds."""
        shared = state.shared
        for name, own in (("s", shared.s), ("l", state.local)):
            if tensors[name].shape != own.shape:
                raise RuntimeError(
                    f"{name} has shape {tuple(tensors[name].shape)}, this run's {tuple(own.shape)}"
                )
        shared.s, shared.a = tensors["s"].to(shared.s), tensors["a"]
        shared.link = {name: tensors[f"link/{name}"] for name in shared.link}
        state.local = tensors["l"].to(state.local)
        shared.memory = _below(tensors, "memory/")
        shared.watched = {name: _below(tensors, f"watched/{name}/") for name in shared.watched}
        state.kept, moments = (
            {n: t.to(self.device) for n, t in _below(tensors, p).items()} for p in ("kept/", "optimizer/")
        )
        self.updates.load_state(moments)
        self.engine.load_state(_below(tensors, "engine/"))
        shared.round, shared.clock, shared.rate = round_, meta["clock"], meta["rate"]


def check_record(algorithm: Algorithm) -> None:
    """Refuse what the unit record cannot bound."""
    if algorithm.local_steps > 1:
        raise UsageError(
            f"local_steps is {algorithm.local_steps}: the unit record takes one step per round; raise the batch size instead"
        )
    if not algorithm.partition.shared:
        raise UsageError(
            "nothing is shared: the unit record protects what is sent; share something, or train without a unit"
        )
    if algorithm.local_optimizer is not None:
        raise UsageError(
            "the unit record noises the local update itself: it works with plain SGD, leave local_optimizer out"
        )


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


# Two numbers that tell whether a run goes well: how many examples were clipped, and how large updates are compared with their noise

RARE, ALWAYS = 0.01, 0.99
"""Outside of these shares a clip is worth a word."""

HOPELESS = 0.05
"""All updates over their noise, below which little is learned: with scattering and a linear model on mnist-mini 0.02 gave 21 %,
0.045 38 %, 0.16 76 %. (The noise of many parameters is long, but short in the few directions that updates take.)"""

OWN_EYES = "(computed from data without noise: for this node's own eyes, not to be passed on)"
"""Said with every number that no guarantee covers."""


class ClipCount:
    """Counts examples whose gradient was longer than the clip. Nothing of it is noised: it is for the node's own eyes."""

    def __init__(self) -> None:
        self._clipped = self._seen = 0

    def add(self, shares: Tensor, drawn: Tensor) -> None:
        """For every node, the share of a batch that was clipped, and how many examples were drawn."""
        self._clipped += int((shares * drawn).round().sum())
        self._seen += int(drawn.sum())

    def take(self) -> tuple[int, int]:
        """How many were clipped, and of how many, since this was last asked."""
        found = self._clipped, self._seen
        self._clipped = self._seen = 0
        return found


def advice(clip: float, clipped: int, seen: int) -> str | None:
    """What to do about a clip that clips almost nothing or almost everything; None where it is neither."""
    if not seen or RARE <= clipped / seen <= ALWAYS:
        return None
    share = f"{100 * clipped / seen:.3g} % of the examples were clipped at {clip:g}"
    if clipped / seen < RARE:
        return f"{share}: noise is added for gradients that long, so a smaller clip gives the same updates with less noise {OWN_EYES}"
    return (
        f"{share}: every one counts with its direction alone, and only rate x clip matters; where that is too short a step, a larger "
        f"learning rate or a larger clip learns more {OWN_EYES}"
    )


def hopeless(update_to_noise: float, nodes: int, rounds: int) -> str | None:
    """A warning where noise drowns even the sum of all updates of all nodes; None where it does not.

    Over T rounds and N nodes, updates that agree add up to T N of one, and independent noise to the root of that.
    """
    whole = update_to_noise * math.sqrt(nodes * rounds)
    if whole >= HOPELESS:
        return None
    return (
        f"an update is {update_to_noise:.2g} of its noise, and even all updates of {nodes} nodes over "
        f"{rounds} rounds together are {whole:.2g} "
        "of theirs: this run will hardly learn; use larger batches, fewer shared parameters (a linear model), more "
        f"data or a larger epsilon {OWN_EYES}"
    )
