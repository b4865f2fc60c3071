"""Discrete Gaussian noise by table: its probabilities, and the bits it is made of."""

import math

import numpy as np
import pytest
from scipy.stats import chisquare

from dpps.errors import UsageError
from dpps.noise import GaussianTable, RoundStream, gaussian_table, table_slack


def probabilities(deviation: float, last: int) -> np.ndarray:
    weights = np.exp(-(np.arange(-last, last + 1) ** 2) / (2 * deviation**2))
    return weights / weights.sum()


@pytest.mark.parametrize("deviation", [2.0, 4.0625, 37.0])
def test_the_distribution_function_is_that_of_the_discrete_gaussian(deviation: float) -> None:
    table = GaussianTable(deviation)
    steps = np.diff(np.array([0, *table._exact, 1 << 256], dtype=object)) / 2**256
    assert np.allclose(steps.astype(float), probabilities(deviation, table.last), rtol=1e-12, atol=0)


def test_samples_pass_a_test_that_a_tenth_more_noise_fails() -> None:
    table = gaussian_table(6.0)
    drawn = table.draw(RoundStream(bytes(range(32)), 3), 200_000)
    edges = np.arange(-15, 16)
    counted = np.array(
        [(drawn <= -15).sum(), *((drawn == k).sum() for k in edges[1:-1]), (drawn >= 15).sum()]
    )

    def expected(deviation: float) -> np.ndarray:
        p = probabilities(deviation, table.last)
        middle = table.last
        return np.array(
            [p[: middle - 14].sum(), *(p[middle + k] for k in edges[1:-1]), p[middle + 15 :].sum()]
        )

    assert chisquare(counted, expected(6.0) * drawn.size).pvalue > 1e-4
    assert chisquare(counted, expected(6.6) * drawn.size).pvalue < 1e-6


def test_guide_and_slow_path_agree_with_comparing_all_bits() -> None:
    """Bits chosen at, just below and just above thresholds, where the guide cannot decide."""
    table = GaussianTable(5.0)
    values = []
    for f in table._exact[50:90]:
        values += [f, f - 1, f + 1, (f >> 192 << 192), (f >> 192 << 192) - 1]
    parts = [b"".join((v >> 240).to_bytes(2, "little") for v in values)]
    open_ = [v for v in values if table._guide[v >> 240] == -(1 << 31)]
    parts.append(b"".join(((v >> 192 & (1 << 48) - 1) << 16).to_bytes(8, "little") for v in open_))
    ties = [v for v in open_ if (v >> 192) in {f >> 192 for f in table._exact}]
    parts.append(b"".join((v & (1 << 192) - 1).to_bytes(24, "little") for v in ties))

    def stream(part: int, count: int) -> bytes:
        assert count == len(parts[part])
        return parts[part]

    wanted = [sum(f <= v for f in table._exact) - table.last for v in values]
    assert table.draw(stream, len(values)).tolist() == wanted
    assert ties


def test_the_slack_is_next_to_nothing_and_sizes_are_checked() -> None:
    assert 0 < table_slack(10**12) < 1e-29
    assert math.isfinite(table_slack(1))
    with pytest.raises(UsageError, match=r"pair noise of 1\.5 steps"):
        GaussianTable(1.5)
