"""What can be read off messages: private values by a curious neighbour, training images by an observer.

**Reconstruction.** Averaging by gossip is linear and the weights are public. What a node hears in round t from node j is row j of
W(t-1) ... W(0) times the start values, so everything it has heard is a known matrix times the unknown start values, and least
squares gives every component in the matrix's row space. A node's value is recovered when its unit vector lies there, whether it
is a neighbour or not (Mrini, Cyffers, Bellet 2024, "Privacy attacks in decentralized learning").

With noise on the first message the same algebra gives value plus noise. The noise is drawn once, before the mixing, so listening
longer averages nothing out. With noise that cancels, the attacker subtracts what it shares with its partners, whose keys it has.

**Inversion.** A batch of one, and the paper's MLP with its first layer shared: the gradient of the layer is an outer product of the
error and the image, so its rows are multiples of the image, and the bias gradient says which. The attacker sees the real message of
`PartPSP`'s first round and knows the row before it. With noise, the best rank-one fit is taken, which pools the ten rows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from dpps.audit.epsilon import Wiretap
from dpps.audit.pairs import Matrix, known_noise, unknown_covariance
from dpps.data import Images, load
from dpps.errors import UsageError, needs_extra
from dpps.learning import PartPSP
from dpps.models import MLP
from dpps.noise import Gaussian, NoNoise, SecurePairs, Seeded, gaussian, laplace
from dpps.privacy import Contribution, NodeSwap, Pairs, Record, Unit, noise_for
from dpps.protocol import DPPS
from dpps.runs import Run, Simulation
from dpps.sensitivity import Bounded, Paper
from dpps.topology import Exponential, Topology

DELTA = 1e-5

# Pictures of what an attack has read: one line of images a setting, below the truth

Line = tuple[str, Sequence[NDArray[np.floating]]]
"""The label of a line, and its images."""


def check_picture(file: Path) -> None:
    """Refuse a file name before anything is computed for it."""
    if file.suffix.lower() not in (".png", ".svg"):
        raise UsageError(f"--plot {file}: use a name that ends in .png or .svg")
    if not file.parent.is_dir():
        raise UsageError(f"--plot {file}: the directory does not exist; create it first")
    with needs_extra("plots"):
        import matplotlib  # noqa: F401 - whether it is there


def _draw(file: Path, lines: Sequence[Line], heads: Sequence[str] = (), title: str = "") -> None:
    """Draw lines of equally many images, each with its own range of greys; above the first line, what each column shows."""
    check_picture(file)
    from matplotlib.figure import Figure

    columns = len(lines[0][1])
    figure = Figure(figsize=(1.0 * columns + 2.6, 1.05 * len(lines) + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for (name, images), row in zip(lines, axes, strict=True):
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        for axis, pixels in zip(row, images, strict=True):
            low, high = np.quantile(pixels, [0.01, 0.99])
            axis.imshow(pixels, cmap="gray", vmin=low, vmax=max(high, low + 1e-9))
            axis.set(xticks=[], yticks=[])
    for axis, head in zip(axes[0], heads, strict=False):
        axis.set_title(head, fontsize=7)
    figure.savefig(file, dpi=120)


# What a curious neighbour reconstructs

Kind = Literal["none", "independent", "cancelling"]

LARGEST_VALUE = 100.0
"""Private numbers lie between 0 and this."""
LONGEST_IMAGE = 10.0
"""Images (pixels from 0 to 1) are scaled down to this Euclidean norm; most are shorter."""
LARGEST_NETWORK = 512
"""Nodes: the row space comes from a dense matrix."""
LEAST_SINGULAR = 1e-10
"""Of the largest singular value: what is below drowns in the rounding of 64-bit numbers and does not count as known."""

_INSIDE = 1e-9  # squared distance of a unit vector from the row space
_REPEATS = {False: 100, True: 10}  # runs with other values and other noise: of one number a node, of images


@dataclass(frozen=True)
class Knowledge:
    """What one node hears over some rounds, as a matrix on the start values."""

    attacker: int
    matrix: Matrix
    """(messages, N), in the order of `heard`."""
    senders: tuple[tuple[int, ...], ...]
    """Who sends to it in each round; itself included."""

    @classmethod
    def of(cls, topology: Topology, attacker: int, rounds: int) -> "Knowledge":
        """From the public weights alone."""
        if not 0 <= attacker < topology.nodes:
            raise UsageError(f"attacker is {attacker}: the nodes are 0 to {topology.nodes - 1}")
        if rounds < 1:
            raise UsageError(f"rounds is {rounds}: the attacker must listen for 1 round or more")
        if topology.nodes > LARGEST_NETWORK:
            raise UsageError(f"nodes is {topology.nodes}: use {LARGEST_NETWORK} or fewer")
        mixed: Matrix = np.eye(topology.nodes)
        heard, senders = [], []
        for t in range(rounds):
            weights = topology.weights(t)
            row = weights.senders[slice(*weights.indptr[attacker : attacker + 2])]
            heard.append(mixed[row])
            senders.append(tuple(row.tolist()))
            mixed = weights.matrix @ mixed
        return cls(attacker, np.concatenate(heard), tuple(senders))

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Who sends to it."""
        return tuple(sorted({node for row in self.senders for node in row} - {self.attacker}))

    def heard(self, messages: Sequence[Tensor]) -> Matrix:
        """What it hears of the messages of all nodes, round by round."""
        return np.concatenate([m.numpy()[list(row)] for m, row in zip(messages, self.senders, strict=True)])

    @cached_property
    def _svd(self) -> tuple[Matrix, Matrix, Matrix]:
        left, values, right = np.linalg.svd(self.matrix, full_matrices=False)
        rank = int((values > LEAST_SINGULAR * values[0]).sum())
        return left[:, :rank], values[:rank], right[:rank]

    @property
    def rank(self) -> int:
        """How many independent equations it has."""
        return len(self._svd[1])

    @cached_property
    def recovered(self) -> tuple[int, ...]:
        """Other nodes whose unit vector lies in the row space: their values follow from what was heard."""
        outside = 1 - (self._svd[2] ** 2).sum(0)
        return tuple(int(i) for i in np.flatnonzero(outside < _INSIDE) if i != self.attacker)

    @property
    def hidden(self) -> tuple[int, ...]:
        """Other nodes of whom only sums with others are known, or nothing."""
        return tuple(i for i in range(self.matrix.shape[1]) if i != self.attacker and i not in self.recovered)

    def solve(self, heard: Matrix) -> Matrix:
        """The shortest least-squares solution, (N, d): right where recovered, the shortest guess elsewhere."""
        left, values, right = self._svd
        return right.T @ ((left.T @ heard) / values[:, None])

    def variances(self, noise: Matrix) -> Matrix:
        """Of that solution, by node, when the start values carry noise of this (N, N) covariance per coordinate."""
        right = self._svd[2]
        projector = right.T @ right
        return np.diag(projector @ noise @ projector)


