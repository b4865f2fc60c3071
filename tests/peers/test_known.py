import logging
from dataclasses import replace
from pathlib import Path

import pytest

from dpps.errors import UsageError
from dpps.peers import Federation, Identity, Key, Request, convene, expel, read_out
from dpps.peers.join import CONVENER, accept, check_run, note_run
from tests.support.peers import NAMES, PLAN, Organisations

A, B, C = NAMES


@pytest.fixture
def three(tmp_path: Path) -> Organisations:
    return Organisations(tmp_path, (7441, 7442))


def written(three: Organisations, federation: Federation) -> Path:
    path = three.folder / "f" / "federation.toml"
    path.write_text(federation.to_toml())
    return path


def test_the_newest_epoch_is_remembered(three: Organisations, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    own = three.identities[A]
    first, second = three.federation, expel(three.federation, C, three.convener)
    assert accept(own, written(three, first)) == first
    assert "fingerprint" in caplog.text
    assert accept(own, written(three, second)) == second
    caplog.clear()
    assert accept(own, written(three, first)) == second  # the same command after a crash
    assert "revision 1; revision 2 " in caplog.text
    with pytest.raises(UsageError, match=r"hospital-c .*revision 2"):
        accept(three.identities[C], written(three, second))


def test_two_files_of_one_epoch(three: Organisations) -> None:
    accept(three.identities[A], written(three, three.federation))
    moved = (replace(three.federation.members[0], address="127.0.0.1:9"), *three.federation.members[1:])
    with pytest.raises(UsageError, match=r"revision 1 .*revision 1"):
        accept(
            three.identities[A],
            written(three, replace(three.federation, members=moved).signed(three.convener)),
        )


def test_another_convener_needs_a_word_on_the_telephone(three: Organisations, tmp_path: Path) -> None:
    own = three.identities[A]
    accept(own, written(three, three.federation))
    other = Key.make(tmp_path / "other.key")
    requests = [Request(m.name, m.address, m.key) for m in three.federation.members]
    path = written(three, convene(PLAN, requests, other))
    with pytest.raises(UsageError, match=r"convener .*hospital-a"):
        accept(own, path)
    with pytest.raises(UsageError, match="--convener is 0000"):
        accept(own, path, "0" * 64)
    assert accept(own, path, read_out(other.fingerprint).upper()).convener_fingerprint == other.fingerprint
    assert accept(own, path).revision == 1  # it is known now


def test_strangers_are_told_at_home(three: Organisations, tmp_path: Path) -> None:
    stranger = Identity.make(tmp_path / "x", "hospital-x")
    with pytest.raises(UsageError, match=r"hospital-x .*member\.csr"):
        accept(stranger, written(three, three.federation))
    assert not (tmp_path / "x" / CONVENER).exists(), "whose contract is not taken is not trusted"


def test_a_run_is_begun_once(three: Organisations) -> None:
    own, run, other = three.identities[A], three.folder / "run", three.folder / "run2"
    check_run(own, three.federation, run)
    accept(own, written(three, three.federation))
    (run / "outbox").mkdir(parents=True)
    note_run(own, three.federation, run)
    check_run(own, three.federation, run)
    with pytest.raises(UsageError, match=rf"--out is {run}2.*--out {run}"):
        check_run(own, three.federation, other)
    (other / "outbox").mkdir(parents=True)
    with pytest.raises(UsageError, match=rf"--out is {run}2.*--out {run}"):
        note_run(own, three.federation, other)
    (run / "outbox").rmdir()
    with pytest.raises(UsageError, match=rf"\.run.*{run}"):
        check_run(own, three.federation, run)
    run.rmdir()
    with pytest.raises(UsageError, match=rf"\.run.*{run}"):
        check_run(own, three.federation, run)
    note_run(own, three.federation, other)  # it was moved
    check_run(own, three.federation, other)
