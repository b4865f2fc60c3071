"""Streams are what they are keyed by, and a seed means the same numbers on every machine."""

import math

import numpy as np
import pytest
from scipy import stats

from dpps.noise import DROPOUT, LOCAL_NOISE, NOISE, SAMPLING, Streams, key

PURPOSES = (NOISE, SAMPLING, LOCAL_NOISE, DROPOUT)


def test_stream_keys_never_collide():
    seen = {
        key(s, p, n, r)
        for s in (0, 1)
        for p in (NOISE, SAMPLING)
        for n in (0, 1, (1 << 26) - 1)
        for r in (0, 1, (1 << 34) - 1)
    }
    assert len(seen) == 2 * 2 * 3 * 3
    with pytest.raises(OverflowError):
        key(0, NOISE, 1 << 26, 0)


def test_a_moved_generator_equals_a_fresh_one():
    streams = Streams(3, NOISE)
    streams.at(1, 1).random(3, dtype=np.float32)  # leaves half a word in the buffer
    np.testing.assert_array_equal(
        streams.at(4, 9).random(5, dtype=np.float32), Streams(3, NOISE).at(4, 9).random(5, dtype=np.float32)
    )


def test_streams_of_neighbouring_keys_are_unrelated():
    streams = Streams(0, NOISE)
    rows = np.stack([streams.at(node, round_).random(4000) for node in range(8) for round_ in range(8)])
    correlation = np.corrcoef(rows) - np.eye(64)
    assert np.abs(correlation).max() < 6 / math.sqrt(4000)
    assert stats.kstest(rows[:, 0], "uniform").pvalue > 1e-3  # the first number of each stream, too


def _sfc64(a, b, c, counter, count):
    """Chris Doty-Humphrey's generator in whole numbers."""
    words, full = [], (1 << 64) - 1
    for _ in range(count):
        word, counter = (a + b + counter) & full, counter + 1
        a, b = b ^ (b >> 11), (c + (c << 3)) & full
        c = (((c << 24) | (c >> 40)) + word) & full
        words.append(word)
    return words


@pytest.mark.parametrize("purpose", range(len(PURPOSES)))
def test_a_seed_means_the_same_whole_numbers_everywhere(purpose):
    """Runs of an older version can be repeated: the purposes keep their numbers, the keys their layout."""
    seed, node, round_ = 0x1234_5678_9ABC_DEF0, 7, 1_000_003
    words = _sfc64(seed, (purpose << 60) | (round_ << 26) | node, 0x9E3779B97F4A7C15, 1, 12 + 20)
    stream = Streams(seed, PURPOSES[purpose]).at(node, round_)
    assert stream.bit_generator.random_raw(20).tolist() == words[12:]
