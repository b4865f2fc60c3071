r"""Which batch, epochs, clip and rate to begin with: a rule for the unit record, finer for softmax regression.

A clip far below most gradients makes an update a sum of *directions*, so only the product of rate and clip
matters, and with momentum $\beta$ what becomes of it: the length $\eta$ = rate x clip / (1 - $\beta$) of a
step. All noise a run adds then has a size that is known before it starts. Over T rounds,
and averaged over N nodes with batches of B examples, it changes a logit of an example x by a random number of standard deviation

$$ \eta \, \nu, \qquad \nu = \frac{\sigma \sqrt{T} \, \|x\|}{B \sqrt{N}}, $$

with $\sigma$ the noise multiplier. The rule chooses $\eta = c / \nu$ with c = 6:
logits that differ by several units are a clear decision, so noise of a few units is what a model bears while
it goes as long a way as the noise allows. Where noise begins to prevail in the average of all updates,
a shorter way is better. That average has a length of at most 1, and in the direction of an example noise of standard deviation $r = \nu / (T \|x\|) = \sigma / (B \sqrt{N T})$: beyond $r = 0.001$ the rule takes $c = 6 \cdot 0.001 / r$, but at least 2.5. Everything in it is public: sizes are declared, and
$\|x\|$ is the root of the number of inputs when these are normalised (scattering with GroupNorm, standardised columns). docs/accuracy.md
has the measurements. Features of a network that was trained on public data (`pretrained`) tell classes apart after a shorter way: there c is 2. Noise that cancels leaves less of itself in the mean, by a factor m in standard deviation,
but gradients are computed at rows it
has not left yet: of the gain 1/m the step takes the square root.

**Linear models of tables with a schema** have another rule, after which probabilities can be used as such. A schema says how long
an example's inputs are in the mean, with the 1 of the bias: $R^2 = 1 + \sum_{categories} (k - 1)/k + \sum_{numbers} 1/3$. Clip 0.35 R leaves most gradients as they
are, so a model learns how sure it may be and not only directions; where noise is small enough for the largest rate, the clip grows as far as the noise allows, up to R,
since what is cut off the gradients of a rare class is missing there; there is no momentum; and the noise of the
run moves an output (a logit, a hazard's logit, a scaled number) by a random number of standard deviation c = 1, or 0.2 of a number scaled to -1..1. The rate is at most $4 / R^2$ ($1 / R^2$ of a number, $8 / R^2$ of hazards), so that a run without noise settles.

Of any other model nobody knows beforehand how noise in its parameters moves its logits. There the rule keeps the usual batch, epochs
and clip and chooses $\eta$ so that all the noise of the run moves a *parameter* by a random number of standard deviation 0.1,
or 0.05 where a part of the model stays local, whose noise nobody averages. A rate that does not follow the noise is too large for a small epsilon: what is learned then drowns in it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpps.errors import UsageError
from dpps.learning.sampling import BatchSize, batches
from dpps.noise.events import gaussian
from dpps.privacy.accountant import noise_for

CLIP = 0.1
MOMENTUM = 0.8
EPOCHS = 15
ROUNDS = 120
"""At least so many epochs and rounds. The noise in the sum of all updates hardly depends on how many rounds
an epsilon is spread over; many short steps follow the gradient better than few long ones."""
LOGIT_NOISE = (2.5, 6.0)
"""The standard deviation of a logit that the noise of a whole run may cause: little where noise prevails, and at most."""
PRETRAINED_NOISE = 2.0
"""The same of the features of a network that was trained on public data: they tell classes apart after a shorter way."""
NOISY = 0.001
"""From this noise on, in the average of all updates of a run and against an update all of whose examples
agree, less is allowed."""
LONGEST = 20.0
"""The longest step: with little noise a run is limited by itself."""
TABLE_CLIP = 0.35
"""Of a linear model of a table: the clip, as a multiple of the length of an example's inputs."""
_PART, _SMALL = 8, 64  # a batch is an eighth of a node's examples, or 64 of few, but at most half of them

USUAL_BATCH, USUAL_EPOCHS, USUAL_CLIP = 100, 12, 1.0
"""Of other models than softmax regression. Of nodes with few examples a batch is at most half of them; as many epochs as make 120 rounds."""
PARAMETER_NOISE, WITH_LOCAL = 0.1, 0.05
"""Of other models: the standard deviation of a shared parameter that the noise of a whole run may cause; and where a part of the model is local."""
USUAL_LONGEST = 3.0
"""The longest step of other models: beyond it some do not settle."""


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


