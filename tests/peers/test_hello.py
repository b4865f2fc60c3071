"""The first words between two members, and what each of them refuses."""

import json
from dataclasses import replace

import pytest

from dpps.errors import PeerError
from dpps.peers import renew
from dpps.peers.messages import LARGEST_HELLO, PROTOCOL, Hello, newer_file, refuse_other, refuse_replayed
from tests.support.peers import Organisations

FACTS = {"version": "0.2.0", "protocol": PROTOCOL, "model": "abc"}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    return Organisations(tmp_path_factory.mktemp("three"), (7441, 7442))


@pytest.fixture
def hello(three: Organisations) -> Hello:
    return Hello.of(three.federation, FACTS)


def test_what_is_encoded_is_decoded_and_every_hello_has_its_own_number(
    hello: Hello, three: Organisations
) -> None:
    assert Hello.decoded(hello.encoded()) == hello
    assert Hello.of(three.federation, FACTS).nonce != hello.nonce
    refuse_other(hello, hello)
    refuse_replayed(hello.nonce, hello)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": "1"},
        {"epoch": True},
        {"facts": {"version": 3}},
        {"facts": {"version": "\x1b[2J"}},
        {"facts": {str(k): "" for k in range(60)}},
        {"nonce": "x" * 201},
        {"more": ""},
    ],
    ids=["text", "a truth value", "a number", "terminal codes", "too many", "too long", "unknown"],
)
def test_what_is_no_hello_is_refused(hello: Hello, change: dict[str, object]) -> None:
    with pytest.raises(PeerError, match="no hello"):
        Hello.decoded(json.dumps({**hello.__dict__, **change}).encode())


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(PeerError, match="no hello"):
        Hello.decoded(content)


def test_a_hello_is_not_read_beyond_its_length() -> None:
    with pytest.raises(PeerError, match=rf"{LARGEST_HELLO + 1}.*{LARGEST_HELLO}"):
        Hello.decoded(b" " * (LARGEST_HELLO + 1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"federation": "other"}, "wrong run"),
        ({"facts": {**FACTS, "version": "9"}}, r"other version.* 9,.*0\.2\.0"),
        ({"facts": {"version": "0.2.0", "protocol": PROTOCOL}}, "other model"),
        ({"facts": {"version": "0.2.0", "model": "abc"}}, f"protocol.*{PROTOCOL}"),
        ({"digest": "other"}, "wrong revision"),
    ],
)
def test_another_run_version_model_or_file_is_named(
    hello: Hello, change: dict[str, object], words: str
) -> None:
    with pytest.raises(PeerError, match=words):
        refuse_other(hello, replace(hello, **change))  # type: ignore[arg-type]


def test_an_answer_to_another_question_is_a_replay(hello: Hello) -> None:
    with pytest.raises(PeerError, match="replayed"):
        refuse_replayed("another number", hello)


def test_a_later_epoch_is_believed_only_with_the_conveners_file(three: Organisations, hello: Hello) -> None:
    known = three.federation
    assert newer_file(known, hello) is None
    later = renew(known, three.convener)
    theirs = replace(Hello.of(later, FACTS), file=later.to_toml())
    found = newer_file(known, theirs)
    assert found is not None
    assert found.digest == later.digest
    files = (
        replace(theirs, file=file) for file in ("", known.to_toml(), "\ud800", f"# \ud800\n{known.to_toml()}")
    )
    for wrong in (*files, replace(theirs, revision=7)):
        with pytest.raises(PeerError, match="wrong revision"):
            newer_file(known, wrong)
