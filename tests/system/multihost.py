"""Three hosts as network namespaces on this machine: torchrun across them, one host cut off, one process killed.

    python tests/system/multihost.py

Needs the right to make network namespaces. Where it is missing the test fails in CI ($CI is set), unless $DPPS_MULTIHOST is
"skip"; elsewhere it says so loudly and does nothing. All traffic stays in namespaces that this script makes and removes again.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

HOSTS, TIMEOUT, EPSILON = 3, 30, 100.0
SLACK = 900  # seconds for ends that are not ours, and for slow machines: only what hangs takes so long
OPTIONS = (
    "--nodes 3 --batch-size 100 --epochs 2 --seed 5 --seeded-noise --quiet --topology ring --sync-every 5 "
    f"--unit contribution --budget 1 --noise-rate 0.01 --checkpoint-every 4 --timeout {TIMEOUT}"
).split()
NAME = f"dpps-{os.getpid()}"


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def host(k: int) -> str:
    return f"{NAME}-host{k}"


def address(k: int) -> str:
    return f"10.77.0.{k + 1}"


@contextmanager
def network() -> Iterator[None]:
    """Three namespaces, each with one cable to a switch that is a namespace of its own."""
    switch = f"{NAME}-switch"
    try:
        for name in (switch, *(host(k) for k in range(HOSTS))):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for k in range(HOSTS):
            ip(
                "-n",
                switch,
                "link",
                "add",
                f"port{k}",
                "type",
                "veth",
                "peer",
                "name",
                "cable",
                "netns",
                host(k),
            )
            ip("-n", switch, "link", "set", f"port{k}", "master", "bridge", "up")
            ip("-n", host(k), "addr", "add", f"{address(k)}/24", "dev", "cable")
            ip("-n", host(k), "link", "set", "cable", "up")
        yield
    finally:
        for name in (switch, *(host(k) for k in range(HOSTS))):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def cable(k: int, state: str) -> None:
    ip("-n", f"{NAME}-switch", "link", "set", f"port{k}", state)


def sent_by_kernel(k: int) -> int:
    """Bytes that left a host, from the counters of its interface."""
    found = json.loads(ip("-n", host(k), "-s", "-j", "link", "show", "cable"))
    return int(found[0]["stats64"]["tx"]["bytes"])


SECRET = secrets.token_hex(32)


class Run:
    """torchrun on every host; all processes wait before round `hold` until `go`, however slow this program is to act there."""

    def __init__(self, out: Path, *options: str, hold: int | None = None) -> None:
        self.out = out
        self._gate = out.parent / f"{out.name}-{time.monotonic_ns()}.gate"
        self.logs = [out.parent / f"{out.name}-{time.monotonic_ns()}-{k}.log" for k in range(HOSTS)]
        environment = {**os.environ, "DPPS_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        if hold is not None:  # see tests/support/holding
            paths = [str(Path(__file__).parents[1] / "support" / "holding"), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            environment |= {"HOLD_ROUND": str(hold), "HOLD_GATE": str(self._gate), "HOLD_NEEDS": "RANK"}
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            str(HOSTS),
            "--nproc-per-node",
            "1",
            "--log-dir",
            str(out.parent / "torchrun"),
        ]
        meeting = ["--master-addr", address(0), "--master-port", "29571"]
        self.agents = []
        for k, log in enumerate(self.logs):
            command = [*torchrun, "--node-rank", str(k), *meeting, "-m", "dpps", "train", *OPTIONS, *options]
            with log.open("wb") as file:
                self.agents.append(
                    subprocess.Popen(
                        ["ip", "netns", "exec", host(k), *command, "--out", str(out)],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,
                    )
                )

    def go(self) -> None:
        """Let the processes go on."""
        self._gate.touch()

    def until(self, rounds: int) -> None:
        begun = time.monotonic()
        while charged(self.out, 0) < rounds:
            if time.monotonic() > begun + 1800 or any(a.poll() is not None for a in self.agents):
                raise SystemExit(f"the run did not get to round {rounds}:\n{self.said()}")
            time.sleep(0.005)

    def wait(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        try:
            return [agent.wait(max(0.1, deadline - time.monotonic())) for agent in self.agents]
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the processes did not stop within {seconds} s:\n{self.said()}") from None
        finally:
            for agent in self.agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)

    def worker(self, k: int) -> int:
        """The process id of the training process on a host, the child of torchrun."""
        children = Path(f"/proc/{self.agents[k].pid}/task/{self.agents[k].pid}/children").read_text().split()
        return int(children[0])

    def said(self) -> str:
        return "\n".join(f"--- host {k}\n{log.read_text()[-3000:]}" for k, log in enumerate(self.logs))

    def named(self, k: int, pattern: str) -> None:
        text = self.logs[k].read_text()
        if not re.search(pattern, text):
            raise SystemExit(f"host {k} did not say {pattern!r}:\n{text[-3000:]}")

    def all_end(self, workers: Sequence[int], seconds: float) -> tuple[float, float]:
        """How long from now until the last of these processes has said what failed, and until the last has ended."""
        begun = time.monotonic()
        said: dict[int, float] = {}
        ended: dict[int, float] = {}
        while len(said) < HOSTS or len(ended) < HOSTS:
            now = time.monotonic() - begun
            if now > seconds:
                raise SystemExit(f"the processes did not stop within {seconds} s:\n{self.said()}")
            for k in range(HOSTS):
                if k not in said and b"dpps: rank" in self.logs[k].read_bytes():
                    said[k] = now
                if k not in ended and not running(workers[k]):
                    ended[k] = now
            time.sleep(0.02)
        return max(said.values()), max(ended.values())


def running(process: int) -> bool:
    """Not gone, and not only waiting for torchrun to take notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def charged(out: Path, rank: int) -> int:
    path = out / f"rank-{rank}" / "ledger.jsonl"
    return path.read_bytes().count(b"\n") - 1 if path.exists() else 0


