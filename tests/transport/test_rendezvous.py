"""Where processes meet, as the environment says it."""

import socket

import pytest

from dpps.errors import UsageError
from dpps.transport import Rendezvous, address_towards, restarted, started_distributed, wait_for
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
