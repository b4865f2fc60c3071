"""The algorithms: PartPSP, Algorithm 2 of the paper, its baselines SGP, SGPDP and PEDFL, and gradient tracking.

An algorithm is `start` and `step` on an explicit state. A step computes with the :class:`~dpps.learning.nodes.Nodes` held here and
changes the state last, when the round is complete; so a round happens as a whole or not at all. docs/architecture.md adds one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.errors import UsageError, is_number
from dpps.frozen import Frozen
from dpps.learning.gradients.calling import Loss, as_function, takes_classes
from dpps.learning.nodes import Nodes, clip_rows
from dpps.learning.partition import Partition
from dpps.learning.released import LocalOptimizer, ReleasedOptimizer
from dpps.learning.sampling import BatchSize, batches, check_batch
from dpps.learning.suggestion import (
    USUAL_BATCH,
    USUAL_EPOCHS,
    suggest,
    suggested_batch,
    suggested_epochs,
)
from dpps.privacy import NodeSwap, Pairs, Plan, Unit
from dpps.protocol import RoundRecord, State
from dpps.registry import Registry
from dpps.sensitivity import Oracle
from dpps.tasks import Classification, Hazards, Task

ALGORITHMS: Registry[type["Algorithm"]] = Registry("algorithm", "dpps.learning")
"""Algorithms by name: what `dpps train --algorithm` offers."""


@dataclass
class TrainState:
    """The parameters of all nodes held here, and where they stand.

    What belongs to one node alone is kept where it is used: buffers (statistics of normalisation layers) by the engine, the
    moments of local optimizers by the updates. `Nodes.tensors` collects all of it for a checkpoint, and
    `Nodes.transaction` restores all of it when a round fails.
    """

    shared: State
    """The rows of the shared parameters in the protocol."""
    local: Tensor
    """(rows, d_l): every node's local parameters."""
    kept: dict[str, Tensor] = field(default_factory=dict)
    """What else an algorithm keeps, by name."""

    @property
    def round(self) -> int:
        """How many rounds are complete."""
        return self.shared.round


class Step(NamedTuple):
    """What a step gives: the protocol's record (None when nothing is shared) and every row's loss."""

    record: RoundRecord | None
    losses: Tensor