def suggested_batch(sizes: Sequence[int], *, softmax: bool = True) -> BatchSize:
    """For nodes of these declared sizes: a number for all, or where sizes differ a part of each one's examples, so that no node
    draws more often than the others and sets their noise.

    Args:
        softmax: whether the model is a softmax regression; others have the usual batch.
    """
    least = min(sizes)
    if least < 1:
        raise UsageError(f"a node declares {least} examples: it must be 1 or more")
    wanted, part = (_SMALL, _PART) if softmax else (USUAL_BATCH, max(sizes))
    if least == max(sizes):
        return max(1, least // part, min(least // 2, wanted))
    mean = sum(sizes) / len(sizes)
    return max(1 / part, min(0.5, _rounded(wanted / mean)))


def suggested_clip(length: float | None = None, *, softmax: bool = True) -> float:
    """Of an example's gradient.

    Args:
        length: of a linear model of a table with a schema, how long its inputs are.
        softmax: whether the model is a softmax regression.
    """
    if length is not None:
        return _rounded(TABLE_CLIP * length)
    return CLIP if softmax else USUAL_CLIP


def suggested_epochs(batch_size: BatchSize, sizes: Sequence[int], *, softmax: bool = True) -> int:
    """As many passes over the data as give enough rounds."""
    least = EPOCHS if softmax else USUAL_EPOCHS
    return max(least, round(ROUNDS / batches(batch_size, sizes).rounds(sizes)))


def suggest(
    sizes: Sequence[int],
    inputs: int | None,
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
    local: bool = False,
    pretrained: bool = False,
    length: float | None = None,
    output_noise: float = 1.0,
    steepest: float = 4.0,
) -> Suggestion:
    """Batch, epochs, clip and rate in the unit record; what is given is kept.

    Args:
        sizes: every node's declared size.
        inputs: of softmax regression, how many numbers an example has, each of about unit variance; None: of another model.
        epsilon: wanted total; or `noise_multiplier`.
        delta: total failure probability.
        noise_multiplier: when the noise is given instead.
        records_per_user: as in `Record`.
        spare_rounds: rounds paid for beyond the plan.
        mean_noise: standard deviation of the noise in the network's mean over that of independent noise (`Shares.independent`).
        batch_size: of every node.
        epochs: passes over the data.
        clip: of an example's gradient.
        momentum: of released updates.
        local: whether a part of the model is not shared.
        pretrained: of softmax regression, whether its inputs are features of a network that was trained on public data.
        length: of a linear model of a table with a schema, how long its inputs are, with the 1 of the bias.
        output_noise: of such a model, the standard deviation of an output that the noise of the run may cause (`Task.output_noise`).
        steepest: of such a model, the largest rate times the squared length (`Task.steepest`).
    """
    reasons, softmax = [], inputs is not None or length is not None
    if batch_size is None:
        batch_size = suggested_batch(sizes, softmax=softmax)
        part = batches(batch_size, sizes).rates[0]
        why = "large batches have less noise per example" if softmax else "larger ones gained nothing"
        reasons.append(f"batch {batch_size:g}: 1/{1 / part:.3g} of every node's examples; {why}")
    if epochs is None:
        epochs = suggested_epochs(batch_size, sizes, softmax=softmax)
        reasons.append(
            f"{epochs} epochs: at one epsilon more rounds add no noise to their sum, and beyond {ROUNDS} of them gain little"
        )
    if momentum is None:
        momentum = MOMENTUM if softmax and length is None else 0.0
        why = "it costs nothing, and steps as long as these would swing without it"
        reasons.append(f"momentum {momentum:g}: {why if momentum else 'it gained nothing'}")
    drawn = batches(batch_size, sizes)
    rounds, sampling = epochs * drawn.rounds(sizes), max(drawn.rates)
    if epsilon is None and noise_multiplier is None:
        raise UsageError("neither epsilon nor noise multiplier is given: a suggestion needs one of the two")
    paid = rounds + spare_rounds
    sigma = noise_multiplier or noise_for(epsilon or 0.0, delta, paid, gaussian, sampling, records_per_user)
    per_step = sigma * math.sqrt(rounds * mean_noise / len(sizes)) / drawn.mean  # in a parameter
    if clip is None:
        clip = suggested_clip(length, softmax=softmax)
        why = (
            "below most gradients, so that every example counts with its direction" if softmax else "as usual"
        )
        if length is not None:
            # at the largest rate, the clip whose noise is the allowed one
            affordable = output_noise * length * (1 - momentum) / (steepest * per_step)
            clip = _rounded(min(length, max(clip, affordable)))
            why = f"{clip / length:.2g} of the length of an example's inputs, so that probabilities can be used as such"
        reasons.append(f"clip {clip:g}: {why}")
    what, allowed, longest = "parameter", WITH_LOCAL if local else PARAMETER_NOISE, USUAL_LONGEST
    if length is not None:
        what, allowed, longest = "output", output_noise, steepest / length**2 * clip / (1 - momentum)
        per_step *= length
    elif inputs is not None:
        what, longest, (least, most) = "logit", LONGEST, LOGIT_NOISE
        allowed = PRETRAINED_NOISE if pretrained else max(least, most * min(1.0, NOISY * rounds / per_step))
        per_step *= math.sqrt(inputs)
    step = min(longest, allowed / per_step)
    why = (
        f"the noise of {rounds} rounds then moves a {what} by about {allowed:.2g}"
        if step < longest
        else f"the longest step, for there is little noise: {per_step * step:.2g} in a {what}"
    )
    rate = _rounded(step * (1 - momentum) / clip)
    reasons.append(f"rate {rate:g}, so that rate x clip / (1 - momentum) is {step:.3g}: {why}")
    return Suggestion(batch_size, epochs, clip, momentum, rate, sigma, tuple(reasons))


def _rounded(value: float) -> float:
    """To three digits: the rest means nothing."""
    return float(f"{value:.3g}")