@dataclass(frozen=True)
class Outcome:
    """What the attacker gets under one kind of noise. Errors are root mean squares per number over the recovered nodes.

    Attributes:
        epsilon: of all a node sends; infinite without noise.
        error: of what was reconstructed, measured; `theory` is the standard deviation of the least-squares estimator.
        mean_error: of the network's mean, which everybody wants to know.
        correlation: median over the recovered images.
        identified: recovered images picked out of all candidates; `images` counts them (0 for numbers).
        read: (N, d), of the first run.
    """

    noise: Kind
    epsilon: float
    error: float
    theory: float
    mean_error: float
    correlation: float | None
    identified: int
    images: int
    read: Matrix


@dataclass(frozen=True)
class Attack:
    """All outcomes, and the truth of the first run."""

    knowledge: Knowledge
    truth: Matrix
    outcomes: tuple[Outcome, ...]
    candidates: int
    """Images that the attacker chooses from; 0 for numbers."""


def reconstruct(
    topology: Topology,
    *,
    attacker: int = 0,
    rounds: int = 10,
    epsilons: Sequence[float] = (10.0, 3.0, 1.0),
    images: bool = False,
    seed: int = 0,
    repeats: int | None = None,
) -> Attack:
    """Let the nodes average, let one of them listen, and solve for the others' values.

    Args:
        topology: who sends to whom; public.
        attacker: the node that listens. It follows the protocol.
        rounds: for how long.
        epsilons: of the noise on what a node sends, delta 1e-5; each as independent and as cancelling noise.
        images: the private values are digits of mnist-mini, instead of one number a node.
        seed: of values and independent noise. The keys of cancelling noise come from the operating system.
        repeats: runs with other values and noise; by default 100, of images 10.
    """
    for epsilon in epsilons:
        if not 0 < epsilon < math.inf:
            raise UsageError(f"epsilon is {epsilon}: it must be above 0 and finite")
    knowledge = Knowledge.of(topology, attacker, rounds)
    candidates = _digits() if images else None
    runs = range(_REPEATS[images] if repeats is None else repeats)
    secrets = [_secrets(topology.nodes, candidates, seed + k) for k in runs]
    kinds: list[tuple[Kind, float]] = [("none", math.inf), *(("independent", e) for e in epsilons)]
    if topology.nodes > 2:  # noise shared with the attacker alone hides nothing
        kinds += [("cancelling", e) for e in epsilons]
    outcomes = tuple(
        _outcome(*noise, topology, knowledge, rounds, secrets, candidates, seed + number * len(runs))
        for number, noise in enumerate(kinds)
    )
    return Attack(knowledge, secrets[0].numpy(), outcomes, 0 if candidates is None else len(candidates))


