"""gRPC as it is used here: loaded only when asked for, TLS 1.3 only, nothing of its own on the terminal."""

import os
from collections.abc import Sequence
from typing import Any

from dpps.errors import needs_extra

SERVICE, METHOD = "dpps.Peers", "Link"
TLS = "TLSv1.3"
_ALIVE, _ANSWER = 5_000, 10_000
"""Milliseconds after which a silent connection is asked for a sign of life, and that it has for the answer."""


def load_grpc() -> Any:
    """The module, or one line that names the extra to install.

    TLS 1.3 has its own ciphers, which cannot be chosen. So the only choice offered for TLS 1.2 is one that needs a key of another
    kind (RSA) than all members have: such a handshake finds no cipher. The listening side looks at the version once more, which
    is all that refuses TLS 1.2 in a program that has loaded gRPC before, for gRPC reads these settings once.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES128-GCM-SHA256"
    with needs_extra("peers"):
        import grpc
    return grpc


def options(largest: int, *further: tuple[str, Any]) -> Sequence[tuple[str, Any]]:
    """Of both sides of a connection.

    Args:
        largest: bytes of a message at most; a longer one is refused when its length has arrived, before its bytes are.
        further: other options.
    """
    return (
        ("grpc.max_receive_message_length", largest),
        ("grpc.max_send_message_length", largest),
        ("grpc.max_metadata_size", 8192),
        ("grpc.absolute_max_metadata_size", 16384),
        ("grpc.keepalive_time_ms", _ALIVE),
        ("grpc.keepalive_timeout_ms", _ANSWER),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.lookahead_bytes", min(3 * largest, 32 << 20)),
        ("grpc.http2.max_frame_size", 1 << 20),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        *further,
    )
