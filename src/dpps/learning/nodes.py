"""The nodes held here, as an algorithm sees them: their updates, and the protocol that joins them."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.frozen import Frozen
from dpps.learning.algorithm import Algorithm, TrainState
from dpps.learning.gradients.batch import EngineName
from dpps.learning.gradients.calling import one_number, pick, unwritten, weighted
from dpps.learning.gradients.choose import choose_engine, choose_per_example
from dpps.learning.inputs import why_not_finite
from dpps.learning.preflight import check_model
from dpps.learning.released import ReleasedOptimizer
from dpps.learning.sampling import Cyclic, NodeData, Poisson
from dpps.learning.updates import BatchUpdates, ClipCount, RecordUpdates, Update, Updates
from dpps.noise import Keystream, NoiseSource, SecureNoise
from dpps.privacy import Calibration, Plan
from dpps.protocol import DPPS, RoundRecord

_VELOCITY, _AVERAGE = "released/", "average/"  # what is kept of an optimizer and of averaging
_ONLY_AS_CLIPPED = (
    "in the unit record one example's share is bounded in what Nodes.update gives, and in nothing else; send its perturbation as "
    "it is, once a round, or use the unit contribution, which clips whatever is sent"
)


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
        {"algorithm", "data", "plan", "calibration", "protocol", "partition", "loss", "updates"}
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
        if calibration is not None and calibration.example_clip is None:
            check_model(self.partition, self.loss, example, per_example=False)
        self.engine = choose_engine(
            self.partition, whole, example, self.rows, batch=batch, seed=seed, name=engine
        )
        self.engine.hides_failures = protocol.hides_failures
        self.updates = self._updates(example, batch)
        self._due: tuple[Tensor, int] | None = None
        """The last update's perturbation, and how often it had been written to, until it is sent."""
        self.protocol_seconds = 0.0
        """Of the last exchange."""

    def _updates(self, example: tuple[Any, Any], batch: int) -> Updates:
        algorithm, calibration = self.algorithm, self.calibration
        if calibration is None or calibration.example_clip is None:
            local = self.partition.initial()[1].to(self.device).repeat(len(self.rows), 1)
            if self.plan.batches:
                raise UsageError(
                    "batches that differ from node to node belong to the unit record: use one number for all nodes"
                )
            sampler = Cyclic(self.data, int(self.plan.batch_size))
            clip = calibration.gradient_clip if calibration else None
            return BatchUpdates(algorithm, self.engine, sampler, self.plan, clip, local)
        check_record(algorithm)
        noise = self.protocol.noise
        weigh, clip = None if algorithm.task is None else algorithm.task.weigh, calibration.example_clip
        clipped = choose_per_example(self.partition, self.loss, example, clip, batch=batch, weigh=weigh)
        clipped.hides_failures = self.protocol.hides_failures
        source = self._coins(noise)
        # the audit holds many networks side by side: rows beyond the first one repeat it
        nodes = self.protocol.fabric.nodes
        rates = [self.plan.sampling[row % nodes] for row in self.rows]
        poisson = Poisson(self.data, self.rows, rates, source)
        of_local = noise.for_local_part() if self.partition.local else noise
        optimizer = self.algorithm.optimizer
        return RecordUpdates(clipped, poisson, self.plan, calibration, of_local, self.rows, optimizer)

    def _coins(self, noise: NoiseSource) -> int | Keystream:
        """Where batches are drawn from: whoever can foretell them gains more than was accounted for, so never from a seed where
        nobody is to know the noise."""
        if isinstance(noise, SecureNoise):
            return noise.keystream
        return Keystream() if noise.private else self._seed

    # What a step is made of

    def update(self, state: TrainState) -> Update:
        """A batch, the local step and the clipped shared gradient of every node; an absent one does nothing."""
        if self._due is not None and isinstance(self.updates, RecordUpdates):
            raise UsageError(
                f"a second update in one round, of which only one is paid for: {_ONLY_AS_CLIPPED}"
            )
        away = self._away(state)
        frozen = [p for p in self.partition.model.parameters() if not p.requires_grad]
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
        if isinstance(self.updates, RecordUpdates):
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
        if isinstance(self.updates, RecordUpdates) and (
            due is None or due[0] is not perturbation or due[1] != perturbation._version
        ):
            raise UsageError(f"a perturbation that is not the update of this round: {_ONLY_AS_CLIPPED}")
        if not self.partition.shared:
            state.shared.round, state.shared.clock = state.round + 1, state.shared.clock + 1
            return None
        record = self._round(state, perturbation)
        self.protocol_seconds = time.perf_counter() - begun
        self._average(state)
        return record

    def _round(self, state: TrainState, perturbation: Tensor) -> RoundRecord:
        """One round of DPPS, in which an optimizer makes of every released update the one that is sent."""
        optimizer, shared = self.algorithm.optimizer, state.shared
        if optimizer is None:
            return self.protocol.step(shared, perturbation)
        if self.protocol.hides_rows:
            # node-swap: rows are what is hidden, so nothing is post-processing. The optimizer works on the node's own updates
            # before noise, and the sensitivity counts the norm of what it makes of them: each round's promise holds for any
            # perturbation
            return self.protocol.step(shared, self._optimized(optimizer, state, perturbation))
        message = self.protocol.release(shared, perturbation)
        change = self._optimized(optimizer, state, message.rows - shared.s)
        message = self.protocol.post_process(shared, message, change, optimizer.gain)
        return self.protocol.exchange(shared, message)

    def _optimized(self, optimizer: ReleasedOptimizer, state: TrainState, update: Tensor) -> Tensor:
        """What the optimizer makes of an update. What it remembers is in the state before anything leaves: a fabric may put the
        state on disk first."""
        change, kept = optimizer.advance(_below(state.kept, _VELOCITY), update, self._away(state))
        state.kept = state.kept | {f"{_VELOCITY}{name}": rows for name, rows in kept.items()}
        return change

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
        mean, old = (
            self.algorithm.shared_parameters(self._estimates(state)).clone(),
            _below(state.kept, _AVERAGE),
        )
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
        buffers = {name: b.clone() for name, b in self.engine.state().items()}
        optimizers = self.updates.state()
        self._due = None  # an earlier round may have failed before it was sent
        try:
            yield
        except BaseException:
            state.local, state.kept = before.local, before.kept
            vars(state.shared).update(vars(shared))
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
            state.shared.round, state.shared.clock = state.round + 1, state.shared.clock + 1

    def noise_distance(self, rounds: int) -> float:
        """Distance of the noise of so many rounds from the noise that is charged for (0 for continuous noise)."""
        noised_local = isinstance(self.updates, RecordUpdates)
        dimension = self.partition.shared_size + (self.partition.local_size if noised_local else 0)
        return self.protocol.noise.distance(self.protocol.mechanism, dimension, rounds)

    # To and from disk

    def tensors(self, state: TrainState) -> dict[str, Tensor]:
        """Everything of a run that changes, but for the counters in `meta`."""
        named = {"s": state.shared.s, "a": state.shared.a, "l": state.local}
        named |= {f"memory/{k}": v for k, v in state.shared.memory.items()}
        named |= {f"link/{k}": v for k, v in state.shared.link.items()}
        for name, memory in state.shared.watched.items():
            named |= {f"watched/{name}/{k}": v for k, v in memory.items()}
        named |= {f"kept/{k}": v for k, v in state.kept.items()}
        named |= {f"optimizer/{k}": v for k, v in self.updates.state().items()}
        return named | {f"engine/{k}": v for k, v in self.engine.state().items()}

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
        kept, moments = (
            {n: t.to(self.device) for n, t in _below(tensors, p).items()} for p in ("kept/", "optimizer/")
        )
        state.kept = kept
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
