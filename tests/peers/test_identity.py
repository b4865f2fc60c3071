import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from dpps.errors import UsageError
from dpps.peers import REQUEST, Identity, Key, Request, fingerprint, read_out, verify
from dpps.peers.identity import KEY


def test_the_key_stays_at_home_and_the_request_tells_the_rest(tmp_path: Path) -> None:
    made = Identity.make(tmp_path / "me", "hospital-b", "0.0.0.0:7443", "hospital-b.example:443")
    assert stat.S_IMODE((tmp_path / "me" / KEY).stat().st_mode) == 0o600
    request = Request.read(tmp_path / "me" / REQUEST)
    assert (request.name, request.address) == ("hospital-b", "hospital-b.example:443")
    assert fingerprint(request.key) == made.fingerprint == Identity.open(tmp_path / "me").fingerprint
    assert b"PRIVATE" not in (tmp_path / "me" / REQUEST).read_bytes()
    assert read_out(made.fingerprint).replace(" ", "") == made.fingerprint


def test_addresses(tmp_path: Path) -> None:
    def dialled(name: str, *where: str) -> str:
        Identity.make(tmp_path / name, name, *where)
        return Request.read(tmp_path / name / REQUEST).address

    assert dialled("one", "10.0.0.5:7443") == "10.0.0.5:7443"
    assert dialled("two", "[::1]:7443") == "[::1]:7443"
    assert dialled("three") == ""
    assert not dialled("four", "0.0.0.0:7443").startswith("0.0.0.0")


@pytest.mark.parametrize("name", ["", "Hospital", "a b", "../x", "-a", "a" * 43, "a\n"])
def test_names_that_could_not_stand_in_a_file_name_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--name is"):
        Identity.make(tmp_path / "me", name)


@pytest.mark.parametrize("where", ["7443", "host:", "host:0", "host:65536", "ho st:1", ":1", "host:１"])
def test_addresses_that_nobody_could_dial_are_refused(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match="--listen is"):
        Identity.make(tmp_path / "me", "a", where)


def test_a_key_is_not_written_over(tmp_path: Path) -> None:
    Identity.make(tmp_path / "me", "a")
    with pytest.raises(UsageError, match=r"member\.key.*--out"):
        Identity.make(tmp_path / "me", "a")


def test_damaged_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    folder, other = tmp_path / "me", tmp_path / "other"
    Identity.make(folder, "a")
    Identity.make(other, "a")
    with pytest.raises(UsageError, match=r"--member .*nothing.*member\.key"):
        Identity.open(tmp_path / "nothing")
    (folder / REQUEST).write_bytes((other / REQUEST).read_bytes())
    with pytest.raises(UsageError, match=r"member\.csr.*member\.key"):
        Identity.open(folder)
    (folder / KEY).chmod(0o644)
    with pytest.raises(UsageError, match=r"member\.key.*600"):
        Identity.open(folder)
    (folder / KEY).chmod(0o600)
    (folder / KEY).write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"member\.key"):
        Identity.open(folder)
    another = ed25519.Ed25519PrivateKey.generate()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / KEY).write_bytes(another.private_bytes(pem, pkcs8, serialization.NoEncryption()))
    with pytest.raises(UsageError, match=r"member\.key.*P-256"):
        Identity.open(folder)


def test_a_changed_request_is_refused(tmp_path: Path) -> None:
    Identity.make(tmp_path / "me", "a", "127.0.0.1:7443")
    path = tmp_path / "me" / REQUEST
    lines = path.read_text().splitlines()
    lines[2] = lines[2][::-1]
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError, match=r"--member .*member\.csr"):
        Request.read(path)


def test_signatures(tmp_path: Path) -> None:
    key, other = Key.make(tmp_path / "a"), Key.make(tmp_path / "b")
    signature = key.sign(b"round 7")
    assert verify(key.public, signature, b"round 7")
    assert not verify(key.public, signature, b"round 8")
    assert not verify(other.public, signature, b"round 7")
    assert not verify(key.public, b"nonsense", b"round 7")
