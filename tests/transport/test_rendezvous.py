"""Processes find each other, make sure that they belong together, and say who failed."""

import json
import re
import secrets
import socket
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

import dpps
from dpps.errors import UsageError
from dpps.transport import (
    SECRET,
    Cluster,
    Distributed,
    Message,
    Rendezvous,
    read_secret,
    restarted,
    started_distributed,
)
from dpps.transport.cluster import (
    Report,
    SignedStore,
    address_towards,
    printable,
    same_facts,
    understood,
    verdict,
    wait_for,
)
from dpps.transport.distributed import CLOSED
from tests.support import processes
from tests.support.processes import free_port

WHOLE = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*WHOLE, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_what_torchrun_says_is_read(environment: pytest.MonkeyPatch) -> None:
    assert not started_distributed()
    for name, value in WHOLE.items():
        environment.setenv(name, value)
    environment.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert started_distributed()
    assert restarted()
    found = Rendezvous.from_environment()
    assert (found.rank, found.size, found.host, found.port) == (1, 3, "127.0.0.1", 29500)
    assert found.attempt == "/2"
    assert not found.by_agent


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"MASTER_PORT": None}, "and MASTER_PORT "),
        ({"RANK": "first"}, "RANK.*'first'"),
        ({"RANK": "3"}, "RANK is 3: .*WORLD_SIZE 3 .*0 to 2"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    environment: pytest.MonkeyPatch, wrong: dict[str, str | None], said: str
) -> None:
    for name, value in (WHOLE | wrong).items():
        if value is not None:
            environment.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        Rendezvous.from_environment()


def test_who_waits_returns_when_somebody_listens_and_gives_up_when_nobody_does() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        wait_for("127.0.0.1", port, seconds=60)
        assert address_towards("127.0.0.1", port) == "127.0.0.1"
    with pytest.raises(OSError):
        wait_for("127.0.0.1", port, seconds=0)


def _handshake(cluster: Cluster, facts: list[dict[str, object]], secrets: list[str]) -> tuple[str, str]:
    cluster.secret = secrets[cluster.rank].encode()
    try:
        cluster.join().meet(facts[cluster.rank])
    except dpps.errors.DppsError as error:
        cluster.give_up(error)
        return type(error).__name__, str(error)
    return "in", ""


OURS, THEIRS = "0123456789abcdef" * 4, "fedcba9876543210" * 4
GOOD = {"version": "1", "configuration": {"epochs": 2}, "model": "abc"}


@pytest.mark.parametrize(
    ("odd", "secret", "expected"),
    [
        ({**GOOD, "version": "2"}, OURS, "rank 2.* version: '2'.* '1'"),
        ({**GOOD, "configuration": {"epochs": 3}}, OURS, "rank 2.* configuration: epochs is 3.* 2"),
        ({**GOOD, "model": "abd"}, OURS, "rank 2.* model: 'abd'.* 'abc'"),
        (GOOD, "", "rank 2.* secret: 'not set'.* 'set'"),
        (GOOD, THEIRS, "rank 2.* $DPPS_SECRET "),
    ],
)
def test_strangers_are_named_on_both_sides(odd: dict[str, object], secret: str, expected: str) -> None:
    found = processes.run(3, _handshake, [GOOD, GOOD, odd], [OURS, OURS, secret])
    for kind, said in found:
        assert kind != "in"
        assert re.search(re.escape(expected).replace(r"\.\*", ".*"), said), found
        assert "\n" not in said


def test_the_secret_lets_everybody_in() -> None:
    assert processes.run(3, _handshake, [GOOD] * 3, [OURS] * 3) == [("in", "")] * 3


def test_nobody_comes_twice_and_who_is_missing_is_named() -> None:
    place = Rendezvous(0, 2, "127.0.0.1", processes.free_port())
    cluster = Cluster(place).join()
    cluster.join_timeout = 1.0
    with pytest.raises(dpps.errors.RunError, match=r"rank 1 .*1 s: "):
        cluster.meet(GOOD)
    with pytest.raises(dpps.errors.UsageError, match=r"rank 0 .*RANK"):
        cluster.meet(GOOD)


