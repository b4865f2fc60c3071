"""A network in one process, in time that passes only while everybody waits:
for rehearsing failures without sockets and without waiting.

Every member is a function that runs in a thread of its own, and exactly one of them runs at a time:
whoever waits for a frame hands on to the member to whom something happens next.
So a schedule of failures always runs the same way, and a week takes as long as what is computed in it.
"""

import heapq
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dpps.peers import Post

Main = Callable[["SimulatedPost"], None]
Tap = Callable[[str, str, bytes], None]


class Killed(BaseException):
    """This member's process ends here, without a chance to tidy up."""


@dataclass
class _Process:
    """One start of a member."""

    name: str
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    inbox: list[tuple[float, int, str, bytes]] = field(default_factory=list)
    wakes: float = 0.0
    waiting: bool = True
    killed: bool = False
    error: BaseException | None = None

    @property
    def next(self) -> float:
        """When something happens to it; only while it waits."""
        return min(self.wakes, self.inbox[0][0]) if self.inbox else self.wakes


class Network:
    """Members, and the faults between them.

    Args:
        mains: what each member does with its post, from start (or restart) to end.
        seed: of losses, delays and the like.
        loss: chance that a frame is lost.
        duplicate: chance that it arrives twice.
        delay: seconds a frame travels: at least, at most; frames overtake each other where these differ.
        tap: sees every frame that is handed over: (from, to, frame).
    """

    def __init__(
        self,
        mains: Mapping[str, Main],
        seed: int = 0,
        *,
        loss: float = 0.0,
        duplicate: float = 0.0,
        delay: tuple[float, float] = (0.02, 0.02),
        tap: Tap | None = None,
    ) -> None:
        self.now = 0.0
        self.loss, self.duplicate, self.delay = loss, duplicate, delay
        self._mains, self._tap = dict(mains), tap
        self._random = random.Random(seed)
        self._order = 0
        self._processes: dict[str, _Process] = {}
        self._plan: list[tuple[float, int, Callable[[], None]]] = []
        self._blocked: set[frozenset[str]] = set()
        self._unnoticed: dict[frozenset[str], float] = {}
        self._done = threading.Semaphore(0)
        self._failed: BaseException | None = None

    # What a test plans

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do this at that time: `lambda: network.kill("b")`."""
        heapq.heappush(self._plan, (time, self._number(), action))

    def cut(self, one: str, other: str, notice: float = 0.0) -> None:
        """No frame passes between these two from now on; they notice after so many seconds."""
        pair = frozenset((one, other))
        self._blocked.add(pair)
        self._unnoticed[pair] = self.now + notice

    def mend(self, one: str, other: str) -> None:
        """Frames pass again."""
        self._blocked.discard(frozenset((one, other)))

    def isolate(self, name: str, notice: float = 0.0) -> None:
        """Cut a member off from everybody."""
        for other in self._mains:
            if other != name:
                self.cut(name, other, notice)

    def rejoin(self, name: str) -> None:
        """Undo `isolate`."""
        for other in self._mains:
            self.mend(name, other)

    def kill(self, name: str) -> None:
        """End a member's process at the next moment at which it waits or sends."""
        if name in self._processes:
            process = self._processes[name]
            process.killed, process.wakes = True, self.now

    def restart(self, name: str) -> None:
        """Start a member that was killed or has ended."""
        if name not in self._processes:
            self._start(name)

    def run(self, until: float = float("inf")) -> None:
        """Let all members run to their ends; raises what any of them raised. `until`: the time at which all are killed."""
        for name in self._mains:
            self._start(name)
        self.at(until, self._end)
        self._next()
        self._done.acquire()
        if self._failed is not None:
            raise self._failed

    def _end(self) -> None:
        for name in list(self._processes):
            self.kill(name)

    @property
    def running(self) -> frozenset[str]:
        """Who has a process."""
        return frozenset(self._processes)

    # What happens

    def _number(self) -> int:
        self._order += 1
        return self._order

    def _start(self, name: str) -> None:
        process = _Process(name, wakes=self.now)
        self._processes[name] = process
        thread = threading.Thread(target=self._live, args=(process,), daemon=True)
        thread.start()

    def _live(self, process: _Process) -> None:
        process.turn.acquire()
        try:
            self._mains[process.name](SimulatedPost(self, process))
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that called `run`
            self._failed = self._failed or error
            self._end()
        if self._processes.get(process.name) is process:
            del self._processes[process.name]
        self._next()

    def _next(self) -> None:
        """Let time pass to the next thing that happens, and give its member the turn."""
        while True:
            planned = self._plan[0][0] if self._plan else float("inf")
            soonest = min(self._processes.values(), key=lambda p: p.next, default=None)
            if soonest is None and (planned == float("inf") or self._failed is not None):
                self._done.release()
                return
            if soonest is None or planned <= soonest.next:
                time, _, action = heapq.heappop(self._plan)
                self.now = max(self.now, time)
                action()
                continue
            self.now = max(self.now, soonest.next)
            soonest.waiting = False
            soonest.turn.release()
            return

    def _send(self, process: _Process, to: str, frame: bytes) -> None:
        if process.killed:
            raise Killed
        if to not in self._mains:
            raise KeyError(f"{to} is no member")
        if self._tap is not None:
            self._tap(process.name, to, frame)
        receiver = self._processes.get(to)
        copies = 2 if self._random.random() < self.duplicate else 1
        for _ in range(copies):
            arrival = self.now + self._random.uniform(*self.delay)
            lost = self._random.random() < self.loss or frozenset((process.name, to)) in self._blocked
            if receiver is not None and not lost:
                heapq.heappush(receiver.inbox, (arrival, self._number(), process.name, frame))

    def _receive(self, process: _Process, seconds: float) -> tuple[str, bytes] | None:
        process.wakes = self.now + max(0.0, seconds)
        process.waiting = True
        self._next()
        process.turn.acquire()
        if process.killed:
            raise Killed
        if process.inbox and process.inbox[0][0] <= self.now:
            _, _, sender, frame = heapq.heappop(process.inbox)
            return sender, frame
        return None

    def _connected(self, process: _Process) -> frozenset[str]:
        return frozenset(
            name for name in self._mains if name != process.name and self._seems_connected(process.name, name)
        )

    def _seems_connected(self, one: str, other: str) -> bool:
        pair = frozenset((one, other))
        if pair in self._blocked:
            return self.now < self._unnoticed[pair]
        return other in self._processes


class SimulatedPost(Post):
    """One member's end of a `Network`, for one start of its process."""

    def __init__(self, network: Network, process: _Process) -> None:
        self._network, self._process = network, process

    def clock(self) -> float:
        """Seconds of the network's own time."""
        return self._network.now

    def send(self, to: str, frame: bytes) -> None:
        self._network._send(self._process, to, frame)

    def receive(self, seconds: float) -> tuple[str, bytes] | None:
        return self._network._receive(self._process, seconds)

    def connected(self) -> frozenset[str]:
        return self._network._connected(self._process)

    def close(self) -> None:
        """Nothing to let go of."""
