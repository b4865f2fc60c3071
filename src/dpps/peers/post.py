"""The post: how frames reach other members. What is built on it needs no promise but one: a frame arrives whole or not at all."""

from abc import ABC, abstractmethod


class Post(ABC):
    """Carries frames (bytes) between members, by name. Frames may be lost, repeated, delayed and overtake each other.

    `send` may be called from several threads; `receive` from one.
    """

    @abstractmethod
    def send(self, to: str, frame: bytes) -> None:
        """Hand a frame over. Never waits: it is dropped where `to` is not connected or too much waits already."""

    @abstractmethod
    def receive(self, seconds: float) -> tuple[str, bytes] | None:
        """The next frame and who sent it; None when none came within so many seconds (0: look once)."""

    @abstractmethod
    def connected(self) -> frozenset[str]:
        """Who can be reached right now, as far as is known here."""

    def connection(self, name: str) -> int:
        """Which connection with `name` is the newest: another number after every new one, where that cannot be seen from
        `connected` because the one before is not yet known to be dead."""
        return 0

    @abstractmethod
    def close(self) -> None:
        """Let go of all connections."""