def _digits() -> Tensor:
    train = load("mnist-mini").train
    assert isinstance(train, Images)
    pixels = train.pixels.flatten(1).double() / 255
    length: Tensor = torch.linalg.vector_norm(pixels, dim=1, keepdim=True)
    return pixels * (LONGEST_IMAGE / length).clamp(max=1.0)


def _secrets(nodes: int, candidates: Tensor | None, seed: int) -> Tensor:
    """The nodes' private rows, (N, d)."""
    stream = np.random.default_rng([seed, nodes])
    if candidates is None:
        return torch.from_numpy(stream.uniform(0, LARGEST_VALUE, (nodes, 1)))
    return candidates[torch.from_numpy(stream.choice(len(candidates), nodes, replace=False))]


def _outcome(
    kind: Kind,
    epsilon: float,
    topology: Topology,
    knowledge: Knowledge,
    rounds: int,
    secrets: Sequence[Tensor],
    candidates: Tensor | None,
    seed: int,
) -> Outcome:
    nodes, attacker, chosen = topology.nodes, knowledge.attacker, list(knowledge.recovered)
    mechanism = NoNoise() if kind == "none" else Gaussian(noise_for(epsilon, DELTA, 1, gaussian))
    # Only the start values are private: the rounds after the first reveal nothing new and need no noise.
    # Pixels are not negative, so two images are at a right angle at most.
    furthest = LARGEST_VALUE if candidates is None else math.sqrt(2) * LONGEST_IMAGE
    bound = None if kind == "none" else Bounded(clip=0.0, start_distance=furthest)
    partners = Pairs(colluders=1).partners(nodes) if kind == "cancelling" else None
    others = [k for k in range(nodes) if k != attacker]  # the attacker knows its own noise
    unknown = np.zeros((nodes, nodes))
    alone = np.eye(len(others))
    unknown[np.ix_(others, others)] = alone if partners is None else unknown_covariance(partners, others)
    squares, means, scale, reads = [], [], 0.0, []
    for k, secret in enumerate(secrets):
        wire = Wiretap(nodes)
        source = Seeded(seed + k) if partners is None else SecurePairs(partners)
        protocol = DPPS(topology, mechanism, bound, noise=source, fabric=wire)
        state = protocol.start(secret)
        scale, *_ = [protocol.step(state).scale for _ in range(rounds)]
        heard = knowledge.heard(wire.messages)
        if isinstance(
            source, SecurePairs
        ):  # what the attacker shares went through the same mixing as the values
            heard -= knowledge.matrix @ known_noise(source, [attacker], scale, 0, secret.shape[1])
        read = knowledge.solve(heard)
        squares.append(np.mean((read - secret.numpy())[chosen] ** 2) if chosen else math.nan)
        means.append(float(((state.s.mean(0) - secret.mean(0)) ** 2).mean()))
        reads.append(read)
    variances = knowledge.variances(scale**2 * unknown)[chosen]
    theory = math.sqrt(max(0.0, variances.mean())) if chosen else math.nan
    correlation, identified, count = None, 0, 0
    if candidates is not None and chosen:
        read = np.concatenate([r[chosen] for r in reads])
        truth = np.concatenate([s.numpy()[chosen] for s in secrets])
        correlation, identified, count = *_likeness(read, truth, candidates.numpy()), len(truth)
    error, mean_error = (math.sqrt(float(np.mean(x))) for x in (squares, means))
    return Outcome(kind, epsilon, error, theory, mean_error, correlation, identified, count, reads[0])


def _likeness(read: Matrix, truth: Matrix, candidates: Matrix) -> tuple[float, int]:
    """The median correlation with the truth, and how often the nearest of all candidates is the truth."""
    correlations = [float(np.corrcoef(r, t)[0, 1]) for r, t in zip(read, truth, strict=True)]
    distances = (candidates**2).sum(1) - 2 * read @ candidates.T  # up to what is the same for all candidates
    nearest = candidates[distances.argmin(1)]
    return float(np.median(correlations)), int((nearest == truth).all(1).sum())


def draw_reconstruction(file: Path, attack: Attack, title: str) -> None:
    """Draw the images of the first nodes other than the attacker, and what was reconstructed of them, one line a noise."""
    if not attack.candidates:
        raise UsageError("a picture needs images: add --images")
    known, side = attack.knowledge, math.isqrt(attack.truth.shape[1])
    nodes = [i for i in range(len(attack.truth)) if i != known.attacker][:10]
    lines = [("the truth", attack.truth)]
    for outcome in attack.outcomes:
        if outcome.noise != "cancelling":  # as foggy: the table has it
            name = "no noise" if outcome.noise == "none" else f"noise, epsilon {outcome.epsilon:g}"
            lines.append((f"{name}\nerror {outcome.error:.2g}", outcome.read))
    heads = [
        f"node {node}\n{'neighbour' if node in known.neighbours else 'beyond'}"
        + ("\nin sums only" if node in known.hidden else "")
        for node in nodes
    ]
    rows = [(name, [values[node].reshape(side, side) for node in nodes]) for name, values in lines]
    _draw(file, rows, heads, title)


