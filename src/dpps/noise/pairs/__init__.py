"""Noise that partners share, and that cancels in the sum: keys, exact samples, and the sources made of them."""

from dpps.noise.pairs.keys import IdentityKey, PairKeys, RoundStream
from dpps.noise.pairs.rounds import PairRounds, Part
from dpps.noise.pairs.sources import (
    MemberNoise,
    MemberPairs,
    Partners,
    SecurePairs,
    SeededPairs,
    lattice_slack,
)
from dpps.noise.pairs.table import GaussianTable, gaussian_table, table_slack

__all__ = [
    "GaussianTable",
    "IdentityKey",
    "MemberNoise",
    "MemberPairs",
    "PairKeys",
    "PairRounds",
    "Part",
    "Partners",
    "RoundStream",
    "SecurePairs",
    "SeededPairs",
    "gaussian_table",
    "lattice_slack",
    "table_slack",
]
