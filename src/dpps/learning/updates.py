"""What every node wants to change in a round: its loss, its new local parameters and the perturbation of its shared ones."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dpps.frozen import Frozen
from dpps.learning.algorithm import Algorithm, TrainState
from dpps.learning.gradients.batch import Engine
from dpps.learning.gradients.clipped import PerExample
from dpps.learning.gradients.contributions import full_precision
from dpps.learning.released import LocalOptimizers, ReleasedOptimizer
from dpps.learning.sampling import Cyclic, Poisson, Sampler
from dpps.noise import NoiseSource, Outgoing, calibrate
from dpps.privacy import Calibration, Plan


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

    def state(self) -> dict[str, Tensor]:
        """What is kept from round to round apart from the state, for checkpoints."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take up what `state` gave."""
        assert not state


class BatchUpdates(Updates):
    """Algorithm 2, lines 3 to 6: gradients of whole batches, the shared one clipped.

    Args:
        algorithm: the rates' owner: how many local steps, which optimizer.
        engine: computes gradients.
        sampler: the batches.
        plan: rates to which the noise was calibrated.
        clip: L1 bound on the shared gradient (unit node-swap); None leaves it to the protocol.
        local: the local parameters before round 0.
    """

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
        self.steps = algorithm.local_steps
        make = algorithm.local_optimizer
        self._optimizers = None if make is None else LocalOptimizers(make, local)

    def compute(self, state: TrainState, away: Tensor | None = None) -> Update:
        y, rate = state.shared.y, state.shared.rate
        local = state.local
        losses, total = torch.empty(0), torch.zeros(())
        for k in range(self.steps):
            x, target, _ = self.sampler.batch(state.round * self.steps + k)
            at = y if k == 0 else y - self.plan.lr_shared * rate * total
            before = self.state() if self.engine.hides_failures else {}
            losses, local, gradient = self.engine.step(
                at,
                local,
                x,
                target,
                self._stepper(local, rate),
                state.round,
                partial(self.load_state, before),  # some nodes' optimizers may have taken their step
            )
            total = gradient if self.steps == 1 else total + gradient
        if self.clip is not None:
            total = clip_rows(total, self.clip)
        return Update(losses, local, total.mul_(-self.plan.lr_shared * rate))

    def _stepper(self, local: Tensor, rate: float) -> Callable[[Tensor, slice], Tensor]:
        """What turns local gradients of some rows into their new local parameters."""
        optimizers, lr = self._optimizers, self.plan.lr_local * rate
        if optimizers is None:
            return lambda gradient, rows: torch.add(local[rows].detach(), gradient, alpha=-lr, out=gradient)
        return lambda gradient, rows: optimizers.rows(local, gradient, rows, self.engine.away)

    def state(self) -> dict[str, Tensor]:
        return {} if self._optimizers is None else self._optimizers.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        if self._optimizers is not None:
            self._optimizers.load_state(state)


class RecordUpdates(Updates):
    """Unit record: one joint, per-example clipped gradient at (y, l) for both parts; the local part is noised here.

    Both gradients are taken at l(t), where the paper's line 5 (and `BatchUpdates`, for the other units) takes the shared one
    at l(t+1): a joint clip needs both parts of an example's gradient at once.

    Args:
        per_example: clipped sums.
        sampler: Poisson batches.
        plan: rates and the expected batch, to which the noise was calibrated.
        calibration: the noise.
        noise: where the local part's noise comes from.
        rows: the nodes held here.
        optimizer: of released local updates; None: plain SGD.
    """

    def __init__(
        self,
        per_example: PerExample,
        sampler: Poisson,
        plan: Plan,
        calibration: Calibration,
        noise: NoiseSource,
        rows: Sequence[int],
        optimizer: ReleasedOptimizer | None = None,
    ) -> None:
        self.optimizer, self._kept = optimizer, dict[str, Tensor]()
        self.per_example, self.sampler, self.plan = per_example, sampler, plan
        self.calibration, self.noise, self.rows = calibration, noise, rows
        self.clipped = ClipCount()

    def compute(self, state: TrainState, away: Tensor | None = None) -> Update:
        x, target, mask = self.sampler.batch(state.round)
        assert mask is not None
        with full_precision(state.local.device):
            sums = self.per_example.sums(state.shared.y, state.local, x, target, mask)
        losses, sum_s, sum_l = sums
        drawn = mask.sum(1)
        self.clipped.add(sums.clipped, drawn)
        rate, expected = state.shared.rate, self.plan.batch_size
        moved = state.local
        if state.local.shape[1]:
            moved = self._optimized(state.local, self._released(state, sum_l), away)
        step = self.plan.lr_shared * rate / expected
        change, limit = sum_s.mul_(-step), self.calibration.sensitivity.largest_perturbation(rate)
        if int(drawn.max()) * step * self.per_example.clip > limit:
            change = into_ball(change, limit)
        # sums of large batches are float64 until they are noised; parameters stay what they are
        return Update(losses, moved.to(state.local.dtype), change)

    def _released(self, state: TrainState, sums: Tensor) -> Tensor:
        """The local parameters after a noised step. A local part is averaged with nobody's,
        so it is divided by what its own node is expected to draw (never by what it drew);
        nodes that draw equally many are noised in one go."""
        moved = state.local.to(sums.dtype, copy=True)
        mechanism, sensitivity = self.calibration.mechanism, self.calibration.sensitivity
        plan = self.plan  # rows beyond the nodes: the audit holds many networks side by side
        expected = [plan.batch_of(row % plan.nodes if plan.batches else row) for row in self.rows]
        for batch in dict.fromkeys(expected):
            chosen = [k for k, each in enumerate(expected) if each == batch]
            at = slice(None) if len(chosen) == len(expected) else torch.tensor(chosen, device=sums.device)
            step = plan.lr_local * state.shared.rate / batch
            change = sums[at] * -step
            # as the message has it: what rounding to a grid adds is hidden, too
            rounding = partial(sensitivity.rounding, 0, norm=mechanism.norm)
            half = state.local[at] + change
            level = calibrate(mechanism, self.noise, step * self.per_example.clip, rounding)
            nodes = [self.rows[k] for k in chosen]
            out = Outgoing(
                state.local[at], change, half, nodes, state.round, base_is_public=True, step=level.step
            )
            self.noise.release(mechanism, level.scale, out)
            moved[at] = half
        return moved

    def _optimized(self, base: Tensor, moved: Tensor, away: Tensor | None) -> Tensor:
        """What an optimizer makes of the released local update: post-processing, as with the shared one."""
        if self.optimizer is None:
            return moved
        released = (moved - base).to(base)  # sums of large batches are float64
        change, kept = self.optimizer.advance(self._kept, released, away)
        self._kept = dict(kept)
        return base + change

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
        self._clipped = self._seen = torch.zeros((), dtype=torch.int64)

    def add(self, shares: Tensor, drawn: Tensor) -> None:
        """Of every node, the share of a batch that was clipped, and how many examples were drawn."""
        self._clipped = self._clipped + (shares * drawn).round().sum().long().cpu()
        self._seen = self._seen + drawn.sum().cpu()

    def take(self) -> tuple[int, int]:
        """How many were clipped, and of how many, since this was last asked."""
        found = int(self._clipped), int(self._seen)
        self._clipped = self._seen = torch.zeros((), dtype=torch.int64)
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
