"""Keys that two nodes share: the same at both, different for everything else, and never given out twice."""

import os
import stat
from collections.abc import Callable
from copy import copy, deepcopy
from pathlib import Path

import pytest

from dpps.errors import RunError, UsageError
from dpps.noise import IdentityKey, PairKeys, RoundStream


def three() -> tuple[list[IdentityKey], list[bytes]]:
    identities = [IdentityKey() for _ in range(3)]
    return identities, [identity.public for identity in identities]


def test_partners_find_the_same_key_and_nobody_else_does() -> None:
    identities, publics = three()
    keys = [PairKeys(identity, publics, "run", b"a" * 32) for identity in identities]
    assert keys[0].key(0, 1) == keys[1].key(0, 1) == keys[1].key(1, 0)
    different = {keys[0].key(0, 1), keys[0].key(0, 2), keys[1].key(1, 2)}
    assert len(different) == 3
    with pytest.raises(UsageError, match="nodes 0 and 1 "):
        keys[2].key(0, 1)


def test_another_attempt_run_or_pair_of_one_process_has_another_key() -> None:
    identities, publics = three()

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


def test_a_round_is_given_out_once() -> None:
    keys = PairKeys.alone(3)
    keys.claim(0)
    keys.claim(4)
    for again in (4, 0, 3):
        with pytest.raises(RunError, match=r"pair noise .*round \d"):
            keys.claim(again)


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
