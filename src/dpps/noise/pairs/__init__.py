"""Noise that partners share, and that cancels in the sum: keys, exact samples, and the sources made of them."""

from typing import TYPE_CHECKING

from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.noise.pairs.graph import Partners, Shares
    from dpps.noise.pairs.keys import IdentityKey, PairKeys, RoundStream
    from dpps.noise.pairs.rounds import PairRounds, Part
    from dpps.noise.pairs.sources import (
        MemberNoise,
        MemberPairs,
        SecurePairs,
        SeededPairs,
        lattice_slack,
    )
    from dpps.noise.pairs.table import GaussianTable, gaussian_table, table_slack
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
