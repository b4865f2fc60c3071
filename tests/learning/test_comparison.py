"""Whether a change of accuracy is more than chance: the printed interval covers the truth in 95 % of cases."""

import numpy as np
import pytest

from dpps.learning import CONFIDENCE, change, compare_by_node, compare_on_one_set

DRAWS = 2_000


def draw(random: np.random.Generator, size: int, gained: float, lost: float) -> tuple[np.ndarray, np.ndarray]:
    """Of every example whether each of two models is right."""
    chance = random.random(size)
    return (chance >= gained) & (chance < gained + lost), chance < gained


@pytest.mark.parametrize(
    ("sizes", "gained", "lost"),
    [
        ((8, 72, 262), 0.15, 0.10),
        ((1000, 40, 12, 8), 0.15, 0.10),
        ((1000, 40, 12, 8), 0.25, 0.05),
        ((30, 60, 100, 200), 0.08, 0.06),
        ((30, 60, 100, 200), 0.30, 0.30),
        ((20,) * 6, 0.15, 0.10),
        ((50,) * 10, 0.25, 0.05),
    ],
)
def test_intervals_cover_the_truth(sizes: tuple[int, ...], gained: float, lost: float) -> None:
    """Nodes of very different sizes and gains; 93 to 97 % for the mean, for the pool and for the largest node."""
    random = np.random.default_rng(0)
    chances = [(gained * f, lost * (2 - f)) for f in np.linspace(0.5, 1.5, len(sizes))]
    truth, weights = np.array([100 * (b - c) for b, c in chances]), np.array(sizes) / sum(sizes)
    largest = int(np.argmax(sizes))
    covered = np.zeros(3)
    for _ in range(DRAWS):
        drawn = [draw(random, size, *chance) for size, chance in zip(sizes, chances, strict=True)]
        found = compare_by_node(*zip(*drawn, strict=True))
        estimates = (
            (found.mean, truth.mean()),
            (found.pooled, weights @ truth),
            (found.by_node[largest], truth[largest]),
        )
        covered += [abs(each.points - true) <= each.margin for each, true in estimates]
    slack = 4 * (0.95 * 0.05 / DRAWS) ** 0.5  # of the simulation itself
    assert np.all(covered / DRAWS > 0.93 - slack / 4), covered / DRAWS
    assert np.all(covered / DRAWS < 0.97 + slack), covered / DRAWS


def test_nodes_that_differ_in_size_are_no_pool() -> None:
    """The mean over nodes is as uncertain as its smallest node makes it: the pooled error does not describe it."""
    random = np.random.default_rng(1)
    drawn = [draw(random, size, 0.2, 0.1) for size in (8, 72, 262)]
    found = compare_by_node(*zip(*drawn, strict=True))
    assert found.mean.standard_error > 1.5 * found.pooled.standard_error


def test_nodes_on_one_test_set_share_its_chance() -> None:
    """Ten nodes with one model are measured once, not ten times."""
    random = np.random.default_rng(2)
    before, after = draw(random, 500, 0.2, 0.1)
    one, ten = change(before, after), compare_on_one_set([before] * 10, [after] * 10).mean
    assert ten.points == pytest.approx(one.points)
    assert ten.standard_error == pytest.approx(one.standard_error)


def test_models_that_agree_on_a_few_examples_show_nothing() -> None:
    right = np.array([True, False, True, True])
    found = change(right, right)
    assert found.points == 0
    assert found.standard_error > 10
    assert not found.shown


def test_the_error_is_that_of_paired_differences() -> None:
    """For many examples: the standard deviation of the differences over the root of their number."""
    random = np.random.default_rng(3)
    before, after = draw(random, 100_000, 0.2, 0.1)
    differences = after.astype(float) - before
    found = change(before, after)
    assert found.standard_error == pytest.approx(100 * differences.std() / len(before) ** 0.5, rel=1e-3)
    assert found.margin == CONFIDENCE * found.standard_error
