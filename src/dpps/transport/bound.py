r"""How long an honest node's row can be: what the contract of a run makes possible.

All rows start from one public row $s_0$. In a round a node moves its row by at most $\Delta$ (the clip) and
adds noise of deviation $\sigma$ per coordinate; momentum makes both count $1 / (1 - \beta)$ times, spread over later rounds. Mixing
makes each $y_i = s_i / a_i$ a convex combination of others, so that with $m$ the smallest $a_i$ so far

$$\|s_i\| \le a_i \Bigl(\|s_0\| + \sum_t \Delta_t / m + \|n_i\|\Bigr),$$

where $n_i$ is a sum of noise, independent between rounds, whose coordinates have variances of at most $V = \sum_t (\sigma_t /
m)^2$: a convex combination of one round's noise deviates no more than the noise of one of its messages, whatever partners share. The norm is a Lipschitz function of the noise; Gaussian and Laplace noise satisfy a Poincare
inequality (with constant 4 for a Laplace variable of scale 1), so $P(\|n_i\| > \sqrt V (\sqrt d + 41)) < 10^{-12}$ (Bobkov and Ledoux, Probability Theory and Related Fields 107, 1997).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpps.transport.base import Exchange

_TAIL = 41.0
_SLACK = 1.01  # rounding, and grids


@dataclass(frozen=True)
class Bound:
    """What rows can have grown to so far; infinite where nothing is known.

    Attributes:
        start: norm of the common start row.
        steps: sum of the largest perturbations.
        variance: sum of the variances of the noise.
        smallest: of all a so far.
    """

    start: float
    steps: float = 0.0
    variance: float = 0.0
    smallest: float = 1.0

    @classmethod
    def of(cls, tensor: Tensor) -> "Bound":
        """As `tensor` gave it."""
        return cls(*tensor.tolist())

    def tensor(self) -> Tensor:
        """For a checkpoint."""
        return torch.tensor([self.start, self.steps, self.variance, self.smallest], dtype=torch.float64)

    def after(self, exchange: Exchange, a: Tensor) -> "Bound":
        """With the perturbation and the noise of one more round; `a` of all nodes before it."""
        return Bound(
            self.start,
            self.steps + exchange.step,
            self.variance + exchange.deviation**2,
            min(self.smallest, float(a.min())),
        )

    def limits(self, a: Tensor, dimension: int) -> Tensor | None:
        """The longest row of each node; None where nothing is known."""
        moved = self.steps + math.sqrt(self.variance) * (math.sqrt(dimension) + _TAIL)
        most = self.start + moved / self.smallest
        return _SLACK * most * a if math.isfinite(most) else None