@processes.needs_proc
def test_the_rendezvous_listens_on_one_address_only() -> None:
    port = processes.free_port()
    cluster = Cluster(Rendezvous(0, 1, "127.0.0.1", port), timeout=60).join()
    cluster.meet(GOOD)
    tables = [
        path for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()
    ]  # the latter needs IPv6
    sockets = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    listening = [words[1] for words in sockets if words[3] == "0A"]
    assert [a for a in listening if a.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]


class Replaying:
    """A rendezvous that answers with what it heard at an earlier start."""

    def __init__(self, store: object, heard: bytes) -> None:
        self._store, self._heard = store, heard

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        return self._heard if key == "hello/0" else self._store.get(key)


def test_a_rendezvous_cannot_bring_an_earlier_start_back() -> None:
    """Its random numbers would bring the keys of pair noise back, and the same noise under other messages."""
    first, second = (
        Cluster(Rendezvous(0, 1, "127.0.0.1", processes.free_port()), timeout=60).join() for _ in range(2)
    )
    first.meet(GOOD)
    second.store = Replaying(second.store, first.store.get("hello/0"))
    with pytest.raises(dpps.errors.PeerError, match="rank 0"):
        second.meet(GOOD)
    assert second.attempt != first.attempt


def test_a_rendezvous_that_is_not_there() -> None:
    with pytest.raises(dpps.errors.RunError, match=r"rank 0, .*127\.0\.0\.1:\d+, .*rank 1"):
        Cluster(Rendezvous(1, 2, "127.0.0.1", processes.free_port()), timeout=1.0).join()
    with pytest.raises(
        dpps.errors.UsageError, match=r"rank 0 .*192\.0\.2\.1:\d+ .*MASTER_ADDR .*MASTER_PORT"
    ):
        Cluster(Rendezvous(0, 2, "192.0.2.1", processes.free_port())).join()


def test_a_rendezvous_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(dpps.errors.UsageError, match=r"rank 0 .*nowhere:5 .*MASTER_ADDR"):
        Cluster(Rendezvous(0, 2, "nowhere", 5)).join()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "3",
        '{"address": "10.0.0.1"}',
        '{"address": "10.0.0.1", "facts": {}, "key": 3}',
        '{"address": "10.0.0.1\\u001b[2J", "facts": {}, "key": "00"}',
    ],
)
def test_what_is_not_a_hello(text: str) -> None:
    with pytest.raises(dpps.errors.PeerError, match="rank 2 says"):
        understood(2, text)


def test_what_is_a_hello() -> None:
    said = understood(2, '{"address": "10.0.0.1", "facts": {}, "key": "00"}')
    assert said == {"address": "10.0.0.1", "key": b"\0", "facts": {}}


def test_facts_that_are_equal_and_written_otherwise_are_told_apart() -> None:
    with pytest.raises(dpps.errors.UsageError, match=r"rank 1 .*configuration: rate is 1\.0,.* 1;"):
        same_facts([{"configuration": {"rate": rate}} for rate in (1, 1.0, 1)], 0)


LONG = "0123456789abcdef" * 2


@pytest.mark.parametrize("text", ["s", "between these hosts", "0" * 31 + "1", "12345678" * 4])
def test_a_secret_that_can_be_found_by_trying_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, text)
    with pytest.raises(dpps.errors.UsageError, match=r"\$DPPS_SECRET .*128 .*openssl rand -hex 32"):
        read_secret()


def test_no_secret_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert read_secret() == b""


@pytest.mark.parametrize(
    "text", [LONG, "Zm9vYmFyYmF6cXV4MDEyMw", secrets.token_hex(32)], ids=["hex", "letters", "openssl"]
)
def test_what_the_refusal_names_makes_one_that_is_accepted(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, text)
    assert read_secret() == text.encode()


def _member(attempt: bytes, secret: str = LONG) -> Cluster:
    cluster = Cluster(Rendezvous(0, 2, "127.0.0.1", 5), secret=secret.encode())
    cluster.attempt = attempt
    return cluster


