"""Noise mechanisms and sources of randomness: seeded streams, or a secret keystream."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.noise.events import Event, gaussian, laplace, non_private, sampled
    from dpps.noise.mechanisms import MECHANISMS, Gaussian, Laplace, Mechanism, NoNoise
    from dpps.noise.pairs import (
        IdentityKey,
        MemberNoise,
        MemberPairs,
        PairKeys,
        PairRounds,
        Partners,
        RoundStream,
        SecurePairs,
        SeededPairs,
        Shares,
        gaussian_table,
    )
    from dpps.noise.sampler import Keystream
    from dpps.noise.source import (
        STEPS,
        NoiseLevel,
        NoiseSource,
        Outgoing,
        SecureNoise,
        Seeded,
        calibrate,
    )
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
