"""gRPC as it is used here."""

import os
import sys

import pytest

from dpps.errors import UsageError
from dpps.peers.connections import load_grpc, options


def test_messages_have_a_largest_size_in_both_directions_and_nothing_is_named_twice() -> None:
    found = dict(options(1000, ("grpc.so_reuseport", 0)))
    assert found["grpc.max_receive_message_length"] == found["grpc.max_send_message_length"] == 1000
    assert found["grpc.so_reuseport"] == 0
    assert found["grpc.enable_http_proxy"] == 0  # a proxy would see who talks to whom
    assert len(found) == len(options(1000, ("grpc.so_reuseport", 0)))


def test_no_cipher_of_tls_1_2_fits_the_members_keys() -> None:
    load_grpc()
    assert all("ECDHE-RSA" in suite for suite in os.environ["GRPC_SSL_CIPHER_SUITES"].split(":"))


def test_the_extra_is_named_where_grpc_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(UsageError, match=r"dpps\[peers\]"):
        load_grpc()
