"""PartPSP, Algorithm 2 of the paper: every node steps its local parameters, then the shared ones go through DPPS."""

from dpps.learning.algorithm import ALGORITHMS, Algorithm, Step, TrainState
from dpps.learning.nodes import Nodes


@ALGORITHMS.register("partpsp")
class PartPSP(Algorithm):
    r"""Partial communication push-sum SGD with differential privacy.

    A round, for each node i: a batch; $l_i \leftarrow l_i - \gamma_l \nabla_l F_i(y_i, l_i)$; on the same batch
    $g_i = \nabla_s F_i(y_i, l_i)$, clipped; then one round of DPPS with the perturbation $-\gamma_s g_i$.

    A deviation from the paper, in the unit record only: both gradients are taken at $l_i^{(t)}$, from before the local step, where the
    paper's line 5 takes the shared one at $l_i^{(t+1)}$. One joint clip of both parts needs one backward pass for both, and
    $l_i^{(t+1)}$ is noised there.

    The arguments are those of :class:`~dpps.learning.algorithm.Algorithm`.
    """

    def step(self, nodes: Nodes, state: TrainState) -> Step:
        update = nodes.update(state)  # lines 2 to 5: a batch, the local step, the clipped shared gradient
        state.local = update.local  # before anything leaves: a fabric may put the state on disk first
        record = nodes.exchange(state, update.perturbation)  # line 6: one round of Algorithm 1
        return Step(record, update.losses)
