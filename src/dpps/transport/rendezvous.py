"""Which of the processes this is, and where they meet."""

import os
import socket
import time
from dataclasses import dataclass

from dpps.errors import UsageError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def started_distributed() -> bool:
    """Whether torchrun or a user by hand started this process as one of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def restarted() -> bool:
    """Whether torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@dataclass(frozen=True)
class Rendezvous:
    """Which of the processes this is, and where they meet; what torchrun puts into the environment."""

    rank: int
    size: int
    host: str
    port: int
    by_agent: bool = False
    """torchrun itself already listens there and tells everybody where the real meeting point is."""
    attempt: str = "0"

    @classmethod
    def from_environment(cls) -> "Rendezvous":
        """Of torchrun, or set by hand: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT."""
        missing = [name for name in _NEEDED if name not in os.environ]
        if missing:
            raise UsageError(
                f"a distributed run needs {', '.join(_NEEDED)} in the environment and {', '.join(missing)} is missing: "
                "start it with torchrun --nproc-per-node 4 -m dpps train"
            )
        try:
            rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        except ValueError as error:
            raise UsageError(f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers: {error}") from None
        if not 0 <= rank < size:
            raise UsageError(f"RANK is {rank}: with WORLD_SIZE {size} it must be 0 to {size - 1}")
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        run, count = (
            os.environ.get("TORCHELASTIC_RUN_ID", ""),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        return cls(rank, size, os.environ["MASTER_ADDR"], port, agent, f"{run}/{count}")


def wait_for(host: str, port: int, seconds: float) -> None:
    """Until somebody listens there; torch would fill the screen while trying."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def address_towards(host: str, port: int) -> str:
    """The address of this machine on the way to `host`: there peers can reach it, and only there it listens."""
    family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        address: str = probe.getsockname()[0]
    return address
