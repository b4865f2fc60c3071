"""What is read off messages: values exactly where the row space says so and not below the noise; images without noise only."""

import math
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from dpps.audit import (
    Attack,
    Knowledge,
    Wiretap,
    check_picture,
    draw_inversion,
    draw_reconstruction,
    invert,
    leaks,
    reconstruct,
)
from dpps.audit.leaks import DELTA, LARGEST_VALUE
from dpps.errors import UsageError
from dpps.noise import NoNoise, gaussian, laplace
from dpps.privacy import Pairs, noise_for
from dpps.protocol import DPPS
from dpps.topology import TOPOLOGIES, Complete, Exponential, Ring, parse


def heard(topology, attacker: int, rounds: int, values: np.ndarray) -> np.ndarray:
    wire = Wiretap(topology.nodes)
    protocol = DPPS(topology, NoNoise(), fabric=wire)
    state = protocol.start(torch.from_numpy(values))
    for _ in range(rounds):
        protocol.step(state)
    return Knowledge.of(topology, attacker, rounds).heard(wire.messages)


def test_a_ring_is_recovered_as_dense_matrices_say():
    nodes, attacker, rounds = 9, 4, 4
    values = np.random.default_rng(1).normal(size=(nodes, 3))
    weights = sum(np.roll(np.eye(nodes), shift, axis=0) for shift in (-1, 0, 1)) / 3
    rows = [np.linalg.matrix_power(weights, t)[[3, 4, 5]] for t in range(rounds)]
    oracle = np.concatenate(rows)
    known = Knowledge.of(Ring(nodes), attacker, rounds)
    np.testing.assert_allclose(known.matrix, oracle, atol=1e-12)
    messages = heard(Ring(nodes), attacker, rounds, values)
    np.testing.assert_allclose(messages, oracle @ values, atol=1e-12)
    assert known.neighbours == (3, 5)
    assert known.recovered == (0, 1, 2, 3, 5, 6, 7, 8)
    solved = known.solve(messages)
    np.testing.assert_allclose(solved, np.linalg.lstsq(oracle, oracle @ values, rcond=None)[0], atol=1e-9)
    np.testing.assert_allclose(solved, values, atol=1e-9)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_on_a_ring_every_round_reaches_one_node_further_on_both_sides(rounds):
    known = Knowledge.of(Ring(12), 0, rounds)
    assert set(known.recovered) == {k % 12 for k in range(-rounds, rounds + 1) if k}
    assert set(known.recovered) | set(known.hidden) | {0} == set(range(12))


@pytest.mark.parametrize("rounds", [3, 10])
@pytest.mark.parametrize("name", TOPOLOGIES.names())
def test_nobody_outside_the_row_space_is_recovered(name, rounds):
    nodes = 8
    topology = parse(name.replace("K", "2"), nodes)
    known = Knowledge.of(topology, 1, rounds)
    rank = np.linalg.matrix_rank(known.matrix)
    inside = [
        i
        for i in range(nodes)
        if i != 1 and np.linalg.matrix_rank(np.vstack([known.matrix, np.eye(nodes)[i]])) == rank
    ]
    assert list(known.recovered) == inside
    # other values of the hidden nodes, and of nobody else, under which the attacker hears the very same
    silent = np.linalg.svd(known.matrix)[2][rank:]
    values = np.random.default_rng(2).normal(size=(nodes, 1))
    for direction in silent:
        other = values + 10 * direction[:, None]
        np.testing.assert_allclose(
            heard(topology, 1, rounds, values), heard(topology, 1, rounds, other), atol=1e-12
        )
        np.testing.assert_allclose(direction[inside], 0, atol=1e-9)
    for i in known.hidden:
        assert np.abs(silent[:, i]).max() > 1e-3


def test_exponential_graphs_give_away_one_neighbour():
    assert Knowledge.of(Exponential(8), 0, 20).recovered == (7,)
    assert Knowledge.of(Complete(5), 0, 1).recovered == (1, 2, 3, 4)


@lru_cache(maxsize=1)
def attack_on_images() -> Attack:
    return reconstruct(Ring(8), attacker=2, rounds=6, epsilons=(3.0,), images=True, seed=4, repeats=1)


