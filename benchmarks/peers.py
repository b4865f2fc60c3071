"""What the post between organisations takes: throughput beside a bare TLS stream, and rounds between hosts that hear each other after L seconds.

Throughput: two processes on this machine, frames of 4 MB one way, mutual TLS 1.3 both times. Claim: a frame takes at most 1.67 times
what it takes in the bare stream (60 % of its throughput).
Rounds: four hosts in a ring (network namespaces, see tests/system/lan.py); in every round each sends a row to both neighbours and waits for theirs.
Claim: at most 2.5 L for a round of `dpps federation join`, which is more than a round of the post alone: gradients, noise, ledger and outbox on disk.
With noise that cancels a round between eight members on EXP takes at most 1.5 times one with independent noise.
What the network alone takes is the difference to the same without latency ("more").
Hosts may have 32 MB on their way over a connection: with the kernel's own 4 MB a row of that size takes two journeys.
"""

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from latency import DELAYS, HOSTS, Lan, by_latency, of_round, refusal
from measure import Row, dpps, main, spreads

from dpps.peers import REQUEST, Channel, Federation, Identity, Key, Request, Rules, convene

LARGE, SMALL = 4 << 20, 31_400
ROUNDS, FRAMES, TURNS = 30, 50, 5
SLOWER, IN_L, PAIRS = 1.67, 2.5, 1.5
"""Targets."""
EIGHT = 8
PLAN = {"topology": "ring", "unit": "record", "algorithm": "partpsp", "model": "mlp", "epochs": 1}


def federation(folder: Path, addresses: list[str]) -> Federation:
    """A member for each address, and the contract in folder/federation.toml."""
    key = Key.make(folder / "convener.key")
    for k, address in enumerate(addresses):
        Identity.make(folder / f"m{k}", f"m{k}", address)
    requests = [Request.read(folder / f"m{k}" / REQUEST) for k in range(len(addresses))]
    made = convene({**PLAN, "nodes": len(addresses)}, requests, key, rules=Rules(2))
    (folder / "federation.toml").write_text(made.to_toml())
    return made


def opened(folder: Path, k: int) -> Channel:
    """The post of one member."""
    channel = Channel(Federation.read(folder / "federation.toml"), Identity.open(folder / f"m{k}"))
    return channel.start(largest=LARGE + 65536)


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


# Throughput


def receive_frames(folder: Path, count: int) -> None:
    """The other end: says when all has come."""
    channel, got = opened(folder, 1), 0
    while got < count:
        if channel.receive(60) is not None:
            got += 1
    channel.send("m0", b"all")
    time.sleep(1)
    channel.close()


def frame_seconds(folder: Path, count: int) -> float:
    """Seconds of a frame through the post."""
    federation(folder, [f"127.0.0.1:{free_port()}" for _ in range(2)])
    other = subprocess.Popen([sys.executable, __file__, "receive", str(folder), str(count)])
    channel, frame = opened(folder, 0), os.urandom(LARGE)
    while not channel.connected():
        time.sleep(0.01)
    begun, sent = time.perf_counter(), 0
    while sent < count:
        before = channel.traffic["m1"].dropped
        channel.send("m1", frame)
        if channel.traffic["m1"].dropped == before:
            sent += 1
        else:
            time.sleep(0.001)  # the queue is full
    if channel.receive(60) is None:
        raise SystemExit("the frames did not all arrive")
    taken = time.perf_counter() - begun
    other.wait(60)
    channel.close()
    return taken / count


def _context(folder: Path, k: int, purpose: ssl.Purpose) -> ssl.SSLContext:
    contract = Federation.read(folder / "federation.toml")
    (folder / f"{k}.crt").write_bytes(contract.members[k].pem)
    context = ssl.create_default_context(purpose, cadata=contract.convener_pem.decode())
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / f"{k}.crt", folder / f"m{k}" / "member.key")
    return context


def receive_stream(folder: Path, port: int, count: int) -> None:
    """The other end of a bare TLS stream."""
    plain = socket.create_connection(("127.0.0.1", port))
    with _context(folder, 1, ssl.Purpose.SERVER_AUTH).wrap_socket(plain) as secured:
        buffer, missing = memoryview(bytearray(LARGE)), count * LARGE
        while missing:
            missing -= secured.recv_into(buffer)
        secured.sendall(b"all")


