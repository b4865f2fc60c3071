"""Noise that cancels: the covariance that the promise rests on, keys that are never given out twice, and exact samples."""

import math
import os
import stat
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path

import networkx
import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from dpps.errors import RunError, UsageError
from dpps.noise import (
    Gaussian,
    IdentityKey,
    Laplace,
    NoiseSource,
    Outgoing,
    PairKeys,
    SecureNoise,
    SecurePairs,
    Seeded,
    SeededPairs,
)
from dpps.noise.pairs import GaussianTable, RoundStream, gaussian_table, lattice_slack, table_slack
from dpps.privacy import Pairs, Partners

D = 40_000


def send(
    source: NoiseSource,
    nodes: list[int],
    d: int,
    round_: int = 0,
    present: np.ndarray | None = None,
    scale: float = 1.0,
) -> np.ndarray:
    """The messages of these nodes, whose updates are zero."""
    rows = torch.zeros(len(nodes), d, dtype=torch.float64)
    out = Outgoing(rows, rows.clone(), rows.clone(), nodes, round_, True, False, present=present)
    source.release(Gaussian(1.0), scale, out)
    return out.half.numpy()


def covariance(partners: Partners, present: np.ndarray | None = None) -> np.ndarray:
    shares = partners.shares(present)
    here = np.arange(partners.nodes) if present is None else np.flatnonzero(present)
    sigma = np.zeros((partners.nodes, partners.nodes))
    sigma[here, here] = shares.independent**2
    for i, j in partners.among(present).tolist():
        sigma[[i, j], [i, j]] += shares.pair**2
        sigma[[i, j], [j, i]] -= shares.pair**2
    return sigma[np.ix_(here, here)]


def agrees(noise: np.ndarray, sigma: np.ndarray) -> bool:
    """Whether the empirical covariance of the columns is sigma, within 5.5 standard errors of every entry."""
    found = noise @ noise.T / noise.shape[1]
    variances = np.diag(sigma)
    error = np.sqrt((np.outer(variances, variances) + sigma**2) / noise.shape[1])
    return bool((np.abs(found - sigma) <= 5.5 * error).all())


def graphs() -> list[Partners]:
    return [
        Pairs(0).partners(6),
        Pairs(2).partners(6),
        Pairs(1, graph=networkx.petersen_graph()).partners(10),
    ]


@pytest.mark.parametrize("partners", graphs(), ids=["complete", "complete-2", "petersen"])
@pytest.mark.parametrize("kind", [SeededPairs, SecurePairs])
def test_what_an_observer_sees_has_the_covariance_of_the_proof(kind: type, partners: Partners) -> None:
    source = SeededPairs(partners, 7) if kind is SeededPairs else SecurePairs(partners)
    noise = send(source, list(range(partners.nodes)), D)
    sigma = covariance(partners)
    assert agrees(noise, sigma)
    assert not agrees(noise, sigma * 1.1)
    shuffled = noise[np.r_[1, 0, 2 : len(noise)]]
    assert partners.edges is None or not agrees(shuffled, sigma)


@pytest.mark.parametrize("kind", [SeededPairs, SecurePairs])
def test_pairs_are_drawn_among_the_nodes_that_take_part(kind: type) -> None:
    partners = Pairs(1).partners(6)
    present = np.array([True, True, False, True, False, True])
    source = SeededPairs(partners, 3) if kind is SeededPairs else SecurePairs(partners)
    noise = send(source, [0, 1, 3, 5], D, present=present)
    assert agrees(noise, covariance(partners, present))
    assert not agrees(noise, covariance(partners)[np.ix_([0, 1, 3, 5], [0, 1, 3, 5])])


def test_rounds_and_seeds_are_independent_and_repeatable() -> None:
    partners = Pairs(1).partners(5)
    secure = SecurePairs(partners)
    for t in (0, 1):  # noise of round t against that of the next, every message against every other
        rounds = [send(secure, list(range(5)), D, 2 * t + k) for k in (0, 1)]
        assert np.abs(np.corrcoef(*rounds)[:5, 5:]).max() < 5.5 / math.sqrt(D)
    one, two = (send(SeededPairs(partners, 1), list(range(5)), D, t) for t in (0, 1))
    assert np.abs(np.corrcoef(one[0], two[0])[0, 1]) < 5 / math.sqrt(D)
    assert np.array_equal(one, send(SeededPairs(partners, 1), list(range(5)), D))
    assert not np.array_equal(one, send(SeededPairs(partners, 2), list(range(5)), D))


@pytest.mark.parametrize("partners", graphs(), ids=["complete", "complete-2", "petersen"])
def test_a_process_with_some_of_the_rows_draws_what_all_rows_here_would(partners: Partners) -> None:
    everybody = list(range(partners.nodes))
    whole = send(SeededPairs(partners, 5), everybody, 1000)
    assert np.array_equal(whole[1:4], send(SeededPairs(partners, 5), [1, 2, 3], 1000))


