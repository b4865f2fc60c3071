"""kill -9 at random moments of a real run whose ledger is written before sending: no message is ever missing from it."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

# A real PartPSP run with a durable ledger, on a fabric that notes every message (after the fact, as a receiver would).
PROGRAM = textwrap.dedent("""
    import os, sys, torch
    from torch.utils.data import TensorDataset
    import dpps

    folder = sys.argv[1]
    sent = os.open(folder + "/sent", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Noting(dpps.Stacked):
        def mix(self, weights, *xs):
            os.write(sent, f"{learner.state.round}\\n".encode())
            return super().mix(weights, *xs)

    torch.manual_seed(0)
    data = [TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,))) for _ in range(3)]
    algorithm = dpps.PartPSP(dpps.models.MLP((6, 4, 3)), ["layer1"], batch_size=10)
    options = dict(topology=dpps.Ring(3), privacy=dpps.Record(noise_multiplier=2.0), secure_noise=True, seed=0,
                   deployment=dpps.Simulation(Noting(3)))
    if os.path.exists(folder + "/run/run.json"):
        learner = dpps.Run.open(folder + "/run", algorithm, data, **options)
    else:
        learner = dpps.Run(algorithm, data, folder=folder + "/run", **options)
    learner.start(epochs=10_000)
    print("ready", flush=True)
    while True:
        learner.step()
""")


def kill_once(folder: Path, messages: int, moment: float) -> None:
    """Kill it a moment after it has sent so many messages: how fast this machine is does not matter."""
    before = len(rounds_sent(folder))
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while len(rounds_sent(folder)) < before + messages:
            assert process.poll() is None
            time.sleep(0.001)
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()


def rounds_sent(folder: Path) -> list[int]:
    file = folder / "sent"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def rounds_charged(folder: Path) -> list[int]:
    whole = (folder / "run" / "ledger.jsonl").read_bytes().rpartition(b"\n")[0]
    return [json.loads(line)["round"] for line in whole.split(b"\n")[1:]]


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_the_ledger_never_lacks_a_message_and_the_total_never_goes_down(tmp_path, kills):
    from collections import Counter

    chance, before = random.Random(1), 0
    for _ in range(kills):
        kill_once(tmp_path, chance.randint(1, 100), chance.uniform(0.0, 0.01))
        sent, charged = Counter(rounds_sent(tmp_path)), Counter(rounds_charged(tmp_path))
        # a round sent again is charged again
        assert all(charged[round_] >= count for round_, count in sent.items())
        assert 0 <= charged.total() - sent.total() <= kills  # at most one unsent charge for each kill
        assert charged.total() >= before
        before = charged.total()
    assert before > 0