def bare_seconds(folder: Path, count: int) -> float:
    """Seconds of as many bytes through a TLS stream and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        other = subprocess.Popen([sys.executable, __file__, "stream", str(folder), str(port), str(count)])
        plain, _ = server.accept()
        frame = os.urandom(LARGE)
        with _context(folder, 0, ssl.Purpose.CLIENT_AUTH).wrap_socket(plain, server_side=True) as secured:
            begun = time.perf_counter()
            for _ in range(count):
                secured.sendall(frame)
            secured.recv(3)
            taken = time.perf_counter() - begun
    other.wait(60)
    return taken / count


# Rounds


def take_part(folder: Path, k: int, size: int, rounds: int) -> None:
    """One host: a row to both neighbours in every round, and theirs; prints the seconds of a round."""
    channel = opened(folder, k)
    others = {f"m{(k + d) % HOSTS}" for d in (1, HOSTS - 1)}
    row, heard, begun = os.urandom(size), dict.fromkeys(others, -1), 0.0
    while channel.connected() != others:
        time.sleep(0.01)
    time.sleep(2)
    for t in range(rounds):
        if t == 10:  # connections have found their speed
            begun = time.perf_counter()
        for other in others:
            channel.send(other, t.to_bytes(4, "little") + row)
        while min(heard.values()) < t:
            found = channel.receive(60)
            if found is None:
                raise SystemExit("a row did not arrive")
            heard[found[0]] = int.from_bytes(found[1][:4], "little")
    taken = time.perf_counter() - begun
    time.sleep(1)
    channel.close()
    if k == 0:
        print(json.dumps(taken / (rounds - 10)))


def round_seconds(lan: Lan, folder: Path, size: int) -> float:
    """Seconds of a round of the post."""
    command = [sys.executable, __file__, "take-part", str(folder)]
    started = [
        lan.start(k, [*command, str(k), str(size), str(ROUNDS)], stdout=subprocess.PIPE, text=True)
        for k in range(HOSTS)
    ]
    said = [process.communicate(timeout=600)[0] for process in started]
    return float(said[0])


def trained(lan: Lan, folder: Path, more: str = "--topology ring") -> float:
    """Seconds of a round of dpps federation join on all hosts: rows of 31 kB."""
    plan, hosts = folder / "plan.toml", lan.hosts
    size = 10_000 // hosts
    options = f"--nodes {hosts} --declared-sizes {size} --batch-size 50 --epochs {hosts // HOSTS} {more}"
    with plan.open("w") as file:
        subprocess.run(dpps(f"train {options} --print-config"), stdout=file, check=True)
    made, begun = folder / "f", time.time_ns()
    shutil.rmtree(made, ignore_errors=True)
    members = [word for k in range(hosts) for word in ("--member", folder / f"m{k}" / REQUEST)]
    create = dpps("federation create", plan, *members, "--out", made)
    subprocess.run(create, check=True, stdout=subprocess.DEVNULL)
    convener, environment = Key.read(made / "convener.key").fingerprint, os.environ | {"OMP_NUM_THREADS": "1"}
    started = []
    for k in range(hosts):
        own = ("--member", folder / f"m{k}", "--out", folder / f"run-{begun}-{k}", "--convener", convener)
        command = dpps("federation join --quiet", made / "federation.toml", *own)
        started.append(lan.start(k, command, env=environment, stdout=subprocess.DEVNULL))
    codes = [process.wait(900) for process in started]
    if any(codes):
        raise SystemExit(f"dpps federation join ended with {codes}")
    return of_round(folder / f"run-{begun}-0")


def rows(quick: bool) -> Iterator[Row]:
    """Throughput, then rounds."""
    frames, turns = (2, 1) if quick else (FRAMES, TURNS)
    with tempfile.TemporaryDirectory() as name:
        taken: tuple[list[float], list[float]] = [], []
        for turn in range(turns):
            folder = Path(name) / str(turn)
            folder.mkdir()
            taken[0].append(frame_seconds(folder, frames))
            taken[1].append(bare_seconds(folder, frames))
        ours, stream, ratio = spreads(*taken)
        yield Row("a frame of 4 MB between organisations", ours, "bare TLS stream", stream, ratio, SLOWER)
    if refusal(quick):
        yield Row("round between organisations", note=refusal(quick))
        return
    with Lan(HOSTS, mtu=60_000, send_buffer=32 << 20) as lan, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        federation(folder, [f"{lan.address(k)}:7443" for k in range(HOSTS)])
        for what, size in (("the post, 31 kB", SMALL), ("the post, 4 MB", LARGE)):
            measure = lambda size=size: round_seconds(lan, folder, size)  # noqa: E731
            yield from by_latency(lan, f"round of {what}", IN_L, measure)
        yield from by_latency(lan, "round of dpps federation join, 31 kB", IN_L, lambda: trained(lan, folder))
    with Lan(EIGHT, mtu=60_000, send_buffer=32 << 20) as lan, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        federation(folder, [f"{lan.address(k)}:7443" for k in range(EIGHT)])
        for lan.delay in DELAYS:
            shared, alone = [], []
            for _ in range(3):
                shared.append(
                    trained(lan, folder, "--topology exp --trust pairs --colluders 0 --absentees 1")
                )
                alone.append(trained(lan, folder, "--topology exp"))
            what = f"round with noise that cancels, eight members, 31 kB, L = {1e3 * lan.delay:.0f} ms"
            ours, independent, ratio = spreads(shared, alone)
            yield Row(what, ours, "independent noise", independent, ratio, PAIRS)


if __name__ == "__main__":
    parts = {"receive": receive_frames, "stream": receive_stream, "take-part": take_part}
    if len(sys.argv) > 1 and sys.argv[1] in parts:
        folder_, *numbers = sys.argv[2:]
        parts[sys.argv[1]](Path(folder_), *map(int, numbers))  # type: ignore[operator]
    else:
        main(rows)