def test_with_noise_the_error_is_that_of_least_squares():
    attack = attack_on_images()
    none, independent, cancelling = attack.outcomes
    assert none.error < 1e-9
    assert none.identified == none.images == 7
    scale = noise_for(3.0, DELTA, 1, gaussian) * math.sqrt(200)
    shares = Pairs(colluders=1).partners(8).shares()
    # a node shares noise with six others than the attacker
    variance = shares.independent**2 + 6 * shares.pair**2
    assert independent.theory == pytest.approx(scale, rel=1e-6)
    assert cancelling.theory == pytest.approx(scale * math.sqrt(variance), rel=1e-3)
    for outcome in (independent, cancelling):  # 7 x 784 numbers: the error is known to 1 %
        assert 0.93 < outcome.error / outcome.theory < 1.07
        assert outcome.correlation is not None
        assert abs(outcome.correlation) < 0.2
    assert cancelling.mean_error < 0.7 * independent.mean_error


def test_the_attacker_takes_out_the_noise_that_it_shares():
    attack = attack_on_images()
    cancelling = attack.outcomes[-1]
    rest = (cancelling.read - attack.truth)[list(attack.knowledge.recovered)].sum(0)
    scale = noise_for(3.0, DELTA, 1, gaussian) * math.sqrt(200)
    # what the seven share with each other cancels in their sum, so their own noise is left
    expected = 7 * (Pairs(colluders=1).partners(8).shares().independent * scale) ** 2
    assert 0.75 < float((rest**2).mean()) / expected < 1.25  # five deviations


def test_listening_longer_does_not_help():
    short, long = (
        reconstruct(Ring(4), rounds=rounds, epsilons=(1.0,), seed=1, repeats=3).outcomes[1]
        for rounds in (2, 12)
    )
    assert long.error == pytest.approx(short.error, rel=1e-6)
    assert long.theory == pytest.approx(noise_for(1.0, DELTA, 1, gaussian) * LARGEST_VALUE, rel=1e-6)


def test_two_nodes_have_no_cancelling_noise():
    attack = reconstruct(Ring(2), epsilons=(1.0,), repeats=1)
    assert [o.noise for o in attack.outcomes] == ["none", "independent"]


def test_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    draw_reconstruction(tmp_path / "x.png", attack_on_images(), "title")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    numbers = reconstruct(Ring(2), epsilons=(1.0,), repeats=1)
    with pytest.raises(UsageError, match="--images"):
        draw_reconstruction(tmp_path / "x.png", numbers, "title")


# Training images


def test_images_are_read_off_messages_without_noise_and_not_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = {laplace: 1 / 0.0629, gaussian: 0.954}  # what noise_for finds, in seconds
    monkeypatch.setattr(leaks, "noise_for", lambda *given, **_: solved[given[3]])
    images, probes = invert(images=20, seed=3)
    plain, paper, contribution, record = probes
    assert plain.correlation > 0.999
    assert plain.identified == 20
    assert paper.correlation > 0.6  # the paper's noise blurs the image and does not hide it
    for protected in (contribution, record):
        assert abs(protected.correlation) < 0.2
        assert protected.identified <= 1
    draw_inversion(tmp_path / "read.png", images, probes)
    assert (tmp_path / "read.png").stat().st_size > 1_000
    with pytest.raises(UsageError, match="png"):
        draw_inversion(tmp_path / "read.txt", images, probes)
    with pytest.raises(UsageError, match=r"5 images: .*10"):
        invert(images=5)


# Pictures


def test_lines_of_images_are_drawn_with_their_names(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    images = list(np.random.default_rng(0).random((3, 4, 4)))
    flat = [np.zeros((4, 4))] * 3  # no range of greys at all
    leaks._draw(
        tmp_path / "lines.svg", [("the truth", images), ("nothing", flat)], ["a", "b", "c"], "a title"
    )
    drawing = (tmp_path / "lines.svg").read_text()
    assert drawing.count("<image ") == 6
    assert all(f"<!-- {text} -->" in drawing for text in ("the truth", "nothing", "a", "b", "c", "a title"))


@pytest.mark.parametrize(("name", "remedy"), [("read.txt", "png or .svg"), ("nowhere/read.png", "nowhere")])
def test_a_wrong_file_name_is_refused_before_anything_is_computed(
    tmp_path: Path, name: str, remedy: str
) -> None:
    with pytest.raises(UsageError, match=remedy):
        check_picture(tmp_path / name)