@dataclass
class Algorithm(Frozen, ABC):
    r"""The computation of a round; base class of all algorithms.

    Args:
        model: any `nn.Module`; all nodes start from its parameters.
        shared: prefixes of the names of shared parameters, "all", or a predicate on names.
        lr_shared: $\gamma_s$; by default chosen by the rule of docs/accuracy.md in the unit record, and 0.1
            otherwise.
        lr_local: $\gamma_l$; by default the same as `lr_shared`.
        lr_step: all rates divided by 10 at the start of epochs K, 2K, ... counted from 1 (0 = never), which also restarts
            the counters of topology and synchronisation. The noise rate $\gamma_n$ decays along in the unit node-swap.
        batch_size: examples per node and round (their expected number in the unit record,
            in which nodes may differ): one number for all, one per node, or a part in (0, 1) of each node's
            examples. By default chosen by the rule, or 100.
        local_steps: gradient steps per round; the clipped total change is the perturbation.
        loss: of (outputs, targets): a mean over the batch, or one number per example, which is averaged. Class weights work in
            every unit in the latter form, `nn.CrossEntropyLoss(weight=w, reduction="none")`. A sum over the batch is taken as it is;
            in the unit record, which looks at examples one by one, it is the same as the mean. A loss module of torch with its
            default settings is the same as its function: `nn.CrossEntropyLoss()` is `F.cross_entropy`.
        local_optimizer: function that returns a `torch.optim` optimizer for one node's local parameters; by
            default plain SGD.
        optimizer: `Momentum` or `Adam` on released updates, which costs no privacy: of the shared part, and in the unit record of
            the local part, too. Plain SGD without it. (In the unit node-swap, where rows are hidden, it works before the noise.)
        averaging: the fraction of rounds, at the end of the run, over which the final shared parameters are
            averaged (0 = only the last round).
        task: what is predicted, such as `dpps.tasks.Survival(edges=(365, 730))`: it has a loss of its own, unless another is given, and says how
            models are judged. Without one, of cross-entropy, it is classification.
        input_length: how long an example's inputs are, with a 1 for the bias, where it is public (`Schema.length`): the rule then chooses the
            rate of a linear model so that its probabilities can be used as such.
        pretrained: whether inputs are features of a network that was trained on public data: the rule then allows a linear model
            less noise.

    The settings are frozen, because the noise is calibrated to them. `dataclasses.replace` makes a variant for another run.
    """

    noisy: ClassVar[bool] = True
    """Whether it can add noise. If not, messages are sent without noise."""
    sends_updates: ClassVar[bool] = True
    """Whether what it sends is an update of the shared parameters, of which an optimizer can make another."""
    shares_all: ClassVar[bool] = False
    """Whether the command line shares the whole model with it, whatever `--shared` says."""
    synchronises: ClassVar[bool] = True
    """Whether all nodes average exactly every `sync_every` rounds."""
    own_sensitivity: ClassVar[str] = ""
    """Which sensitivity it uses in the unit node-swap instead of the one asked for, in words; empty: that one."""

    model: nn.Module
    shared: Sequence[str] | Callable[[str], bool] = "all"
    lr_shared: float | None = None
    lr_local: float | None = None
    lr_step: int = 0
    batch_size: BatchSize | None = None
    local_steps: int = 1
    loss: Loss = F.cross_entropy
    local_optimizer: LocalOptimizer | None = None
    optimizer: ReleasedOptimizer | None = None
    averaging: float = 0.0
    task: Task | None = None
    input_length: float | None = None
    pretrained: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise UsageError(f"the model is {self.model!r:.80}: give an nn.Module, such as dpps.models.MLP()")
        if not isinstance(self.task, Task | None):
            raise UsageError(
                f"the task is {self.task!r:.80}: give one of dpps.tasks, such as Regression(0, 60)"
            )
        if not callable(self.loss):
            raise UsageError(f"the loss is {self.loss!r:.80}: give a function of (outputs, targets)")
        unnamed = (
            as_function(self.loss) is F.cross_entropy
        )  # the only change of a fixed value, before anything rests on it
        self.__dict__["loss"] = as_function(self.task.loss if self.task and unnamed else self.loss)
        for name in ("lr_shared", "lr_local"):
            rate = getattr(self, name)
            if rate is not None and not (is_number(rate) and 0 <= rate < float("inf")):
                raise UsageError(f"{name} is {rate!r}: it must be a number, 0 or more and finite")
        if self.batch_size is not None:
            check_batch(self.batch_size)
        if not (isinstance(self.local_steps, int) and self.local_steps >= 1):
            raise UsageError(f"local_steps is {self.local_steps!r}: it must be a whole number, 1 or more")
        if not (isinstance(self.lr_step, int) and self.lr_step >= 0):
            raise UsageError(f"lr_step is {self.lr_step!r}: it must be 0 (never) or a whole number of epochs")
        if not isinstance(self.optimizer, ReleasedOptimizer | None):
            raise UsageError(
                f"the optimizer is {self.optimizer!r:.80}: give dpps.Momentum() or dpps.Adam(), which work on released updates; one "
                "of torch.optim is for the local part, local_optimizer=lambda p: torch.optim.Adam(p)"
            )
        if not 0 <= self.averaging <= 1:
            raise UsageError(
                f"averaging is {self.averaging:g}: it is the part of the rounds, counted from the end, that is averaged; it must lie "
                "in [0, 1]"
            )
        if self.optimizer is not None and not self.sends_updates:
            raise UsageError(
                f"{type(self).__name__} sends more than an update of its parameters: it works without an optimizer"
            )
        self.partition = Partition(self.model, self.shared)

    @classmethod
    def shares(cls, wanted: str) -> str:
        """Which layers this algorithm shares when `wanted` was asked for on the command line."""
        return "all" if cls.shares_all else wanted

    def unit(self, unit: Unit | None) -> Unit | None:
        """The privacy unit as this algorithm carries it out.

        Raises:
            UsageError: the algorithm cannot keep this unit's promise.
        """
        if unit is not None and not self.noisy:
            raise UsageError(
                f"{type(self).__name__} sends without noise and cannot keep the unit {unit.name}: leave "
                "privacy out, or use PartPSP"
            )
        shared_noise = isinstance(getattr(unit, "trust", None), Pairs)
        if shared_noise and self.optimizer is not None and not self.optimizer.linear:
            raise UsageError(
                f"{type(self.optimizer).__name__} is not linear in the released updates, so noise that "
                "partners share would not cancel: "
                "use Momentum or no optimizer with trust=Pairs, or trust nobody"
            )
        return unit

    def rate(self, epoch: int) -> float:
        """The factor on the rates in an epoch, counted from 1."""
        return 10.0 ** -(epoch // self.lr_step) if self.lr_step else 1.0

    def epochs(self, sizes: Sequence[int], unit: Unit | None = None) -> int:
        """The default number of passes over the data: by the rule if there is one, otherwise 12."""
        if not self._has_rule(unit):
            return USUAL_EPOCHS
        softmax = self.softmax_inputs is not None or self._length is not None
        usual = suggested_batch(sizes, softmax=softmax) if self.lr_shared is None else USUAL_BATCH
        return suggested_epochs(self.batch_size or usual, sizes, softmax=softmax)

    def plan(
        self, sizes: Sequence[int], epochs: int, spare_rounds: int = 0, unit: Unit | None = None
    ) -> Plan:
        """The facts that a privacy unit needs about a run of `epochs` with nodes of these declared sizes.

        Args:
            spare_rounds: rounds paid for beyond the plan, so that rounds repeated after a crash stay within a target epsilon.
            unit: the privacy unit; rates that were not given depend on it.
        """
        if epochs < 1:
            raise UsageError(f"epochs is {epochs}: it must be 1 or more")
        lr_shared, batch = self._rates(sizes, epochs, spare_rounds, unit)
        drawn = batches(batch, sizes)
        per_epoch = drawn.rounds(sizes, self.local_steps)
        rounds: dict[float, int] = {}
        for epoch in range(1, epochs + 1):
            rounds[self.rate(epoch)] = rounds.get(self.rate(epoch), 0) + per_epoch
        return Plan(
            tuple(rounds.items()),
            lr_shared,
            drawn.mean,
            drawn.rates,
            spare_rounds,
            self.partition.shared_size + self.partition.local_size,
            tuple(sizes),
            lr_shared if self.lr_local is None else self.lr_local,
            drawn.expected if drawn.differ else (),
        )

    def _rates(
        self, sizes: Sequence[int], epochs: int, spare_rounds: int, unit: Unit | None
    ) -> tuple[float, BatchSize]:
        """The rate of the shared part and the batch: as given, by the rule, or as usual."""
        given = self.batch_size
        if self.lr_shared is None and unit is not None and self._has_rule(unit):
            partners, task = unit.trust.partners(len(sizes)), self.task or Task
            found = suggest(
                sizes,
                self.softmax_inputs,
                mean_noise=1.0 if partners is None else partners.shares().independent,
                epsilon=unit.epsilon,
                delta=unit.delta,
                noise_multiplier=getattr(unit, "noise_multiplier", None),
                records_per_user=unit.records_per_user,
                spare_rounds=spare_rounds,
                batch_size=given,
                epochs=epochs,
                clip=unit.clip,
                momentum=self._momentum,
                local=bool(self.partition.local),
                pretrained=self.pretrained,
                length=self._length,
                output_noise=task.output_noise,
                steepest=task.steepest,
            )
            return found.rate, found.batch_size
        return 0.1 if self.lr_shared is None else self.lr_shared, USUAL_BATCH if given is None else given

    def _has_rule(self, unit: Unit | None) -> bool:
        """Whether options left open follow the rule."""
        return unit is not None and unit.per_example and self._momentum is not None

    @property
    def _momentum(self) -> float | None:
        """None: of an optimizer that has no such thing."""
        return 0.0 if self.optimizer is None else getattr(self.optimizer, "beta", None)

    @property
    def judged_as(self) -> Task | None:
        """What says how good models are; None: of a loss of one's own only the metrics that are asked for."""
        return Classification(()) if self.task is None and takes_classes(self.loss) else self.task

    @property
    def linear_inputs(self) -> int | None:
        """How many inputs a linear model has that is shared as a whole; None: the model is something else."""
        layers = [m for m in self.model.modules() if any(True for _ in m.parameters(recurse=False))]
        layers = [m for m in layers if not isinstance(m, Hazards)]
        if self.partition.local or len(layers) != 1 or not isinstance(layers[0], nn.Linear):
            return None
        return layers[0].in_features

    @property
    def softmax_inputs(self) -> int | None:
        """The same of a softmax regression."""
        return self.linear_inputs if takes_classes(self.loss) else None

    @property
    def _length(self) -> float | None:
        """How long the inputs of a linear model are, where that is known."""
        return self.input_length if self.linear_inputs is not None else None

    def start(self, nodes: Nodes) -> TrainState:
        """The state before round 0. Every row starts from the model's parameters, which are public."""
        s, l = (part.to(nodes.device) for part in self.partition.initial())
        rows = len(nodes.rows)
        return TrainState(nodes.protocol.start(s.repeat(rows, 1), common_start=True), l.repeat(rows, 1))

    @abstractmethod
    def step(self, nodes: Nodes, state: TrainState) -> Step:
        """One round. It completes and changes `state`, or raises and leaves it as it was."""

    def _refuse_parts(self) -> None:
        if self.partition.local or self.local_steps > 1:
            raise UsageError(
                f"{type(self).__name__} shares the whole model and takes one step a round: "
                'shared="all", local_steps=1'
            )

    def shared_parameters(self, rows: Tensor) -> Tensor:
        """The model's shared parameters in rows of the protocol, for algorithms that send more than these."""
        return rows

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.fixed = frozenset(f.name for f in fields(Algorithm))


@ALGORITHMS.register("partpsp")
class PartPSP(Algorithm):
    r"""Partial communication push-sum SGD with differential privacy.

    A round, for each node i: a batch; $l_i \leftarrow l_i - \gamma_l \nabla_l F_i(y_i, l_i)$; on the same batch
    $g_i = \nabla_s F_i(y_i, l_i)$, clipped; then one round of DPPS with the perturbation $-\gamma_s g_i$.

    This differs from the paper in the unit record only: both gradients are taken at $l_i^{(t)}$, from before the local step,
    whereas line 5 of the paper takes the shared one at $l_i^{(t+1)}$. One joint clip of both parts needs one backward pass for
    both, and $l_i^{(t+1)}$ is noised there.

    The arguments are those of `Algorithm`.
    """

    def step(self, nodes: Nodes, state: TrainState) -> Step:
        update = nodes.update(state)  # lines 3 to 6: batch, local step, clipped gradient times -gamma_s
        state.local = update.local  # before anything leaves: a fabric may put the state on disk first
        record = nodes.exchange(state, update.perturbation)  # one round of Algorithm 1
        return Step(record, update.losses)


@ALGORITHMS.register("sgp")
class SGP(PartPSP):
    """Stochastic gradient push (Assran et al. 2019), a baseline of the paper: PartPSP with everything shared and without noise."""

    noisy = False
    shares_all = True


@ALGORITHMS.register("sgpdp")
class SGPDP(PartPSP):
    """SGP with the protocol's noise, a baseline of the paper: PartPSP with everything shared."""

    shares_all = True


@ALGORITHMS.register("pedfl")
class PEDFL(Algorithm):
    r"""Privacy-enhanced decentralised federated learning, a baseline of the paper: D-PSGD with noise on the whole model.

    $x_i \leftarrow \sum_j W_{ij} (x_j + n_j) - \gamma_s \nabla F_i(x_i)$ with doubly stochastic weights (after IEEE
    Transactions on Computers 72(8), 2023; no code was published). The gradient that a round adds after mixing leaves in the
    next round's message: it is that round's perturbation, so the rows of the protocol stay what everybody knows.

    In the unit node-swap the noise follows the real distance of the nodes, as in the paper's other rows. In the unit contribution
    it is calibrated to a clip: two updates of a node are at most 2 x rate x clip apart. The unit record is refused: the
    gradient is taken at a point that holds the node's own last update without noise, so one example moves all of it.
    """

    shares_all = True
    synchronises = False
    own_sensitivity = "the real sensitivity"

    def unit(self, unit: Unit | None) -> Unit | None:
        if unit is not None and unit.per_example:
            raise UsageError(
                f"PEDFL takes gradients where the node's own last update is not noised yet, so the unit {unit.name} has no bound "
                "for it: use the unit contribution or node-swap, or PartPSP"
            )
        return replace(unit, sensitivity=Oracle()) if isinstance(unit, NodeSwap) else unit

    def start(self, nodes: Nodes) -> TrainState:
        self._refuse_parts()
        state = super().start(nodes)
        state.kept = {"update": torch.zeros_like(state.shared.s)}
        return state

    def step(self, nodes: Nodes, state: TrainState) -> Step:
        update = state.kept["update"]
        losses, gradient = nodes.gradients(state.shared.y + update, state)
        if nodes.calibration is not None and nodes.calibration.gradient_clip is not None:
            gradient = clip_rows(gradient, nodes.calibration.gradient_clip)
        rate = nodes.plan.lr_shared * state.shared.rate
        state.kept = state.kept | {"update": gradient.mul_(-rate)}
        record = nodes.exchange(state, update)
        return Step(record, losses)


@ALGORITHMS.register("gradient-tracking")
class GradientTracking(Algorithm):
    r"""Push-DIGing in its adapt-then-combine form (after Nedić, Olshevsky, Shi 2017), without noise.

    A row is $(x_i, z_i)$; with $g_i$ the gradient at $y_i = x_i / a_i$ and $g_i'$ that of the round before,

    $h_i = z_i + g_i - g_i'$, then DPPS mixes $(x_i - \gamma_s h_i, \; h_i)$.

    The sum of all $z_i$ is the sum of all gradients, so nodes with different data meet at the common optimum at a constant
    rate, where SGP stops short of it. $h_i$ is made of unreleased gradients of two rounds, for which no unit has a bound: it is
    offered without noise only.
    """

    noisy = False
    sends_updates = False
    shares_all = True

    def start(self, nodes: Nodes) -> TrainState:
        self._refuse_parts()
        x = self.partition.initial()[0].to(nodes.device).repeat(len(nodes.rows), 1)
        zero = torch.zeros_like(x)
        rows = nodes.protocol.start(torch.cat([x, zero], 1), common_start=True)
        return TrainState(rows, x[:, :0], {"gradient": zero})

    def step(self, nodes: Nodes, state: TrainState) -> Step:
        z = state.shared.s[:, self.partition.shared_size :]
        losses, gradient = nodes.gradients(self.shared_parameters(state.shared.y), state)
        change = gradient - state.kept["gradient"]
        h = z + change
        record = nodes.exchange(state, torch.cat([-nodes.plan.lr_shared * state.shared.rate * h, change], 1))
        state.kept = {"gradient": gradient}
        return Step(record, losses)

    def shared_parameters(self, rows: Tensor) -> Tensor:
        return rows[:, : self.partition.shared_size]
