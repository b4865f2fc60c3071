"""A secret that is too short is refused; what a stranger writes at the meeting point is not believed."""

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

import dpps
from dpps.cli import main
from dpps.transport import SECRET, Cluster, Identity, SignedStore, check_secret, digest, read_secret
from tests.support import processes

LONG = "0123456789abcdef" * 2


@pytest.mark.parametrize("text", ["s", "between these hosts", LONG])
def test_a_secret_has_128_bits_or_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, text)
    if len(text) >= 32:
        assert read_secret() == text.encode()
    else:
        with pytest.raises(dpps.errors.UsageError, match=r"\$DPPS_SECRET .*128 .*dpps secret"):
            read_secret()


@pytest.mark.parametrize(
    "text", ["0123456789abcdef" * 2, "Zm9vYmFyYmF6cXV4MDEyMw", "0" * 31 + "1", "12345678" * 4]
)
def test_length_counts_by_alphabet(text: str) -> None:
    """32 hexadecimal digits or 22 letters and digits are enough; one digit repeated is not, nor are 32 decimal digits."""
    if text in ("0123456789abcdef" * 2, "Zm9vYmFyYmF6cXV4MDEyMw"):
        check_secret(text)
    else:
        with pytest.raises(dpps.errors.UsageError, match=r"\$DPPS_SECRET .*\d+ bits"):
            check_secret(text)


def test_no_secret_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert read_secret() == b""


def test_the_command_makes_one_that_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    made = []
    for _ in range(2):
        assert main(["secret"]) == 0
        made.append(capsys.readouterr().out.strip())
        check_secret(made[-1])
    assert made[0] != made[1]
    assert main(["secret", "please"]) == 2


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
    assert other.get("0/1") == store.read["0/1"]
    assert digest(other.read) == digest(store.read) != digest({"0/1": b"10.0.0.66:4711"})


def _exchange_addresses(cluster: Cluster) -> str:
    """Rank 0 finds, where rank 1 had put its address, what a stranger who reaches the meeting point has put there."""
    cluster.secret = LONG.encode()
    cluster.join()
    connect, rendezvous = cluster._group, cluster.rendezvous

    def after_the_stranger(device: object, store: SignedStore) -> object:
        if cluster.rank == 0:
            stranger = PrefixStore("mesh", TCPStore(rendezvous.host, rendezvous.port, None, False))
            address = bytearray(stranger.get("0/1"))  # waits for rank 1
            address[-20] ^= 1
            stranger.set("0/1", bytes(address))
        return connect(device, store)  # type: ignore[arg-type]

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
