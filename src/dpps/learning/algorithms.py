"""The algorithms: PartPSP, Algorithm 2 of the paper, its baselines SGP, SGPDP and PEDFL, and gradient tracking."""

from dataclasses import replace

import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.learning.algorithm import ALGORITHMS, Algorithm, Step, TrainState
from dpps.learning.nodes import Nodes
from dpps.learning.updates import clip_rows
from dpps.privacy import NodeSwap, Unit
from dpps.sensitivity import Oracle


@ALGORITHMS.register("partpsp")
class PartPSP(Algorithm):
    r"""Partial communication push-sum SGD with differential privacy.

    A round, for each node i: a batch; $l_i \leftarrow l_i - \gamma_l \nabla_l F_i(y_i, l_i)$; on the same batch
    $g_i = \nabla_s F_i(y_i, l_i)$, clipped; then one round of DPPS with the perturbation $-\gamma_s g_i$.

    This differs from the paper in the unit record only: both gradients are taken at $l_i^{(t)}$, from before the local step, whereas
    line 5 of the paper takes the shared one at
    $l_i^{(t+1)}$. One joint clip of both parts needs one backward pass for both, and
    $l_i^{(t+1)}$ is noised there.

    The arguments are those of :class:`~dpps.learning.algorithm.Algorithm`.
    """

    def step(self, nodes: Nodes, state: TrainState) -> Step:
        update = nodes.update(
            state
        )  # lines 3 to 6: a batch, the local step, the clipped shared gradient times -gamma_s
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
        if self.partition.local or self.local_steps > 1:
            raise UsageError(
                'PEDFL shares the whole model and takes one step a round: shared="all", local_steps=1'
            )
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
        if self.partition.local or self.local_steps > 1:
            raise UsageError(
                'gradient tracking shares the whole model and takes one step a round: shared="all", local_steps=1'
            )
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
