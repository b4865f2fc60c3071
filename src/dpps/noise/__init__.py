"""Noise: mechanisms, and where random numbers come from (seeded streams, or a keystream nobody else can know)."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.noise.calibration import NoiseLevel, calibrate
    from dpps.noise.discrete import (
        discrete_gaussian_multiplier,
        discrete_gaussian_slack,
        discrete_laplace_epsilon,
    )
    from dpps.noise.events import GAUSSIAN, LAPLACE, POISSON, Event, gaussian, laplace, non_private, sampled
    from dpps.noise.keystream import (
        Keystream,
        exact_acceptance,
        exact_geometric,
        gaussian_slack,
        laplace_slack,
    )
    from dpps.noise.mechanisms import MECHANISMS, Gaussian, Laplace, Mechanism, NoNoise
    from dpps.noise.pair_keys import IdentityKey, PairKeys, RoundStream
    from dpps.noise.pairs import Partners, SecurePairs, SeededPairs, lattice_slack
    from dpps.noise.secure import STEPS, SecureNoise, power_of_two_below, whole_steps
    from dpps.noise.source import NoiseSource, Outgoing, Seeded
    from dpps.noise.streams import DROPOUT, LOCAL_NOISE, NOISE, SAMPLING, Streams, fresh_seed, key
    from dpps.noise.table import GaussianTable, gaussian_table, table_slack

__all__ = [
    "DROPOUT",
    "GAUSSIAN",
    "LAPLACE",
    "LOCAL_NOISE",
    "MECHANISMS",
    "NOISE",
    "POISSON",
    "SAMPLING",
    "STEPS",
    "Event",
    "Gaussian",
    "GaussianTable",
    "IdentityKey",
    "Keystream",
    "Laplace",
    "Mechanism",
    "NoNoise",
    "NoiseLevel",
    "NoiseSource",
    "Outgoing",
    "PairKeys",
    "Partners",
    "RoundStream",
    "SecureNoise",
    "SecurePairs",
    "Seeded",
    "SeededPairs",
    "Streams",
    "calibrate",
    "discrete_gaussian_multiplier",
    "discrete_gaussian_slack",
    "discrete_laplace_epsilon",
    "exact_acceptance",
    "exact_geometric",
    "fresh_seed",
    "gaussian",
    "gaussian_slack",
    "gaussian_table",
    "key",
    "laplace",
    "laplace_slack",
    "lattice_slack",
    "non_private",
    "power_of_two_below",
    "sampled",
    "table_slack",
    "whole_steps",
]
__getattr__, __dir__ = lazy_imports(__name__)
