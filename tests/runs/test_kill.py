"""Runs that are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from dpps.noise import Gaussian, IdentityKey, Outgoing, PairKeys, SecurePairs
from dpps.privacy import LedgerFile, Pairs
from tests.support.processes import PATIENCE, free_port, program, until

# kill -9 at random moments of a real run whose ledger is written before sending: no message is ever missing from it


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
    while True:
        learner.step()
""")


def kill_once(folder: Path, messages: int, moment: float) -> None:
    """Kill it a moment after it has sent so many messages: how fast this machine is does not matter."""
    before = len(rounds_sent(folder))
    process = program(PROGRAM, folder)
    while len(rounds_sent(folder)) < before + messages:
        assert process.is_alive()
        time.sleep(0.001)
    time.sleep(moment)
    process.kill()
    process.join()


def rounds_sent(folder: Path) -> list[int]:
    file = folder / "sent"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def rounds_charged(folder: Path) -> list[int]:
    whole = (folder / "run" / "ledger.jsonl").read_bytes().rpartition(b"\n")[0]
    return [json.loads(line)["round"] for line in whole.split(b"\n")[1:]]


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_the_ledger_never_lacks_a_message_and_the_total_never_goes_down(tmp_path, kills):
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


# Partners killed and resumed at random moments: the same pair noise is never under two different messages


PARTNERS, WIDTH = 3, 400

PAIRS_PROGRAM = textwrap.dedent("""
    import os, sys, torch
    from torch import nn
    from torch.utils.data import TensorDataset
    import dpps
    from dpps.noise.pairs import SecurePairs
    from dpps.transport.cluster import Cluster, Rendezvous

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
    while True:
        run.step()
        if run.state.round % 3 == 0:
            run.checkpoint()
""")


def start_and_kill(folder: Path, resumed: bool, moment: float) -> None:
    port, before = free_port(), _sizes(folder)
    all_ = [program(PAIRS_PROGRAM, rank, PARTNERS, port, folder, int(resumed)) for rank in range(PARTNERS)]
    try:
        until(
            lambda: all(now > then for now, then in zip(_sizes(folder), before, strict=True)),
            "a process sends nothing",
        )
        time.sleep(moment)
        assert all(process.is_alive() for process in all_)
    finally:
        for process in random.Random(moment).sample(all_, PARTNERS):
            process.kill()
        for process in all_:
            process.join()


def _sizes(folder: Path) -> list[int]:
    files = [folder / f"sent-{rank}" for rank in range(PARTNERS)]
    return [file.stat().st_size if file.exists() else 0 for file in files]


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
    for rank in range(PARTNERS):
        sent = messages(tmp_path, rank)
        assert len(sent) >= kills
        assert likeness(sent) < 7 / np.sqrt(WIDTH)


def test_the_comparison_finds_a_key_used_in_two_attempts() -> None:
    """The twin: were the attempt not part of the key, a round sent again would be almost equal."""
    partners, identities = (
        Pairs(0, mean_variance=1.1).partners(PARTNERS),
        [IdentityKey() for _ in range(PARTNERS)],
    )
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


# A user's own model with secure noise, killed with -9 in mid-run and opened again: alone, and as processes of torchrun


NODES, EPOCHS, MULTIPLIER, RATE = 4, 3, 2.0, 0.2
ROUNDS = EPOCHS * 5

