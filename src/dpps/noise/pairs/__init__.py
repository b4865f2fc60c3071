"""Noise that partners share, and that cancels in the sum: keys, exact samples, and the sources made of them."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.noise.pairs.graph import Partners, Shares
    from dpps.noise.pairs.keys import IdentityKey, PairKeys, RoundStream
    from dpps.noise.pairs.sources import (
        GaussianTable,
        MemberNoise,
        MemberPairs,
        PairRounds,
        Part,
        SecurePairs,
        SeededPairs,
        gaussian_table,
        lattice_slack,
        table_slack,
    )
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
