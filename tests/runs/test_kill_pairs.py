"""Partners killed and resumed at random moments: the same pair noise is never under two different messages.

Every message ever sent is kept and compared with every other. Nearly all of its noise is pair noise, so two messages of a node
with the same pair noise would be almost equal; independent ones are not.
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dpps.noise import Gaussian, IdentityKey, Outgoing, PairKeys, SecurePairs
from dpps.privacy import Pairs
from tests.support.processes import PATIENCE, free_port

NODES, WIDTH = 3, 400

PROGRAM = textwrap.dedent("""
    import os, sys, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import dpps
    from dpps.noise.pairs import SecurePairs
    from dpps.transport.cluster import Cluster
    from dpps.transport.cluster import Rendezvous

    torch.set_num_threads(1)
    rank, size, port, folder, resumed = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1"
    sent = os.open(f"{folder}/sent-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    release = SecurePairs.release

    def noted(self, mechanism, scale, out):
        found = release(self, mechanism, scale, out)
        os.write(sent, ((out.half - out.s)[0].double() / scale).numpy().tobytes())
        return found

    SecurePairs.release = noted
    torch.manual_seed(0)
    cluster = Cluster(Rendezvous(rank, size, "127.0.0.1", port), 300, b"a secret of this test, long enough 1234")
    data = [TensorDataset(torch.randn(20, 40), torch.randint(0, 10, (20,)))]
    algorithm = dpps.PartPSP(nn.Linear(40, 10, bias=False), "all", batch_size=5)
    options = dict(
        topology=dpps.Ring(size), privacy=dpps.Record(noise_multiplier=5.0, trust=dpps.Pairs(0, mean_variance=1.1)),
        deployment=dpps.TorchDistributed(cluster.join()), checkpoint_every=3,
    )
    make = dpps.Run.open if resumed else dpps.Run
    run = make(folder=f"{folder}/run", algorithm=algorithm, data=data, **options)
    run.start(epochs=10_000)
    print("ready", flush=True)
    while True:
        run.step()
        if run.state.round % 3 == 0:
            run.checkpoint()
""")


def start_and_kill(folder: Path, resumed: bool, moment: float) -> None:
    port = free_port()
    arguments = [str(port), str(folder), "1" if resumed else "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    all_ = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(NODES), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        for rank in range(NODES)
    ]
    try:
        for process in all_:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            assert line == b"ready\n", process.stderr.read().decode()
        before, given_up = _sizes(folder), time.monotonic() + PATIENCE
        while any(now == then for now, then in zip(_sizes(folder), before, strict=True)):
            assert time.monotonic() < given_up, "a process sends nothing"
            time.sleep(0.01)
        time.sleep(moment)
    finally:
        for process in random.Random(moment).sample(all_, NODES):
            process.send_signal(signal.SIGKILL)
        for process in all_:
            process.wait()
            for pipe in (process.stdout, process.stderr):
                assert pipe is not None
                pipe.close()


def _sizes(folder: Path) -> list[int]:
    return [(folder / f"sent-{rank}").stat().st_size for rank in range(NODES)]


def messages(folder: Path, rank: int) -> np.ndarray:
    data = (folder / f"sent-{rank}").read_bytes()
    whole = len(data) // (8 * WIDTH)
    return np.frombuffer(data[: whole * 8 * WIDTH]).reshape(whole, WIDTH)


def likeness(rows: np.ndarray) -> float:
    """The largest correlation between two of the rows."""
    correlations = np.corrcoef(rows)
    np.fill_diagonal(correlations, 0)
    return float(np.abs(correlations).max())


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_no_two_messages_ever_sent_share_their_pair_noise(tmp_path: Path, kills: int) -> None:
    chance = random.Random(3)
    for k in range(kills):
        start_and_kill(tmp_path, k > 0, chance.uniform(0.05, 0.6))
    for rank in range(NODES):
        sent = messages(tmp_path, rank)
        assert len(sent) >= kills
        assert likeness(sent) < 7 / np.sqrt(WIDTH)


def test_the_comparison_finds_a_key_used_in_two_attempts() -> None:
    """The twin: were the attempt not part of the key, a round sent again would be almost equal."""
    partners, identities = Pairs(0, mean_variance=1.1).partners(NODES), [IdentityKey() for _ in range(NODES)]
    publics = [identity.public for identity in identities]

    def message(attempt: bytes) -> np.ndarray:
        rows = torch.zeros(1, WIDTH, dtype=torch.float64)
        out = Outgoing(rows, rows.clone(), rows.clone(), [0], 4, True)
        SecurePairs(partners, PairKeys(identities[0], publics, "run", attempt)).release(
            Gaussian(1.0), 1.0, out
        )
        return out.half[0].numpy()

    assert likeness(np.stack([message(b"a" * 16), message(b"a" * 16)])) > 0.7
    assert likeness(np.stack([message(b"a" * 16), message(b"b" * 16)])) < 7 / np.sqrt(WIDTH)