HELD_PROGRAM = textwrap.dedent("""
    import os, sys, torch
    from contextlib import nullcontext
    from pathlib import Path
    from torch import nn
    from torch.utils.data import TensorDataset
    import dpps

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4 * 36, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.norm(self.conv(x))).flatten(1))

    def hold(run, log):
        if log.round == int(os.environ["HOLD"]):       # the test kills it here, at a moment of its own choice
            import time
            (folder / f"process-{os.getpid()}").write_text(str(os.getpid()))
            (folder / f"process-{os.getpid()}").rename(folder / f"held-{run.nodes.rows[0]}")
            time.sleep(1000)

    folder = Path(sys.argv[1])
    torch.manual_seed(0)
    data = [TensorDataset(torch.randn(50, 1, 8, 8), torch.randint(0, 3, (50,))) for _ in range(4)]
    where = dpps.TorchDistributed.from_environment(timeout=60) if "RANK" in os.environ else nullcontext(dpps.Simulation())
    with where as where:
        mine = [data[node] for node in where.rows(4)]
        algorithm = dpps.PartPSP(Net(), ["conv", "norm"], batch_size=10)
        options = dict(topology=dpps.Ring(4), privacy=dpps.Record(noise_multiplier=2.0), secure_noise=True, seed=0,
                       deployment=where, checkpoint_every=4, callbacks=[hold])
        if "--open" in sys.argv:
            run = dpps.Run.open(folder / "run", algorithm, mine, **options)
        else:
            run = dpps.Run(algorithm, mine, folder=folder / "run", **options)
        run.fit(epochs=3)
    (folder / f"epsilon-{run.nodes.rows[0]}").write_text(str(run.privacy.epsilon))
""")


def until_held(folder: Path, processes: int) -> int:
    """Wait until all are where they wait, as who is no neighbour may be a round behind; the number of the process with the last node."""
    until(lambda: len(list(folder.glob("held-*"))) == processes)
    last = max(folder.glob("held-*"))
    return int(last.read_text())


def check_ledger(path: Path, first_part: int, resumed_at: int) -> float:
    """Every round is there as often as it was sent, and the total is what another accountant makes of it."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = Counter(line["round"] for line in lines if "round" in line)
    assert set(rounds) == set(range(ROUNDS))
    assert all(rounds[r] == (2 if resumed_at <= r < first_part else 1) for r in rounds)
    accountant = PLDAccountant()
    event = dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(MULTIPLIER))
    accountant.compose(event, rounds.total())
    epsilon: float = accountant.get_epsilon(1e-5)
    assert LedgerFile.read(path).total(1e-5).epsilon == pytest.approx(epsilon, rel=1e-3)
    return epsilon


def told(folder: Path, node: int) -> float:
    """What the process of this node says it spent; by file, for the printed lines of several processes may run together."""
    return float((folder / f"epsilon-{node}").read_text())


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_killed_and_opened(tmp_path, processes):
    for words, hold in (([], 6), (["--open"], -1)):
        place = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        places = [place | {"RANK": rank} if processes > 1 else {} for rank in range(processes)]
        started = [program(HELD_PROGRAM, tmp_path, *words, HOLD=hold, **each) for each in places]
        if not words:
            until_held(tmp_path, processes)
            for process in started:
                process.kill()
        for process in started:
            process.join(PATIENCE)
        assert [process.exitcode for process in started] == [0 if words else -signal.SIGKILL] * processes
    check_ledgers(tmp_path, processes)


@pytest.mark.slow
def test_processes_of_torchrun_killed_and_opened(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HELD_PROGRAM)
    for words, hold in (([], 6), (["--open"], -1)):
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(NODES)]
        torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command = [sys.executable, *torchrun, "--log-dir", str(tmp_path / "torchrun"), str(program)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HOLD": str(hold)}
        with subprocess.Popen([*command, str(tmp_path), *words], env=environment) as process:
            if not words:
                os.kill(until_held(tmp_path, NODES), signal.SIGKILL)
            process.wait(timeout=PATIENCE)
        assert (process.returncode == 0) == bool(words)
    check_ledgers(tmp_path, NODES)


def check_ledgers(folder: Path, processes: int) -> None:
    """Rounds 0 to 6 were charged, the newest checkpoint stood at 4: rounds 4 to 6 are charged twice."""
    for rank in range(processes):
        place = folder / "run" / (f"rank-{rank}" if processes > 1 else "")
        epsilon = check_ledger(place / "ledger.jsonl", first_part=7, resumed_at=4)
        assert told(folder, rank * NODES // processes) == pytest.approx(epsilon, rel=1e-3)
