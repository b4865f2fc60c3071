"""An illustration: reading a training image off a message.

A batch of one, and the paper's MLP with its first layer shared: the gradient of the layer is an outer product of the error and
the image, so its rows are multiples of the image, and the bias gradient says which. The attacker sees the real message of
`PartPSP`'s first round and knows the row before it. With noise, the best rank-one fit is taken, which pools the ten rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpps.audit.pictures import draw
from dpps.audit.wiretap import Wiretap
from dpps.data import load
from dpps.errors import UsageError
from dpps.learning.partpsp import PartPSP
from dpps.models import MLP
from dpps.noise import events
from dpps.noise.source import Seeded
from dpps.privacy.accountant import noise_for
from dpps.privacy.units import Contribution, NodeSwap, Record, Unit
from dpps.runs.deployment import Simulation
from dpps.runs.run import Run
from dpps.sensitivity import Paper
from dpps.topology import Exponential

NODES = 10
ROUNDS, DELTA = 720, 1e-5
"""The run that the noise is for: 12 epochs of MNIST over ten nodes."""
SAMPLING = 1 / 60
"""Its batch of 100 out of 6,000. In the unit record the attacker is told that the image was in the batch,
and all the rest of it."""
_SHOWN = 8  # images in a picture


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


def settings() -> dict[str, Unit | None]:
    """What protects the messages: nothing, the paper's noise, and the two other units at a total epsilon."""
    laplace = 1 / noise_for(8.0, DELTA, ROUNDS, events.laplace)
    gaussian = noise_for(3.0, DELTA, ROUNDS, events.gaussian, sampling=SAMPLING)
    return {
        "no noise": None,
        "paper, b = 5, noise rate 0.001": NodeSwap(5.0, 1e-3, Paper(0.78, 0.55)),
        "contribution, total epsilon 8": Contribution(30.0, delta=DELTA, round_epsilon=laplace),
        "record, total epsilon 3": Record(delta=DELTA, noise_multiplier=gaussian),
    }


def invert(images: int = 100, seed: int = 0) -> tuple[Tensor, list[Probe]]:
    """Read so many images of mnist-mini off messages under every setting; the images, and what came out."""
    if images < NODES or images % NODES:
        raise UsageError(f"{images} images: use a multiple of {NODES}, one image per node and run")
    train = load("mnist-mini").train
    inputs, labels = train.inputs()[:, :1], train.labels
    if images > len(labels):
        raise UsageError(f"{images} images: mnist-mini has {len(labels)}")
    probes = [
        _probe(name, _read_all(unit, inputs[:images], labels[:images], seed), inputs)
        for name, unit in settings().items()
    ]
    return inputs[:images, 0], probes


def _read_all(unit: Unit | None, inputs: Tensor, labels: Tensor, seed: int) -> Tensor:
    groups = [slice(first, first + NODES) for first in range(0, len(inputs), NODES)]
    return torch.cat([_read(unit, inputs[g], labels[g], seed + k) for k, g in enumerate(groups)])


def _read(unit: Unit | None, inputs: Tensor, labels: Tensor, seed: int) -> Tensor:
    """One round of a real network, one image per node; what an observer of the messages makes of them."""
    torch.manual_seed(seed)
    wire = Wiretap(NODES)
    data = [TensorDataset(x[None], t[None]) for x, t in zip(inputs, labels, strict=True)]
    algorithm = PartPSP(MLP(), ["layer1"], batch_size=1)
    run = Run(
        algorithm,
        data,
        topology=Exponential(NODES),
        privacy=unit,
        seed=seed,
        noise=Seeded(seed),
        deployment=Simulation(wire),
    ).start(epochs=1)
    start = run.state.shared.s.clone()
    run.step()
    updates = wire.messages[0] - start
    read = torch.stack([_image(algorithm.partition.views(row, None)) for row in updates])
    return read.view(-1, *inputs.shape[2:])


def _image(update: dict[str, Tensor]) -> Tensor:
    """The image x from an update of layer1, a multiple of error (x, 1) and noise: the leading right singular vector."""
    both = torch.cat([update["layer1.weight"], update["layer1.bias"][:, None]], dim=1)
    vector = torch.linalg.svd(both.double(), full_matrices=False).Vh[0]
    image: Tensor = (vector[:-1] / vector[-1]).float()
    return image


def _probe(name: str, read: Tensor, candidates: Tensor) -> Probe:
    """Correlate what was read with every candidate; the first ones are the true images."""
    correlations = _normalised(read) @ _normalised(candidates).T
    own = correlations.diagonal()
    right = int((correlations.argmax(1) == torch.arange(len(read))).sum())
    return Probe(name, float(own.median()), right, len(read), len(candidates), read)


def _normalised(images: Tensor) -> Tensor:
    flat = images.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    length: Tensor = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    return centred / length


def picture(file: Path, images: Tensor, probes: Iterable[Probe]) -> None:
    """Draw the first images and what was read of them, one line per setting."""
    lines = [("training images", images)]
    lines += [(f"{p.setting}\ncorrelation {p.correlation:.2f}", p.read) for p in probes]
    draw(file, [(name, list(pictures[:_SHOWN].numpy())) for name, pictures in lines])
