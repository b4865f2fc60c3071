"""PEDFL, a baseline of the paper, as its own publication has it: rows are mixed, then the gradient at the old point is added."""

from dataclasses import replace

import torch

from dpps.errors import UsageError
from dpps.learning.algorithm import ALGORITHMS, Algorithm, Step, TrainState
from dpps.learning.nodes import Nodes
from dpps.learning.updates import clip_rows
from dpps.privacy.units import NodeSwap, Unit
from dpps.sensitivity import Oracle


@ALGORITHMS.register("pedfl")
class PEDFL(Algorithm):
    r"""Privacy-enhanced decentralised federated learning: D-PSGD with noise on the whole model.

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