def test_only_what_members_signed_for_this_key_and_this_start_is_read() -> None:
    raw, ours = HashStore(), _member(b"this")
    store = SignedStore(raw, ours._sign)
    store.set("0/1", b"10.0.0.2:4711")
    assert store.get("0/1") == b"10.0.0.2:4711"
    raw.set("0/2", raw.get("0/1"))  # a signed value under another name
    raw.set("0/3", b"10.0.0.66:4711")
    SignedStore(raw, _member(b"another")._sign).set("0/4", b"of another start")
    SignedStore(raw, _member(b"this", "fedcba9876543210" * 2)._sign).set("0/5", b"of a stranger")
    for key in ("0/2", "0/3", "0/4", "0/5"):
        with pytest.raises(dpps.errors.PeerError, match=rf"address of rank {key[-1]} .*secret"):
            store.get(key)


def _exchange_addresses(cluster: Cluster) -> str:
    """Rank 0 finds, where rank 1 had put its address, what a stranger who reaches the rendezvous has put there."""
    cluster.secret = LONG.encode()
    put = SignedStore.set

    def after_the_stranger(self: SignedStore, key: str, value: bytes) -> None:
        if cluster.rank == 0:
            address = bytearray(self._store.get("0/1"))  # waits for rank 1
            address[-20] ^= 1
            self._store.set("0/1", bytes(address))
        put(self, key, value)

    SignedStore.set = after_the_stranger  # type: ignore[assignment, method-assign]
    return _met(cluster)


def test_an_exchanged_address_is_refused_before_anything_is_sent_there() -> None:
    for said in processes.run(2, _exchange_addresses, timeout=15):
        assert "address of rank 1 " in said


def _blocked(cluster: Cluster) -> str:
    """Nobody answers where the other process should be."""
    read = SignedStore.get

    def at_another_port(self: SignedStore, key: str) -> bytes:
        address = bytearray(read(self, key))
        if not key.endswith(f"/{cluster.rank}"):
            place = address.index(bytes([127, 0, 0, 1]))
            address[place - 2 : place] = bytes([0, 9])
        return bytes(address)

    SignedStore.get = at_another_port  # type: ignore[method-assign]
    return _met(cluster)


def test_who_cannot_connect_is_named_by_everybody_and_to_whom() -> None:
    for said in processes.run(2, _blocked, timeout=15):
        assert re.search(r"rank \d \(127\.0\.0\.1\) could not connect .*remote=\[127\.0\.0\.1\]", said), said


def _met(cluster: Cluster) -> str:
    return processes.outcome(cluster, lambda: cluster.join().meet({"version": "test"}))


def _impostor(cluster: Cluster) -> str:
    """Rank 1 has come through the rendezvous, and then somebody without the secret answers on its connections: all it can send is
    what it was sent."""
    cluster.secret, sign = LONG.encode(), cluster._sign
    if cluster.rank == 1:
        cluster._sign = lambda *what: sign(*(what[0], *what[:0:-1]) if what[0] == "connection" else what)  # type: ignore[method-assign]
    return _met(cluster)


def test_somebody_else_on_a_connection_is_refused() -> None:
    found = processes.run(3, _impostor)
    for said in (found[0], found[2]):
        assert "rank 1 was refused" in said


def _blocked_later(cluster: Cluster) -> str:
    """From round 2 on nothing that rank 1 sends to rank 2 arrives."""
    fabric = Distributed(4, cluster.join().meet({"version": "test"}))
    protocol = dpps.DPPS(dpps.Exponential(4), dpps.NoNoise(), fabric=fabric)
    state = protocol.start(torch.zeros(1, 5), common_start=True)
    post = fabric.wire.post

    def dropping(outgoing: list[Message], incoming: list[Message]) -> object:
        lost = cluster.rank == 1 and state.round >= 2
        return post([m for m in outgoing if not (lost and m.peer == 2)], incoming)

    fabric.wire.post = dropping  # type: ignore[assignment, method-assign]
    try:
        for _ in range(20):
            protocol.step(state)
    except dpps.errors.RunError as error:
        return str(error)
    return "went on"


def test_a_pair_that_is_blocked_during_the_run_is_named_by_everybody() -> None:
    """Who runs out of time closes all its connections at once; it is not accused for that."""
    for said in processes.run(4, _blocked_later, timeout=20):
        assert re.search(r"rank 2 [^;]* rank 1 \(127\.0\.0\.1\): no answer for 11 s", said), said
        assert "lost" not in said