# Training images read off messages

_NODES = 10
_ROUNDS = 720
"""The run that the noise is for: 12 epochs of MNIST over ten nodes."""
_SAMPLING = 1 / 60
"""Its batch of 100 out of 6,000. In the unit record the attacker knows that the image was in the batch,
and all the rest of it."""


@dataclass(frozen=True)
class Probe:
    """How well images were read off messages."""

    setting: str
    correlation: float
    """Median over the images, between what was read and the image; 1 is a perfect copy."""
    identified: int
    """How often the image was picked out of all candidates."""
    images: int
    candidates: int
    read: Tensor
    """(images, height, width)."""


def _settings() -> dict[str, Unit | None]:
    """What protects the messages: nothing, the paper's noise, and the two other units at a total epsilon."""
    round_epsilon = 1 / noise_for(8.0, DELTA, _ROUNDS, laplace)
    multiplier = noise_for(3.0, DELTA, _ROUNDS, gaussian, sampling=_SAMPLING)
    return {
        "no noise": None,
        "paper, b = 5, noise rate 0.001": NodeSwap(5.0, 1e-3, Paper(0.78, 0.55)),
        "contribution, total epsilon 8": Contribution(30.0, delta=DELTA, round_epsilon=round_epsilon),
        "record, total epsilon 3": Record(delta=DELTA, noise_multiplier=multiplier),
    }


def invert(images: int = 100, seed: int = 0) -> tuple[Tensor, list[Probe]]:
    """Read so many images of mnist-mini off messages under every setting; the images, and what came out."""
    if images < _NODES or images % _NODES:
        raise UsageError(f"{images} images: use a multiple of {_NODES}, one image per node and run")
    train = load("mnist-mini").train
    inputs, labels = train.inputs()[:, :1], train.labels
    if images > len(labels):
        raise UsageError(f"{images} images: mnist-mini has {len(labels)}")
    groups = [slice(first, first + _NODES) for first in range(0, images, _NODES)]
    candidates, probes = _normalised(inputs), []
    for name, unit in _settings().items():
        read = torch.cat([_read(unit, inputs[g], labels[g], seed + k) for k, g in enumerate(groups)])
        correlations = (
            _normalised(read) @ candidates.T
        )  # with every candidate; the first ones are the true images
        right = int((correlations.argmax(1) == torch.arange(images)).sum())
        own = float(correlations.diagonal().median())
        probes.append(Probe(name, own, right, images, len(inputs), read))
    return inputs[:images, 0], probes


def _read(unit: Unit | None, inputs: Tensor, labels: Tensor, seed: int) -> Tensor:
    """One round of a real network, one image per node; what an observer of the messages makes of them."""
    torch.manual_seed(seed)
    wire = Wiretap(_NODES)
    data = [TensorDataset(x[None], t[None]) for x, t in zip(inputs, labels, strict=True)]
    algorithm = PartPSP(MLP(), ["layer1"], batch_size=1)
    where: dict[str, Any] = {"topology": Exponential(_NODES), "deployment": Simulation(wire)}
    run = Run(algorithm, data, privacy=unit, seed=seed, noise=Seeded(seed), **where).start(epochs=1)
    start = run.state.shared.s.clone()
    run.step()
    # an update of layer1 is a multiple of error (x, 1), and noise: the image x is the leading right singular vector
    updates = [algorithm.partition.views(row, None) for row in wire.messages[0] - start]
    both = [torch.cat([u["layer1.weight"], u["layer1.bias"][:, None]], 1).double() for u in updates]
    vectors = torch.linalg.svd(torch.stack(both), full_matrices=False).Vh[:, 0]
    read: Tensor = (vectors[:, :-1] / vectors[:, -1:]).float().view(-1, *inputs.shape[2:])
    return read


def _normalised(images: Tensor) -> Tensor:
    flat = images.flatten(1)
    return F.normalize(flat - flat.mean(1, keepdim=True))


def draw_inversion(file: Path, images: Tensor, probes: Iterable[Probe]) -> None:
    """Draw the first images and what was read of them, one line per setting."""
    lines = [("training images", images)]
    lines += [(f"{p.setting}\ncorrelation {p.correlation:.2f}", p.read) for p in probes]
    _draw(file, [(name, list(pictures[:8].numpy())) for name, pictures in lines])
