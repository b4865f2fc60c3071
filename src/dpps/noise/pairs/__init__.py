"""Noise that partners share, and that cancels in the sum: keys, exact samples, and the sources made of them."""

from dpps.noise.pairs.graph import Partners, Shares
from dpps.noise.pairs.keys import IdentityKey, PairKeys, RoundStream
from dpps.noise.pairs.sources import SecurePairs, SeededPairs, lattice_slack
from dpps.noise.pairs.table import GaussianTable, gaussian_table, table_slack
