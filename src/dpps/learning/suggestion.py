r"""Which batch, epochs, clip and rate to begin with: a rule for softmax regression in the unit record.

A clip far below most gradients makes an update a sum of *directions*, so only the product of rate and clip
matters, and with momentum $\beta$ what becomes of it: the length $\eta$ = rate x clip / (1 - $\beta$) of a
step. All noise a run adds then has a size that is known before it starts. Over T rounds,
and averaged over N nodes with batches of B examples, it changes a logit of an example x by a random number of deviation

$$ \eta \, \nu, \qquad \nu = \frac{\sigma \sqrt{T} \, \|x\|}{B \sqrt{N}}, $$

with $\sigma$ the noise multiplier. The rule chooses $\eta = c / \nu$ with c = 6:
logits that differ by several units are a clear decision, so noise of a few units is what a model bears while
it goes as long a way as the noise allows. Where noise begins to prevail in the average of all updates,
a shorter way is better. That average has a length of at most 1, and in the direction of an example noise of deviation $r = \nu / (T \|x\|) = \sigma / (B \sqrt{N T})$: beyond $r = 0.001$ the rule takes $c = 6 \cdot 0.001 / r$, but at least 2.5. Everything in it is public: sizes are declared, and
$\|x\|$ is the root of the number of inputs when these are normalised (scattering with GroupNorm, standardised columns). docs/recipes.md
has the measurements. Noise that cancels leaves less of itself in the mean, by a factor m in deviation,
but gradients are computed at rows it
has not left yet: of the gain 1/m the step takes the square root.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dpps.errors import UsageError
from dpps.learning.batch_sizes import BatchSize, batches
from dpps.noise.events import gaussian
from dpps.privacy.accountant import noise_for

CLIP = 0.1
MOMENTUM = 0.8
EPOCHS = 15
ROUNDS = 120
"""At least so many epochs and rounds. The noise in the sum of all updates hardly depends on how many rounds
an epsilon is spread over; many short steps follow the gradient better than few long ones."""
LOGIT_NOISE = (2.5, 6.0)
"""The deviation of a logit that the noise of a whole run may cause: little where noise prevails, and at most."""
NOISY = 0.001
"""From this noise on, in the average of all updates of a run and against an update all of whose examples
agree, less is allowed."""
LONGEST = 20.0
"""The longest step: with little noise a run is limited by itself."""
_PART, _SMALL = 8, 64  # a batch is an eighth of a node's examples, or 64 of few, but at most half of them


@dataclass(frozen=True)
class Suggestion:
    """What to begin with, and why."""

    batch_size: BatchSize
    """A number for all nodes; where they hold different numbers of examples, a part of each one's."""
    epochs: int
    clip: float
    momentum: float
    rate: float
    noise_multiplier: float
    reasons: tuple[str, ...]

    @property
    def step(self) -> float:
        """rate x clip / (1 - momentum): how far an update goes in the end, if all its examples agree."""
        return self.rate * self.clip / (1 - self.momentum)


def suggested_batch(sizes: Sequence[int]) -> BatchSize:
    """For nodes of these declared sizes: a number for all, or where sizes differ a part of each one's examples, so that no node
    draws more often than the others and sets their noise."""
    least = min(sizes)
    if least < 1:
        raise UsageError(f"a node declares {least} examples: it must be 1 or more")
    if least == max(sizes):
        return max(1, least // _PART, min(least // 2, _SMALL))
    mean = sum(sizes) / len(sizes)
    return max(1 / _PART, min(0.5, _rounded(_SMALL / mean)))


def suggested_epochs(batch_size: BatchSize, sizes: Sequence[int]) -> int:
    """As many passes over the data as give enough rounds."""
    return max(EPOCHS, round(ROUNDS / batches(batch_size, sizes).rounds(sizes)))


def suggest(
    sizes: Sequence[int],
    inputs: int,
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    noise_multiplier: float | None = None,
    records_per_user: int = 1,
    spare_rounds: int = 0,
    mean_noise: float = 1.0,
    batch_size: BatchSize | None = None,
    epochs: int | None = None,
    clip: float | None = None,
    momentum: float | None = None,
) -> Suggestion:
    """Batch, epochs, clip and rate for softmax regression in the unit record; what is given is kept.

    Args:
        sizes: every node's declared size.
        inputs: how many numbers an example has, each of about unit variance.
        epsilon: wanted total; or `noise_multiplier`.
        delta: total failure probability.
        noise_multiplier: when the noise is given instead.
        records_per_user: as in `Record`.
        spare_rounds: rounds paid for beyond the plan.
        mean_noise: deviation of the noise in the network's mean over that of independent noise (`Shares.independent`).
        batch_size: of every node.
        epochs: passes over the data.
        clip: of an example's gradient.
        momentum: of released updates.
    """
    reasons = []
    if batch_size is None:
        batch_size = suggested_batch(sizes)
        part = batches(batch_size, sizes).rates[0]
        reasons.append(
            f"batch {batch_size:g}: 1/{1 / part:.3g} of every node's examples; large batches have less noise per example"
        )
    if epochs is None:
        epochs = suggested_epochs(batch_size, sizes)
        reasons.append(
            f"{epochs} epochs: at one epsilon more rounds add no noise to their sum, and beyond {ROUNDS} of them gain little"
        )
    if clip is None:
        clip = CLIP
        reasons.append(
            f"clip {clip:g}: below most gradients, so that every example counts with its direction"
        )
    if momentum is None:
        momentum = MOMENTUM
        reasons.append(
            f"momentum {momentum:g}: it costs nothing, and steps as long as these would swing without it"
        )
    drawn = batches(batch_size, sizes)
    rounds, sampling = epochs * drawn.rounds(sizes), max(drawn.rates)
    sigma = noise_multiplier or _noise(epsilon, delta, rounds + spare_rounds, sampling, records_per_user)
    per_step = sigma * math.sqrt(rounds * inputs * mean_noise / len(sizes)) / drawn.mean
    least, most = LOGIT_NOISE
    allowed = max(least, most * min(1.0, NOISY * rounds * math.sqrt(inputs) / per_step))
    step = min(LONGEST, allowed / per_step)
    why = (
        f"the noise of {rounds} rounds then moves a logit by about {allowed:.2g}"
        if step < LONGEST
        else f"the longest step, for there is little noise: {per_step * step:.2g} in a logit"
    )
    rate = _rounded(step * (1 - momentum) / clip)
    reasons.append(f"rate {rate:g}, so that rate x clip / (1 - momentum) is {step:.3g}: {why}")
    return Suggestion(batch_size, epochs, clip, momentum, rate, sigma, tuple(reasons))


@lru_cache(maxsize=64)
def _noise(epsilon: float | None, delta: float, rounds: int, sampling: float, group: int) -> float:
    if epsilon is None:
        raise UsageError("a suggestion needs an epsilon or a noise multiplier")
    return noise_for(epsilon, delta, rounds, gaussian, sampling=sampling, group=group)


def _rounded(value: float) -> float:
    """To three digits: the rest means nothing."""
    return float(f"{value:.3g}")
