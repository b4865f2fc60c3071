"""A member's identity: its key, which never leaves its folder, its certificate request and its fingerprint.

The fingerprint is that of the public key (SHA-256 of its standard encoding), so it can be read out on the telephone before
there is a certificate, and stays the same when the certificate is renewed.
"""

import hashlib
import re
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dpps.disk import private_folder, write_aside, write_private, writing
from dpps.errors import UsageError
from dpps.noise.pairs.keys import IdentityKey

KEY, REQUEST, LISTEN, PAIRS_KEY = "member.key", "member.csr", "listen", "pairs.key"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]")
_SCHEME, _PAIRS_SCHEME = "dpps://", "dpps-pairs:"
_PAIR_KEY = re.compile(r"[0-9a-f]{64}")
_CURVE, _SIGNED = ec.SECP256R1, ec.ECDSA(hashes.SHA256())
_CLOCKS = timedelta(days=1)
"""How far clocks may be apart: a new certificate is valid from so long ago."""


def check_name(name: str) -> str:
    """Refuse a name that could not stand in a certificate, a file name and a log line."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name is {name!r}: use small letters, digits and hyphens, at most 42, such as hospital-b"
        )
    return name


def check_address(option: str, address: str) -> str:
    """Refuse what is not HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"{option} is {address!r}: give HOST:PORT, such as hospital-b.example:7443 or [::1]:7443"
        )
    return address


def fingerprint(key: ec.EllipticCurvePublicKey) -> str:
    """64 hexadecimal digits that stand for a public key."""
    encoded = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(encoded).hexdigest()


def encoded_point(key: ec.EllipticCurvePublicKey) -> bytes:
    """A public key in 65 bytes, which are read without a parser."""
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)


def key_of_point(point: bytes) -> ec.EllipticCurvePublicKey:
    """What `encoded_point` gave. ValueError: it is no point of the curve."""
    if len(point) != 65:
        raise ValueError(f"a key of {len(point)} bytes")
    return ec.EllipticCurvePublicKey.from_encoded_point(_CURVE(), point)


def read_out(digits: str) -> str:
    """A fingerprint in groups of four, for the telephone."""
    return " ".join(digits[k : k + 4] for k in range(0, len(digits), 4))


def server_name(digits: str) -> str:
    """The name in a member's certificate that those who dial it look for: its fingerprint, in two labels for their length."""
    return f"{digits[:32]}.{digits[32:]}.dpps"


def verify(key: ec.EllipticCurvePublicKey, signature: bytes, message: bytes) -> bool:
    """Whether the owner of the key has signed the message."""
    try:
        key.verify(signature, message, _SIGNED)
    except InvalidSignature:
        return False
    return True


def issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether a certificate is one that the issuer has signed."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


class Key:
    """A private key (P-256: what TLS 1.3 is sure to take) in a file that only its owner can read."""

    def __init__(self, private: ec.EllipticCurvePrivateKey) -> None:
        self._private = private

    @classmethod
    def new(cls) -> "Key":
        """A new key, in no file yet."""
        return cls(ec.generate_private_key(_CURVE()))

    @classmethod
    def make(cls, path: Path) -> "Key":
        """A new key in a new file."""
        key = cls.new()
        with writing(path):
            private_folder(path.parent)
        if path.exists():
            raise UsageError(f"{path} exists, and a key is not written over: choose another --out")
        write_private(path, key.pem())
        return key

    @classmethod
    def read(cls, path: Path) -> "Key":
        """The key in a file. UsageError: there is none, it is something else, or others may read it."""
        try:
            content, mode = path.read_bytes(), path.stat().st_mode
        except OSError as error:
            raise UsageError(
                f"the key {path} cannot be read ({error.strerror}): name the file where dpps federation wrote it, or restore it from a copy"
            ) from error
        if mode & 0o077:
            raise UsageError(f"others may read the key {path}: make a new one, and keep it at mode 600")
        try:
            private = serialization.load_pem_private_key(content, None)
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is not a key of dpps federation key: restore it from a copy") from error
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise UsageError(
                f"{path} holds another kind of key than P-256: make one with dpps federation key"
            )
        return cls(private)

    def pem(self) -> bytes:
        """The private key, for its own file and for TLS."""
        return self._private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )

    @property
    def public(self) -> ec.EllipticCurvePublicKey:
        """The half that others may have."""
        return self._private.public_key()

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public)

    def sign(self, message: bytes) -> bytes:
        """A signature that `verify` accepts."""
        return self._private.sign(message, _SIGNED)

    def request(self, name: str, address: str, pair_key: bytes = b"") -> bytes:
        """A certificate request (PKCS 10, PEM) with the member's name, the address at which others dial it ("": nobody does), and the
        public X25519 key with which it shares noise."""
        builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(name))
        told = [_SCHEME + address] if address else []
        told += [_PAIRS_SCHEME + pair_key.hex()] if pair_key else []
        if told:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(each) for each in told])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self._private, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def certify(self, request: "Request", issuer: x509.Certificate, days: int) -> x509.Certificate:
        """A member's certificate, for TLS in both directions."""
        return (
            _begun(request.name, request.key, days)
            .issuer_name(issuer.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.DNSName(server_name(fingerprint(request.key)))]),
                critical=False,
            )
            .sign(self._private, hashes.SHA256())
        )

    def certify_itself(self, name: str, days: int) -> x509.Certificate:
        """A certificate that signs others."""
        return (
            _begun(name, self.public, days)
            .issuer_name(_subject(name))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._private, hashes.SHA256())
        )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _begun(name: str, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC).replace(microsecond=0)
    builder = x509.CertificateBuilder().subject_name(_subject(name)).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(min(now, now + timedelta(days=days)) - _CLOCKS).not_valid_after(
        now + timedelta(days=days)
    )


