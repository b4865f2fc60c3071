"""Queues with an end: how many frames, and how many bytes, wait at most."""

import threading
import time
from collections import deque
from collections.abc import Iterator

FRAMES = 512
"""How many frames wait at most for one member; rows are fewer, as each waits for its acknowledgement."""


class Outgoing(Iterator[bytes]):
    """Frames on their way to one connection. What does not fit is dropped; iterating waits for the next.

    Args:
        largest: bytes that wait at most.
    """

    def __init__(self, largest: int) -> None:
        self._largest, self._waiting = largest, 0
        self._frames: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._ending = False

    def put(self, frame: bytes) -> bool:
        """Whether there was room."""
        with self._changed:
            full = len(self._frames) >= FRAMES or self._waiting + len(frame) > self._largest
            if self._ending or full:
                return False
            self._frames.append(frame)
            self._waiting += len(frame)
            self._changed.notify_all()
            return True

    def end(self, *, at_once: bool = False) -> None:
        """No more frames: iteration ends after those that wait, or at once."""
        with self._changed:
            self._ending = True
            if at_once:
                self._frames.clear()
            self._changed.notify_all()

    def __next__(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._ending)
            if not self._frames:
                raise StopIteration
            frame = self._frames.popleft()
            self._waiting -= len(frame)
            return frame


class Incoming:
    """Frames that have arrived, taken from one member after the other, so that nobody can crowd the others out.

    Args:
        largest: bytes that wait at most of one member; then its oldest frames are dropped.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._frames: dict[str, deque[bytes]] = {}
        self._waiting: dict[str, int] = {}
        self._changed = threading.Condition()

    def put(self, name: str, frame: bytes) -> None:
        """A frame of a member has arrived."""
        with self._changed:
            frames = self._frames.setdefault(name, deque())
            frames.append(frame)
            self._waiting[name] = self._waiting.get(name, 0) + len(frame)
            while len(frames) > FRAMES or (self._waiting[name] > self._largest and len(frames) > 1):
                self._waiting[name] -= len(frames.popleft())
            self._changed.notify()

    def forget(self, name: str) -> None:
        """Drop the frames of a member that wait."""
        with self._changed:
            self._frames.pop(name, None)
            self._waiting.pop(name, None)

    def get(self, seconds: float) -> tuple[str, bytes] | None:
        """The next frame; None when none comes within so many seconds."""
        until = time.monotonic() + seconds
        with self._changed:
            while not self._frames:
                left = until - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            if not self._frames:
                return None
            name = next(iter(self._frames))
            frames = self._frames.pop(name)
            frame = frames.popleft()
            self._waiting[name] -= len(frame)
            if frames:
                self._frames[name] = frames  # now behind the others
            return name, frame