def apart(nodes: int) -> list[PairKeys]:
    """Every node in a process of its own."""
    identities, publics = identified(nodes)
    return [PairKeys(identity, publics, "run", b"attempt of this test") for identity in identities]


def identified(nodes: int) -> tuple[list[IdentityKey], list[bytes]]:
    identities = [IdentityKey() for _ in range(nodes)]
    return identities, [identity.public for identity in identities]


def test_between_processes_pair_noise_cancels_bit_for_bit() -> None:
    for partners in graphs():
        shared = []
        for node, keys in enumerate(apart(partners.nodes)):
            rows = torch.zeros(1, 5000)
            out = Outgoing(rows, rows, rows.clone(), [node], 3, True)
            whole, _ = SecurePairs(partners, keys).shared(0.37, out)
            shared.append(whole[0].astype(np.int64))
        assert np.array_equal(sum(shared), np.zeros(5000))
        assert all((row != 0).mean() > 0.9 for row in shared)


def test_processes_together_make_the_same_covariance() -> None:
    partners = Pairs(1).partners(5)
    noise = np.concatenate([send(SecurePairs(partners, keys), [k], D) for k, keys in enumerate(apart(5))])
    assert agrees(noise, covariance(partners))
    assert noise.sum(0).var() == pytest.approx(5 * partners.shares().independent ** 2, rel=0.05)


def test_messages_lie_on_one_grid() -> None:
    source = SecurePairs(Pairs(1).partners(4))
    zero, update = torch.zeros(4, 50, dtype=torch.float64), torch.full((4, 50), 0.3, dtype=torch.float64)
    out = Outgoing(zero, update, update.clone(), range(4), 0, True)
    source.release(Gaussian(1.0), 1.0, out)
    steps = out.half.numpy() / source.grid(1.0)
    assert np.array_equal(steps, np.rint(steps))


def test_local_parameters_get_independent_noise_of_the_whole_scale() -> None:
    partners = Pairs(0).partners(4)
    for source in (SeededPairs(partners, 1), SecurePairs(partners)):
        local = source.for_local_part()
        assert not isinstance(local, (SeededPairs, SecurePairs))
        assert agrees(send(local, list(range(4)), D), np.eye(4))


@pytest.mark.parametrize("nodes", [4, 1000])
def test_local_parameters_lie_on_a_grid_as_fine_as_that_of_the_messages(nodes: int) -> None:
    """One example's share of both parts is rounded twice, and what is charged for it asks for steps within a factor of 2."""
    source = SecurePairs(Pairs(0).partners(nodes))
    local = source.for_local_part()
    for scale in (1.0, 1.5, 1.99, 3e-5):
        assert 0.5 < local.grid(1.0) * scale / source.grid(scale) < 2


@pytest.mark.parametrize("seeded", [True, False])
def test_the_standard_deviation_is_that_of_a_message(seeded: bool) -> None:
    present = np.array([True, True, False, True, True, True, False, True, True, True])
    for partners in (Pairs(0).partners(10), Pairs(1, graph=networkx.petersen_graph()).partners(10)):
        for here in (None, present):
            source = SeededPairs(partners, 1) if seeded else SecurePairs(partners)
            nodes = list(range(10)) if here is None else np.flatnonzero(here).tolist()
            noise = send(source, nodes, D, present=here, scale=2.0)
            found = float(np.sqrt((noise**2).mean(1)).max())
            assert 0.98 * found < source.standard_deviation(Gaussian(1.0), 2.0, here) < 1.15 * found


def test_sources_learn_of_partners() -> None:
    partners = Pairs(1).partners(4)
    keys = PairKeys.alone(4)
    assert isinstance(Seeded(3).with_partners(partners), SeededPairs)
    secure = SecureNoise(pair_keys=keys).with_partners(partners)
    assert isinstance(secure, SecurePairs)
    assert secure.pair_keys is keys


def test_other_noise_is_refused() -> None:
    rows = torch.zeros(3, 2)
    for source in (SeededPairs(Pairs(0).partners(3), 1), SecurePairs(Pairs(0).partners(3))):
        with pytest.raises(UsageError, match=r"Laplace\(budget=1\.0.*Gaussian"):
            source.release(Laplace(1.0), 1.0, Outgoing(rows, rows, rows.clone(), range(3), 0, True))


def test_the_distance_charged_is_tiny_and_grows_with_a_coarser_lattice() -> None:
    source = SecurePairs(Pairs(10).partners(1000))
    assert 0 < source.distance(Gaussian(1.0), 10**6, 10**4) < 1e-15
    assert lattice_slack(1.0, 10) > lattice_slack(2.0, 10) > 0


