"""A slow network on one machine: hosts are network namespaces, and a switch in this process delays what they say to each other.

with Lan(4) as lan:
    lan.delay = 0.1                                             # seconds one way
    lan.start(0, ["python", "-m", "http.server"])               # a process on host 0, whose address is lan.address(0)

Needs Linux, iproute2 and the right to make namespaces (root); netem is not needed. Nothing outside of the namespaces is changed.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_SET_INTERFACE, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002  # TUNSETIFF; IFF_TAP | IFF_NO_PI
_LONGEST = 65536


def permitted() -> bool:
    """Whether this process may make hosts."""
    return os.geteuid() == 0 and shutil.which("ip") is not None and Path("/dev/net/tun").exists()


class Lan:
    """Hosts that hear each other after `delay` seconds; what fails between them can be changed at any time.

    Attributes:
        delay: seconds one way.
        loss: chance that a packet is lost.
        cut: hosts that hear nobody and are heard by nobody.
        blocked: pairs of hosts that do not hear each other.
        tap: sees every packet that a host sends.

    Args:
        hosts: how many.
        mtu: bytes of a packet at most. The switch takes some 30 microseconds for each, whatever its size, which is what
            megabytes in packets of 1,500 would wait for.
        send_buffer: bytes that a host keeps on their way over one connection at most, where that is to be another number than
            the kernel's own (net.ipv4.tcp_wmem, 4 MB).
    """

    def __init__(self, hosts: int, mtu: int = 1500, send_buffer: int | None = None) -> None:
        self.hosts, self.mtu, self._send_buffer = hosts, mtu, send_buffer
        self.delay, self.loss = 0.0, 0.0
        self.cut: set[int] = set()
        self.blocked: set[frozenset[int]] = set()
        self.tap: Callable[[bytes], None] = lambda packet: None
        self._random = random.Random(0)
        self._name = f"dpps-lan-{os.getpid()}"
        self._processes: list[subprocess.Popen[Any]] = []
        self._taps: list[int] = []
        self._over, self._wake = os.pipe()
        self._switch = threading.Thread(target=self._carry, daemon=True)

    def address(self, host: int) -> str:
        """Of a host."""
        return f"10.98.0.{host + 1}"

    def start(self, host: int, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """A process on a host; it is ended with the network."""
        process = subprocess.Popen(["ip", "netns", "exec", self._namespace(host), *command], **options)
        self._processes.append(process)
        return process

    def __enter__(self) -> Self:
        for host in range(self.hosts):
            name = self._namespace(host)
            _ip("netns", "add", name)
            self._taps.append(_tap(name, self._send_buffer))
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "lan", "address", _hardware(host).hex(":"))
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "lan")
            _ip("-n", name, "link", "set", "lan", "mtu", str(self.mtu), "txqueuelen", "5000", "up")
        self._switch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        os.write(self._wake, b"x")
        self._switch.join()
        for descriptor in (*self._taps, self._over, self._wake):
            os.close(descriptor)
        for host in range(self.hosts):
            _ip("netns", "del", self._namespace(host))

    def _namespace(self, host: int) -> str:
        return f"{self._name}-{host}"

    def _carry(self) -> None:
        """Frames to the host they are for (or to all), each when its time has come."""
        waiting: list[tuple[float, int, int, bytes]] = []
        hosts, count = {_hardware(host): host for host in range(self.hosts)}, 0
        while True:
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready = select.select([self._over, *self._taps], [], [], pause)[0]
            if self._over in ready:
                return
            for tap in ready:
                sender, frame = self._taps.index(tap), os.read(tap, _LONGEST)
                known = hosts.get(frame[:6])
                self.tap(frame)
                for host in range(self.hosts) if known is None else (known,):
                    if host != sender and self._passes(sender, host):
                        count += 1
                        heapq.heappush(waiting, (time.monotonic() + self.delay, count, host, frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(waiting)
                os.write(self._taps[host], frame)

    def _passes(self, sender: int, host: int) -> bool:
        away = bool({sender, host} & self.cut) or frozenset((sender, host)) in self.blocked
        return not away and self._random.random() >= self.loss


def _hardware(host: int) -> bytes:
    """The hardware address of a host."""
    return bytes([2, 0, 0, 0, 0, host])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _tap(namespace: str, send_buffer: int | None) -> int:
    """An interface `lan` in the namespace; what its host sends is read from the descriptor. Interfaces are made where a thread is."""
    made: list[int] = []

    def make() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
        if libc.setns(descriptor, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "cannot enter the namespace")
        os.close(descriptor)
        if send_buffer is not None:
            Path("/proc/sys/net/ipv4/tcp_wmem").write_text(f"4096 16384 {send_buffer}")
        tap = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", b"lan", _TAP_WITHOUT_HEADER))
        made.append(tap)

    thread = threading.Thread(target=make)  # the namespace is that of the thread, and ends with it
    thread.start()
    thread.join()
    return made[0]