class Slow:
    """A rendezvous whose last guest comes, and whose first one reads all and gives up, while this process looks twice."""

    def __init__(self) -> None:
        self.looked = 0

    def check(self, keys: list[str]) -> bool:
        self.looked += 1
        return self.looked > 1 and "report/1" not in keys

    def get(self, key: str) -> bytes:
        return Report("its request is wrong").encoded().encode() if key.startswith("report") else b"here"


def test_who_is_slow_reads_for_itself_what_the_others_have_read() -> None:
    """Otherwise it would say no more than that another process has stopped."""
    cluster = Cluster(Rendezvous(1, 2, "127.0.0.1", 5))
    cluster.store = Slow()
    assert cluster._collect("hello", 60.0, "did not come", "hurry") == ["here", "here"]


SILENT = "no answer for 5 s"


def _said(reports: dict[int, Report], own: int = 0, lost: int | None = None) -> str:
    return str(verdict(reports, own, lost, CLOSED, [f"10.0.0.{rank}" for rank in range(12)]))


def test_whoever_is_missed_and_says_nothing_is_lost() -> None:
    reports = {0: Report(lost=2, what=SILENT), 1: Report(lost=0, what=CLOSED)}
    for own in reports:
        assert _said(reports, own).startswith(f"rank 2 (10.0.0.2) is lost: {SILENT};")
        assert "rank 0" not in _said(reports, own)


def test_a_pair_that_does_not_hear_each_other_is_named_and_nobody_accused() -> None:
    """Ranks 1 and 2 do not hear each other; the others found closed connections."""
    reports = {
        0: Report(lost=1, what=CLOSED),
        1: Report(lost=2, what=SILENT),
        2: Report(lost=1, what=SILENT),
        3: Report(lost=0, what=CLOSED),
    }
    for own in reports:
        first, second, *_ = _said(reports, own).split("; ")
        for part, here, there in ((first, 1, 2), (second, 2, 1)):
            assert part.startswith(f"rank {here} ")
            assert part.endswith(f" rank {there} (10.0.0.{there}): {SILENT}")
        assert "rank 0" not in _said(reports, own)


def test_a_reason_comes_before_all_else() -> None:
    reports = {0: Report(lost=1, what=CLOSED), 1: Report(why="disk full")}
    assert _said(reports).startswith("rank 1 ")
    assert _said(reports).endswith(": disk full")
    both = {0: Report(lost=1, what=CLOSED), 1: Report(lost=0, what=CLOSED)}
    assert _said(both, lost=1).startswith("rank 1 (10.0.0.1) ")
    assert CLOSED in _said(both, lost=1)


def test_many_pairs_are_counted() -> None:
    said = _said({rank: Report(lost=(rank + 1) % 11, what=SILENT) for rank in range(11)})
    assert said.count(SILENT) == 8
    assert " 3 more" in said


def test_words_of_others_are_only_printed() -> None:
    evil = "\x1b[2J\x1b]0;gotcha\x07\r\nnew line \u202e"
    assert printable(evil) == "?[2J?]0;gotcha???new line ?"
    assert len(printable("x" * 10_000)) < 500
    text = json.dumps({"why": evil, "lost": 1, "what": evil})
    assert "\x1b" not in _said({1: Report.decoded(text, 4)})
    with pytest.raises(dpps.errors.UsageError) as refused:
        same_facts([{"configuration": {"a": 1}}, {"configuration": {"a": 1, evil: evil}}], 0)
    assert "\x1b" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"lost": 3}',
        '{"lost": 1, "why": ""}',
    ],
)
def test_what_is_not_a_report_is_a_stop_without_a_reason(text: str) -> None:
    assert Report.decoded(text, 4).why
    assert Report.decoded(text, 4).lost is None


@pytest.mark.parametrize("lost", ["-1", "4", "1e999", '"x"', "[1]"])
def test_nobody_misses_a_process_that_there_is_not(lost: str) -> None:
    report = Report.decoded(f'{{"lost": {lost}, "why": "", "what": ""}}', 4)
    assert report.lost is None


def test_a_report_survives_the_way() -> None:
    report = Report("", 3, SILENT)
    assert Report.decoded(report.encoded(), 5) == report