def test_the_lattice_bound_holds_where_it_can_be_seen() -> None:
    """Two nodes, one pair, a lattice so coarse that the waves show: density of X + (n, -n) against the normal one."""
    sigma, tau = 0.5, 0.8
    smooth = 1 / math.sqrt(2 / sigma**2 + 1 / tau**2)
    k = np.arange(-40, 41)
    weights = np.exp(-(k**2) / (2 * tau**2))
    weights /= weights.sum()
    v = np.linspace(-3, 3, 241)
    x, y = np.meshgrid(v, v)
    density = np.zeros_like(x)
    for n, w in zip(k, weights, strict=True):
        density += w * np.exp(-((x - n) ** 2 + (y + n) ** 2) / (2 * sigma**2)) / (2 * math.pi * sigma**2)
    inverse = np.linalg.inv(sigma**2 * np.eye(2) + tau**2 * np.array([[1, -1], [-1, 1]]))
    quadratic = inverse[0, 0] * (x**2 + y**2) + 2 * inverse[0, 1] * x * y
    normal = math.sqrt(np.linalg.det(inverse)) / (2 * math.pi) * np.exp(-quadratic / 2)
    ratio = density / normal
    bound = lattice_slack(smooth, 1)
    assert 0.05 * bound < np.abs(ratio - 1).max() <= bound


# Keys that two nodes share: the same at both, different for everything else, and never given out twice


def test_partners_find_the_same_key_and_nobody_else_does() -> None:
    keys = apart(3)
    assert keys[0].key(0, 1) == keys[1].key(0, 1) == keys[1].key(1, 0)
    different = {keys[0].key(0, 1), keys[0].key(0, 2), keys[1].key(1, 2)}
    assert len(different) == 3
    with pytest.raises(UsageError, match="nodes 0 and 1 "):
        keys[2].key(0, 1)


def test_another_attempt_run_or_pair_of_one_process_has_another_key() -> None:
    identities, publics = identified(3)

    def key(run: str, attempt: bytes, who: list[bytes], pair: tuple[int, int]) -> bytes:
        return PairKeys(identities[0], who, run, attempt).key(*pair)

    both_here = [publics[0], publics[0], publics[1]]
    found = {
        key("run", b"a" * 32, publics, (0, 1)),
        key("run", b"b" * 32, publics, (0, 1)),
        key("other", b"a" * 32, publics, (0, 1)),
        key("run", b"a" * 32, both_here, (0, 1)),
        key("run", b"a" * 32, both_here, (0, 2)),
        key("run", b"a" * 32, both_here, (1, 2)),
    }
    assert len(found) == 6


def test_the_noise_of_a_round_is_given_out_once() -> None:
    source = SecurePairs(Pairs(0).partners(3))
    for round_ in (0, 4):
        send(source, [0, 1, 2], 10, round_)
    for again in (4, 0, 3):
        with pytest.raises(RunError, match=rf"pair noise .*round {again}"):
            send(source, [0, 1, 2], 10, again)


@pytest.mark.parametrize("copied", [copy, deepcopy])
def test_a_copy_gives_no_round_out_again(copied: Callable[[PairKeys], PairKeys]) -> None:
    keys = PairKeys.alone(3)
    twin = copied(keys)
    keys.claim(0)
    with pytest.raises(RunError, match=r"pair noise .*round 0"):
        twin.claim(0)


@pytest.mark.parametrize("numbered_alike", [False, True])
def test_a_forked_process_has_no_pair_noise(numbered_alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it has the same number as the process it comes from, as in a process namespace of its own."""
    if numbered_alike:
        process = os.getpid()
        monkeypatch.setattr("os.getpid", lambda: process)
    keys = PairKeys.alone(2)
    child = os.fork()
    if child == 0:
        try:
            keys.claim(0)
        except RunError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    keys.claim(0)  # the process that made them still has it


def test_streams_of_rounds_and_parts_are_different() -> None:
    key = bytes(32)
    seen = {RoundStream(key, t)(part, 64) for t in (0, 1, 255, 256, 1 << 40) for part in (0, 1, 2)}
    assert len(seen) == 15
    assert RoundStream(key, 1)(0, 16) == RoundStream(key, 1)(0, 64)[:16]


def test_the_identity_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "node" / "identity.key"
    first = IdentityKey.kept_in(path)
    assert IdentityKey.kept_in(path).public == first.public
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(RunError, match=r"identity\.key.*600"):
        IdentityKey.kept_in(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(RunError, match="holds 5 bytes"):
        IdentityKey.kept_in(path)


def test_a_public_key_that_gives_no_secret_is_refused() -> None:
    with pytest.raises(UsageError, match=r"0{64}.*32 bytes"):
        IdentityKey().secret_with(bytes(32))
    with pytest.raises(UsageError, match="5 bytes: 16 "):
        PairKeys(IdentityKey(), [], "run", b"short")


# Discrete Gaussian noise by table: its probabilities, and the bits it is made of


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
