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

__getattr__, __dir__, __all__ = lazy_imports(__name__)