def furthest(one: Path, other: Path) -> float:
    pairs = [(load_file(p), load_file(other / p.relative_to(one))) for p in one.rglob("node-*.safetensors")]
    assert len(pairs) == HOSTS
    return max(float(np.abs(a[name] - b[name]).max()) for a, b in pairs for name in a)


def check(what: str, holds: bool, detail: object = "") -> None:
    print(f"{'ok   ' if holds else 'WRONG'} {what} {detail}", flush=True)
    if not holds:
        raise SystemExit(1)


def undisturbed(folder: Path) -> Path:
    before = [sent_by_kernel(k) for k in range(HOSTS)]
    run = Run(folder / "undisturbed")
    codes = run.wait(1800)
    check("undisturbed run ends", codes == [0] * HOSTS, codes if codes == [0] * HOSTS else run.said())
    counted = json.loads((run.out / "summary.json").read_text())["bytes_sent_by_rank"]
    for k in range(HOSTS):
        kernel = sent_by_kernel(k) - before[k]
        # headers, acknowledgements, the handshake, and what torchrun's agents say to each other
        check(
            f"bytes of host {k}",
            counted[k] <= kernel <= 1.1 * counted[k] + 150_000,
            f"counted {counted[k]:.0f}, kernel {kernel}",
        )
    return run.out


def cut_off(out: Path) -> None:
    run = Run(out, hold=8)
    run.until(8)
    workers = [run.worker(k) for k in range(HOSTS)]
    cable(2, "down")
    run.go()
    begun = time.monotonic()
    said, ended = run.all_end(workers, TIMEOUT + SLACK)
    print(
        f"ok    a host cut off: named by all after {said:.1f} s of {TIMEOUT}, all have ended after {ended:.1f} s"
    )
    codes = run.wait(SLACK)
    check("torchrun ends, too", all(codes), f"after {time.monotonic() - begun:.1f} s")
    for k in (0, 1):
        run.named(k, r"rank 2 \(10\.77\.0\.3\) is lost: no answer")
    run.named(2, r"rank 0, which holds the rendezvous")
    cable(2, "up")


def killed(out: Path) -> None:
    before = charged(out, 0)
    run = Run(out, "--resume", hold=28)
    run.until(before + 20)
    os.kill(run.worker(1), signal.SIGKILL)
    run.go()
    begun = time.monotonic()
    codes = run.wait(TIMEOUT + SLACK)
    check("a process killed: all stop", all(codes), f"after {time.monotonic() - begun:.1f} s")
    for k in (0, 2):
        run.named(k, r"rank 1 \(10\.77\.0\.2\) is lost: its connection was closed")


def resumed(out: Path, reference: Path) -> None:
    codes = Run(out, "--resume").wait(1800)
    check("resumed run ends", codes == [0] * HOSTS, codes)
    apart = furthest(reference, out)
    check("its models are those of the undisturbed run", apart == 0.0, f"largest difference {apart}")
    most = max(charged(out, k) for k in range(HOSTS))
    planned = charged(reference, 0)
    total = json.loads((out / "summary.json").read_text())["privacy"]["epsilon_sum"]
    check("repeated rounds are charged", most > planned, f"{most} messages, {planned} planned")
    check("total epsilon", abs(total - EPSILON * most) < 1e-6 * total, total)


def permitted() -> bool:
    if shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"{NAME}-try"], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "del", f"{NAME}-try"], check=False, capture_output=True)
    return made.returncode == 0


def main() -> None:
    if not permitted():
        print("!" * 100)
        print(
            "!!! MULTIHOST TEST NOT RUN: it needs iproute2 and the right to make network namespaces (root) !!!"
        )
        print("!" * 100)
        if os.environ.get("CI") and os.environ.get("DPPS_MULTIHOST") != "skip":
            raise SystemExit("this counts as a failure in CI: permit namespaces, or set DPPS_MULTIHOST=skip")
        return
    with network(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = undisturbed(folder)
        cut_off(folder / "disturbed")
        killed(folder / "disturbed")
        resumed(folder / "disturbed", reference)


if __name__ == "__main__":
    main()
