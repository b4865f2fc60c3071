"""What 1,000 participants of 60 MNIST examples reach when the mean is exact: whole participants protected, without simulating a network.

    python scripts/exact_mean.py --epsilon 8 --rate 3
    python scripts/exact_mean.py --epsilon 3 --rate 2

Softmax regression on scattering features, 20 rounds, every participant's gradient clipped at 0.1, momentum 0.8, delta 1e-5. The noise in the mean is that
of `--trust pairs --colluders 10`; after enough exchanges a round (`--mixes`) all rows of a network are this mean. Half a minute of one
core, which finds the rate for the network's own run: `scripts/cancelling.py contribution`.
"""

import argparse
import math

import torch
import torch.nn.functional as F

import dpps
from dpps import data, features
from dpps.noise import gaussian
from dpps.privacy import noise_for

NODES, EACH, ROUNDS, CLIP, MOMENTUM, COLLUDERS, AT_ONCE = 1000, 60, 20, 0.1, 0.8, 10, 100


def main() -> None:
    """Train, and print the accuracy on the test set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epsilon", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    images = data.load("mnist", None, progress=False)
    found = features.of_data_set(images, "scattering", data.folder_beside("mnist", None), progress=False)
    random = torch.Generator().manual_seed(given.seed)
    order = torch.randperm(NODES * EACH, generator=random)
    x, labels = found.train.inputs().flatten(1).float()[order], found.train.labels[order]
    wanted = F.one_hot(labels, found.classes).float()
    multiplier = noise_for(given.epsilon, 1e-5, ROUNDS, gaussian)
    shares = dpps.Pairs(COLLUDERS).partners(NODES).shares()
    deviation = 2 * CLIP * multiplier * shares.independent / math.sqrt(NODES)
    weights = torch.zeros(x.shape[1], found.classes)
    velocity = torch.zeros_like(weights)
    for _ in range(ROUNDS):
        mean = deviation * torch.randn(weights.shape, generator=random)
        for first in range(0, NODES, AT_ONCE):
            part = slice(first * EACH, (first + AT_ONCE) * EACH)
            wrong = (x[part] @ weights).softmax(1) - wanted[part]
            of_each = [rows.view(AT_ONCE, EACH, -1) for rows in (x[part], wrong)]
            gradients = torch.bmm(of_each[0].mT, of_each[1]) / EACH
            norms = gradients.flatten(1).norm(dim=1)
            mean += (gradients * (CLIP / norms).clamp(max=1)[:, None, None]).sum(0) / NODES
        velocity = MOMENTUM * velocity + mean
        weights -= given.rate * velocity
    right = (found.test.inputs().flatten(1).float() @ weights).argmax(1) == found.test.labels
    print(f"epsilon {given.epsilon:g}, seed {given.seed}: {100 * float(right.double().mean()):.2f} %")


if __name__ == "__main__":
    main()
