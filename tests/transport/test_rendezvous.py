"""Processes find each other, make sure that they belong together, and say who failed."""

import json
import re
import secrets
import socket
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, TCPStore

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
    Identity,
    Listener,
    Report,
    SignedStore,
    address_towards,
    all_said,
    cannot_reach,
    printable,
    same_facts,
    understood,
    unreachable,
    unreached,
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
        *(
            f'{{"address": "{address}", "port": {port}, "facts": {{}}, "key": "00"}}'
            for address, port in (
                ("10.0.0.1", '"x"'),
                ("10.0.0.1", "1e999"),
                ("10.0.0.1", "70000"),
                ("10.0.0.1\\u001b[2J", "5"),
                ("\u00fc" * 70, "5"),
            )
        ),
    ],
)
def test_what_is_not_a_hello(text: str) -> None:
    with pytest.raises(dpps.errors.PeerError, match="rank 2 says"):
        understood(2, text)


def test_what_is_a_hello() -> None:
    said = understood(2, '{"address": "10.0.0.1", "port": 5, "facts": {}, "key": "00"}')
    assert said == {"address": "10.0.0.1", "port": 5, "key": b"\0", "facts": {}}


@pytest.mark.parametrize("text", ["[]", '{"x": "no answer"}', '{"-1": "no answer"}', '{"3": "no answer"}'])
def test_only_processes_of_this_run_can_be_out_of_reach(text: str) -> None:
    assert unreached(2, '{"1": "no\\u001b answer"}', 3) == {1: "no? answer"}
    with pytest.raises(dpps.errors.PeerError, match="rank 2 says"):
        unreached(2, text, 3)


def test_facts_that_are_equal_and_written_otherwise_are_told_apart() -> None:
    with pytest.raises(dpps.errors.UsageError, match=r"rank 1 .*configuration: rate is 1\.0,.* 1;"):
        same_facts([{"configuration": {"rate": rate}} for rate in (1, 1.0, 1)], 0)


LONG = "0123456789abcdef" * 2


@pytest.mark.parametrize("text", ["s", "between these hosts", LONG])
def test_a_secret_has_128_bits_or_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, text)
    if len(text) >= 32:
        assert read_secret() == text.encode()
    else:
        with pytest.raises(dpps.errors.UsageError, match=r"\$DPPS_SECRET .*128 .*openssl rand -hex 32"):
            read_secret()


