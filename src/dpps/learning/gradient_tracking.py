"""Gradient tracking: two vectors are mixed per round, the parameters and an estimate of everybody's mean gradient."""

import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.learning.algorithm import ALGORITHMS, Algorithm, Step, TrainState
from dpps.learning.nodes import Nodes


@ALGORITHMS.register("gradient-tracking")
class GradientTracking(Algorithm):
    r"""Push-DIGing in its adapt-then-combine form (after Nedić, Olshevsky, Shi 2017), without noise.

    A row is $(x_i, z_i)$; with $g_i$ the gradient at $y_i = x_i / a_i$ and $g_i'$ that of the round before,

    $h_i = z_i + g_i - g_i'$, then DPPS mixes $(x_i - \gamma_s h_i, \; h_i)$.

    The sum of all $z_i$ is the sum of all gradients, so nodes with different data meet at the common optimum at a constant
    rate, where SGP stops beside it. $h_i$ is made of unreleased gradients of two rounds, for which no unit has a bound: it is
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
