"""What noise that cancels costs: a node's message with nine partners, and a simulation of a thousand nodes with thirty partners each.

Claims: a message of d = 25,000 with secure noise and nine partners takes at most 3 times as long as without partners. A round of
N=1000, MLP, batch 20, unit record, partner graph of degree 30, is at most 1.5 times one without partners.
"""

from collections.abc import Iterator
from itertools import count

import torch
from learners import learner
from measure import Row, Work, compare, main

import dpps
from dpps.noise import IdentityKey, NoiseSource, Outgoing, PairKeys, SecureNoise, SecurePairs


def message(source: NoiseSource, dimension: int) -> Work:
    """What makes one node's message, round after round."""
    row, rounds = torch.zeros(1, dimension), count()
    gaussian = dpps.Gaussian(1.0)
    return lambda: source.release(
        gaussian, 1.0, Outgoing(row, row, row.clone(), [0], next(rounds), True, False)
    )


def with_partners(nodes: int) -> SecurePairs:
    """Node 0's source; every other node has a key of its own."""
    identities = [IdentityKey() for _ in range(nodes)]
    publics = [identity.public for identity in identities]
    keys = PairKeys(identities[0], publics, "benchmark", bytes(32))
    return SecurePairs(dpps.Pairs(nodes // 3).partners(nodes), keys)


def rows(quick: bool) -> Iterator[Row]:
    """The message, then the simulation."""
    dimension, turns = (100, 2) if quick else (25_000, 50)
    yield compare(
        f"message with 9 partners, secure noise, d={dimension:,}",
        message(with_partners(10), dimension),
        "without partners",
        message(SecureNoise(), dimension),
        turns,
        3.0,
    )
    nodes, batch, degree, turns = (40, 2, 8, 2) if quick else (1000, 20, 30, 7)
    colluders = 0 if quick else 10
    paired, plain = (
        learner(nodes, batch, 3 * batch, unit="record", trust=trust)
        for trust in (dpps.Pairs(colluders, degree=degree), dpps.Nobody())
    )
    yield compare(
        f"round of N={nodes}, {degree} partners each, MLP, batch {batch}",
        paired.step,
        "without partners",
        plain.step,
        turns,
        1.5,
    )


if __name__ == "__main__":
    main(rows, threads=1)
