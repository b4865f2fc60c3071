"""A user's own model with secure noise, killed with -9 in mid-run and opened again: alone, and as four processes of torchrun."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from dpps.privacy import LedgerFile
from tests.support.processes import PATIENCE, free_port

NODES, EPOCHS, MULTIPLIER, RATE = 4, 3, 2.0, 0.2
ROUNDS = EPOCHS * 5

PROGRAM = textwrap.dedent("""
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


def launch(folder: Path, processes: int, *words: str, hold: int) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(folder), *words]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
        where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        command[1:1] = [*torchrun, *where, "--log-dir", str(folder / "torchrun")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HOLD": str(hold)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)


def kill_in_mid_run(folder: Path, process: subprocess.Popen[str], held: str, processes: int = 1) -> None:
    """kill -9 of the process that holds this node, when all are where they wait: who is no neighbour may be a round behind."""
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob("held-*"))) < processes:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(int((folder / held).read_text()), signal.SIGKILL)


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


def test_one_process_killed_and_opened(tmp_path):
    with launch(tmp_path, 1, hold=6) as process:
        kill_in_mid_run(tmp_path, process, "held-0")
    assert process.returncode == -signal.SIGKILL
    with launch(tmp_path, 1, "--open", hold=-1) as process:
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    # rounds 0 to 6 were charged, the newest checkpoint stood at 4: rounds 4 to 6 are charged twice
    epsilon = check_ledger(tmp_path / "run" / "ledger.jsonl", first_part=7, resumed_at=4)
    assert told(tmp_path, 0) == pytest.approx(epsilon, rel=1e-3)


def test_four_processes_of_torchrun_killed_and_opened(tmp_path):
    with launch(tmp_path, NODES, hold=6) as process:
        kill_in_mid_run(tmp_path, process, "held-2", NODES)
        process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    with launch(tmp_path, NODES, "--open", hold=-1) as process:
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    for rank in range(NODES):
        epsilon = check_ledger(tmp_path / "run" / f"rank-{rank}" / "ledger.jsonl", first_part=7, resumed_at=4)
        assert told(tmp_path, rank) == pytest.approx(epsilon, rel=1e-3)
