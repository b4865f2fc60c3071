"""A port scan with garbage: random bytes, damaged TLS, and damaged HTTP/2 inside TLS with a member's own certificate."""

import contextlib
import random
import socket
import ssl
import struct
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _client_hello(random_: random.Random) -> bytes:
    """A TLS client's first words, with a few bytes wrong."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    words = bytearray(outgoing.read())
    for _ in range(random_.randrange(1, 8)):
        words[random_.randrange(len(words))] = random_.randrange(256)
    return bytes(words[: random_.randrange(1, len(words) + 1)])


def _random(random_: random.Random) -> bytes:
    return random_.randbytes(random_.choice((1, 5, 100, 3000)))


def _other_protocol(random_: random.Random) -> bytes:
    return random_.choice(
        (b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", PREFACE, b"\x16\x03\x01\xff\xff", b"\x00" * 1000)
    )


def _frames(random_: random.Random) -> bytes:
    """HTTP/2 frames with lengths, types, flags and streams as they come."""
    found = PREFACE + struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)
    for _ in range(random_.randrange(1, 6)):
        body = random_.randbytes(random_.randrange(60))
        length = random_.choice((len(body), len(body) + 3, 1 << 20, (1 << 24) - 1))
        found += struct.pack(">I", length)[1:] + bytes([random_.randrange(12), random_.randrange(256)])
        found += struct.pack(">I", random_.choice((0, 1, 3, 1 << 31))) + body
    return found


def throw(
    port: int, context: ssl.SSLContext, name: str, count: int, seed: int = 0, host: str = "127.0.0.1"
) -> int:
    """Throw so many inputs at a port, three of four without and one of four inside TLS; returns how many were thrown.

    Args:
        port: where.
        context: TLS with a member's certificate.
        name: the name in the certificate of the one thrown at.
        count: how many.
        seed: of what is thrown.
        host: where.
    """
    random_ = random.Random(seed)
    makers: tuple[Callable[[random.Random], bytes], ...] = (_random, _client_hello, _other_protocol, _frames)
    thrown = 0
    for k in range(count):
        content = makers[k % 4](random_)
        plain = socket.create_connection((host, port), timeout=300)
        with plain, contextlib.suppress(OSError):  # thrown out already
            if makers[k % 4] is _frames:
                with context.wrap_socket(plain, server_hostname=name) as secured:
                    secured.sendall(content)
            else:
                plain.sendall(content)
        thrown += 1
    return thrown