@dataclass(frozen=True)
class Request:
    """What a member asks the convener to certify."""

    name: str
    address: str
    """Where others dial it; empty when it only dials out."""
    key: ec.EllipticCurvePublicKey
    pair_key: bytes = b""
    """With which it shares noise that cancels; empty in requests of earlier versions."""

    @classmethod
    def read(cls, path: Path) -> "Request":
        """The request in a file, its own signature checked. UsageError: it cannot be read, was changed, or asks for something
        else."""
        try:
            found = x509.load_pem_x509_csr(path.read_bytes())
        except (OSError, ValueError) as error:
            why = (
                f"cannot be read ({error.strerror})"
                if isinstance(error, OSError)
                else "is not a certificate request"
            )
            raise UsageError(
                f"--member {path} {why}: name the file {REQUEST} that dpps federation key wrote at the member"
            ) from error
        key = found.public_key()
        if not found.is_signature_valid or not isinstance(key, ec.EllipticCurvePublicKey):
            raise UsageError(f"--member {path} is not signed by its own key: ask the member to send it again")
        names = [str(n.value) for n in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if len(names) != 1:
            raise UsageError(f"--member {path} names {len(names)} members: dpps federation key names one")
        pair_key = _told_in(found, _PAIRS_SCHEME)
        if pair_key and not _PAIR_KEY.fullmatch(pair_key):
            raise UsageError(f"--member {path} has a pair key that is none: ask the member to make it anew")
        if address := _told_in(found, _SCHEME):
            check_address("the address in a request", address)
        return cls(check_name(names[0]), address, key, bytes.fromhex(pair_key))


def _told_in(request: x509.CertificateSigningRequest, scheme: str) -> str:
    """What a request says under this scheme; empty: nothing."""
    try:
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    found = [n for n in names.get_values_for_type(x509.UniformResourceIdentifier) if n.startswith(scheme)]
    return found[0].removeprefix(scheme) if found else ""


@dataclass(frozen=True)
class Identity:
    """A member's own folder and key."""

    folder: Path
    name: str
    listen: str
    """Address and port at which it listens. Empty if it only connects to others."""
    key: Key

    @classmethod
    def make(cls, folder: Path, name: str, listen: str = "", address: str = "") -> "Identity":
        """Create a new key and a certificate request.

        Args:
            folder: folder for both; only its owner can read the key.
            name: of the organisation.
            listen: HOST:PORT to listen at. Empty: only connect to others.
            address: HOST:PORT at which the others reach it; by default where it listens, or, when that is every address of
                this machine, the machine's name.
        """
        check_name(name)
        if listen:
            check_address("--listen", listen)
        if address:
            check_address("--address", address)
        if address and not listen:
            raise UsageError("--address belongs to --listen: without a port to listen at nobody can dial")
        host, _, port = listen.rpartition(":")
        if host in ("0.0.0.0", "[::]") and not address:
            address = check_address("the name of this machine", f"{socket.gethostname()}:{port}")
        key = Key.make(folder / KEY)
        pair_key = IdentityKey.kept_in(folder / PAIRS_KEY)
        with writing(folder):
            write_aside(folder / REQUEST, key.request(name, address or listen, pair_key.public))
            write_aside(folder / LISTEN, f"{listen}\n".encode())
        return cls(folder, name, listen, key)

    @classmethod
    def open(cls, folder: Path) -> "Identity":
        """The member in a folder."""
        if not (folder / KEY).exists():
            raise UsageError(
                f"--member {folder} holds no {KEY}: name the folder that dpps federation key wrote"
            )
        key, request = Key.read(folder / KEY), Request.read(folder / REQUEST)
        if fingerprint(request.key) != key.fingerprint:
            raise UsageError(f"{folder / REQUEST} is of another key than {folder / KEY}: restore one of them")
        try:
            listen = (folder / LISTEN).read_text().strip()
        except OSError as error:
            raise UsageError(
                f"{folder / LISTEN} cannot be read ({error.strerror}): restore it; it holds the HOST:PORT given with --listen, or nothing"
            ) from error
        return cls(folder, request.name, listen, key)

    @property
    def fingerprint(self) -> str:
        return self.key.fingerprint

    def pair_key(self) -> IdentityKey:
        """The X25519 key with which it shares noise. UsageError: there is none: the folder is of an earlier version."""
        if not (self.folder / PAIRS_KEY).exists():
            raise UsageError(
                f"{self.folder} holds no {PAIRS_KEY}, with which noise is shared: restore it, or make a new key and take part in a new federation"
            )
        return IdentityKey.kept_in(self.folder / PAIRS_KEY)