@pytest.mark.parametrize(
    "text", ["0123456789abcdef" * 2, "Zm9vYmFyYmF6cXV4MDEyMw", "0" * 31 + "1", "12345678" * 4]
)
def test_length_counts_by_alphabet(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 hexadecimal digits or 22 letters and digits are enough; one digit repeated is not, nor are 32 decimal digits."""
    monkeypatch.setenv(SECRET, text)
    if text in ("0123456789abcdef" * 2, "Zm9vYmFyYmF6cXV4MDEyMw"):
        assert read_secret() == text.encode()
    else:
        with pytest.raises(dpps.errors.UsageError, match=r"\$DPPS_SECRET .*\d+ bits"):
            read_secret()


def test_no_secret_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert read_secret() == b""


def test_what_the_refusal_names_makes_one_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """`openssl rand -hex 32`, and the same of Python."""
    monkeypatch.setenv(SECRET, secrets.token_hex(32))
    assert len(read_secret()) == 64


def test_proofs_are_of_one_start_and_one_statement() -> None:
    ours = Identity(LONG.encode(), ["a", "b"])
    assert ours.proves(Identity(LONG.encode(), ["a", "b"]).proof(0, 1), 0, 1)
    assert not ours.proves(ours.proof(1, 0), 0, 1)
    assert not ours.proves(Identity(LONG.encode(), ["a", "c"]).proof(0, 1), 0, 1)
    assert not ours.proves(Identity(b"another", ["a", "b"]).proof(0, 1), 0, 1)


def test_only_what_members_signed_for_this_key_is_read() -> None:
    raw, identity = HashStore(), Identity(LONG.encode(), ["a", "b"])
    store = SignedStore(raw, identity)
    store.set("0/1", b"10.0.0.2:4711")
    assert store.get("0/1") == b"10.0.0.2:4711"
    raw.set("0/2", raw.get("0/1"))  # a signed value under another name
    raw.set("0/3", b"10.0.0.66:4711")
    SignedStore(raw, Identity(LONG.encode(), ["a", "c"])).set("0/4", b"of another start")
    for key in ("0/2", "0/3", "0/4"):
        with pytest.raises(dpps.errors.PeerError, match=rf"address of rank {key[-1]} .*secret"):
            store.get(key)
    other = SignedStore(raw, identity)
    assert other.digest != store.digest
    other.get("0/1")
    assert other.digest == store.digest
    store.set("0/5", b"10.0.0.66:4711")
    store.get("0/5")
    assert other.digest != store.digest


def _exchange_addresses(cluster: Cluster) -> str:
    """Rank 0 finds, where rank 1 had put its address, what a stranger who reaches the rendezvous has put there."""
    cluster.secret = LONG.encode()
    cluster.join()
    connect, rendezvous = cluster._group, cluster.rendezvous

    def after_the_stranger(store: SignedStore) -> object:
        if cluster.rank == 0:
            stranger = PrefixStore("mesh", TCPStore(rendezvous.host, rendezvous.port, None, False))
            address = bytearray(stranger.get("0/1"))  # waits for rank 1
            address[-20] ^= 1
            stranger.set("0/1", bytes(address))
        return connect(store)

    cluster._group = after_the_stranger  # type: ignore[method-assign]
    try:
        cluster.meet({"version": "test"})
    except dpps.errors.RunError as error:
        cluster.give_up(error)
        return str(error)
    return "connected"


def test_an_exchanged_address_is_refused_before_anything_is_sent_there() -> None:
    for said in processes.run(2, _exchange_addresses, timeout=15):
        assert "address of rank 1 " in said


def _met(cluster: Cluster) -> str:
    try:
        cluster.join().meet({"version": "test"})
    except dpps.errors.DppsError as error:
        cluster.give_up(error)
        return str(error)
    return "met"


def _blocked(cluster: Cluster) -> str:
    """Rank 1 gets no answer from rank 2, as a firewall between the two would have it."""
    reach = cluster._unreachable_of

    def without_two(ranks: list[int], seconds: float) -> dict[int, str]:
        found = reach(ranks, seconds)
        return found | {2: "no answer for 5 s"} if cluster.rank == 1 else found

    cluster._unreachable_of = without_two  # type: ignore[assignment, method-assign]
    return _met(cluster)


def test_a_blocked_pair_is_named_by_everybody_and_nobody_is_accused() -> None:
    for said in processes.run(3, _blocked):
        assert said.startswith("rank 1 "), said
        assert "rank 2 (127.0.0.1) (no answer for 5 s);" in said
        assert "failed" not in said
        assert "rank 0" not in said


@pytest.mark.parametrize("garbage", ["no JSON", '{"7": "x"}'])
def test_garbage_about_who_is_reached_is_refused_by_name(garbage: str) -> None:
    for said in processes.run(2, _garbled, garbage):
        assert "rank 1 says" in said


def _garbled(cluster: Cluster, garbage: str) -> str:
    cluster.join()
    put = cluster.store.set

    class Store:
        def __getattr__(self, name: str) -> object:
            return getattr(store, name)

        def set(self, key: str, value: str) -> None:
            put(key, garbage if key == "reach/1" else value)

    store, cluster.store = cluster.store, Store()
    cluster.join = lambda: cluster  # type: ignore[method-assign]
    return _met(cluster)


def _blocked_later(cluster: Cluster) -> str:
    """From round 2 on nothing that rank 1 sends to rank 2 arrives, and neither can connect to the other."""
    fabric = Distributed(4, cluster.join().meet({"version": "test"}))
    protocol = dpps.DPPS(dpps.Exponential(4), dpps.NoNoise(), fabric=fabric)
    state = protocol.start(torch.zeros(1, 5), common_start=True)
    reach, post, other = cluster._unreachable_of, fabric.wire.post, {1: 2, 2: 1}.get(cluster.rank)

    def blocked(ranks: list[int], seconds: float) -> dict[int, str]:
        if other in ranks:
            time.sleep(0.5)  # an attempt to connect takes a while, and the others have long noticed
        return reach([r for r in ranks if r != other], seconds) | {
            r: "no answer" for r in ranks if r == other
        }

    def dropping(outgoing: list[Message], incoming: list[Message]) -> object:
        lost = cluster.rank == 1 and state.round >= 2
        return post([m for m in outgoing if not (lost and m.peer == 2)], incoming)

    cluster._unreachable_of = blocked  # type: ignore[assignment, method-assign]
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
        assert said.startswith("rank 2 "), said
        assert "rank 1 (127.0.0.1) (no answer for 11 s)" in said
        assert "failed" not in said


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
    cluster = Cluster(Rendezvous(1, 2, "127.0.0.1", 5), store=Slow())
    assert cluster._collect("hello", 60.0, "hurry") == ["here", "here"]


def _impostor(cluster: Cluster) -> str:
    """Rank 1 has come through the rendezvous, and then somebody without the secret answers on its connections."""
    cluster.secret = OURS.encode()
    connect = cluster._prove_connections

    def stranger(wire: object, identity: Identity, addresses: str) -> None:
        connect(wire, Identity(b"another", []) if cluster.rank == 1 else identity, addresses)  # type: ignore[arg-type]

    cluster._prove_connections = stranger  # type: ignore[assignment, method-assign]
    return _met(cluster)


def test_somebody_else_on_a_connection_is_refused() -> None:
    found = processes.run(3, _impostor)
    for said in (found[0], found[2]):
        assert "rank 1 was refused" in said


SILENT = "no answer for 5 s"


def _said(reports: dict[int, Report], own: int = 0, lost: tuple[int, ...] = ()) -> str:
    return str(verdict(reports, own, lost, CLOSED, lambda rank: f"{rank} (10.0.0.{rank})"))


def test_whoever_is_missed_and_says_nothing_has_failed() -> None:
    reports = {0: Report(lost=(2,), what=SILENT), 1: Report(lost=(0,), what=CLOSED)}
    said = _said(reports)
    assert said.startswith("rank 2 (10.0.0.2) ")
    assert "failed" in said
    assert SILENT in said
    assert "rank 0" not in _said(reports, own=1)


def test_a_blocked_pair_is_named_and_nobody_accused() -> None:
    """Ranks 1 and 2 do not hear each other; everybody else waited for them or found a closed connection."""
    reports = {
        0: Report(lost=(1,), what=CLOSED),
        1: Report(lost=(2,), what=SILENT, reached=False),
        2: Report(lost=(1,), what=SILENT, reached=False),
        3: Report(lost=(0,), what=SILENT),
    }
    for own in reports:
        said = _said(reports, own)
        first, second, *_ = said.split("; ")
        assert "rank 1 " in first
        assert f"rank 2 (10.0.0.2) ({SILENT})" in first
        assert "rank 2 " in second
        assert f"rank 1 (10.0.0.1) ({SILENT})" in second
        assert "failed" not in said
        assert "rank 0" not in said


def test_of_somebody_who_says_nothing_no_more_is_known_than_who_cannot_reach_it() -> None:
    """Its machine may be gone, or the way there; it is named, and nothing is made up."""
    reports = {0: Report(lost=(2,), what=SILENT, reached=False), 1: Report(lost=(0,), what=CLOSED)}
    said = _said(reports, own=1)
    assert said.startswith("rank 0 ")
    assert f"rank 2 (10.0.0.2) ({SILENT});" in said
    killed = {0: Report(lost=(2,), what=CLOSED, reached=False)}
    assert _said(killed).startswith("rank 2 (10.0.0.2) ")
    assert CLOSED in _said(killed)


def test_who_may_still_say_something_is_waited_for() -> None:
    """An operation that runs out of time closes all connections of its process before that can say of whom it waited in vain;
    and who is waited for in vain may be waiting itself."""
    early = {0: Report(lost=(2,), what=CLOSED), 1: Report(lost=(0,), what=CLOSED)}
    assert not all_said(early, 3)
    later = early | {2: Report(lost=(1,), what=SILENT, reached=False)}
    assert all_said(later, 3)
    for own in later:
        assert _said(later, own).startswith("rank 2 ")
        assert "rank 1 (10.0.0.1)" in _said(later, own)
    assert all_said({0: Report(lost=(2,), what=CLOSED, reached=False), 1: early[1]}, 3), (
        "a killed one says nothing"
    )
    assert not all_said({0: Report(lost=(2,), what=SILENT), 1: early[1]}, 3)
    assert all_said({2: Report(why="disk full")}, 3)


def test_a_reason_comes_before_all_else() -> None:
    reports = {0: Report(lost=(1,), what=CLOSED), 1: Report(why="disk full")}
    assert _said(reports).startswith("rank 1 ")
    assert _said(reports).endswith(": disk full")
    both = {0: Report(lost=(1,), what=CLOSED), 1: Report(lost=(0,), what=CLOSED)}
    assert _said(both, lost=(1,)).startswith("rank 1 (10.0.0.1) ")
    assert CLOSED in _said(both, lost=(1,))


def test_many_pairs_are_counted() -> None:
    links = {(0, peer): SILENT for peer in range(1, 12)}
    assert cannot_reach(links).count(SILENT) == 8
    assert " 3 more" in cannot_reach(links)


def test_words_of_others_are_only_printed() -> None:
    evil = "\x1b[2J\x1b]0;gotcha\x07\r\nnew line \u202e"
    assert printable(evil) == "?[2J?]0;gotcha???new line ?"
    assert len(printable("x" * 10_000)) < 500
    text = json.dumps({"why": evil, "lost": [1], "what": evil, "reached": True})
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
        '{"lost": ["x"], "why": "", "what": ""}',
        '{"lost": [1e999], "why": "", "what": ""}',
    ],
)
def test_what_is_not_a_report_is_a_stop_without_a_reason(text: str) -> None:
    assert Report.decoded(text, 4).why
    assert Report.decoded(text, 4).lost == ()


def test_nobody_misses_a_process_that_there_is_not() -> None:
    report = Report.decoded('{"lost": [-1, 2, 4, 1e30], "why": "", "what": "", "reached": true}', 4)
    assert report.lost == (2,)


def test_a_report_survives_the_way() -> None:
    report = Report("", (3, 4), SILENT, False)
    assert Report.decoded(report.encoded(), 5) == report


def test_reachable_or_not() -> None:
    listener = Listener("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as hangs:  # takes connections by its system alone
        peers = {3: ("127.0.0.1", listener.port), 4: hangs.getsockname()}
        assert unreachable(peers, 5.0) == {}
    listener.close()
    assert unreachable({3: ("127.0.0.1", listener.port)}, 5.0) == {3: "Connection refused"}
