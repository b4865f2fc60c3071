"""A whole round of PartPSP-1 beside only its two gradient computations, and the memory of a thousand nodes.

Claim: (round) / (the two gradients of Algorithm 2 by the vectorised engine, shared prefix forward once) is at most 1.4 for the
paper's MLP, N=10, batch 100, EXP, Laplace noise, the paper's sensitivity. The loop engine stands beside it. Peak memory of a
run with N=1000 and batch 20 stays below 3 GB.
"""

import resource
import subprocess
import sys

import torch
import torch.nn.functional as F
from measure import in_turn
from torch.utils.data import TensorDataset

import dpps
from dpps.learning import Learner
from dpps.learning.gradients import Engine, Loop


def learner(nodes: int, batch: int, examples: int) -> Learner:
    """PartPSP-1 on numbers the size of MNIST."""
    torch.manual_seed(0)
    x, labels = torch.rand(nodes * examples, 1, 28, 28), torch.randint(0, 10, (nodes * examples,))
    sets = [
        TensorDataset(x[k * examples : (k + 1) * examples], labels[k * examples : (k + 1) * examples])
        for k in range(nodes)
    ]
    unit = dpps.NodeSwap(budget=5, sensitivity=dpps.Paper(0.78, 0.55))
    algorithm = dpps.PartPSP(
        dpps.models.MLP(), ["layer1"], dpps.Exponential(nodes), unit, batch_size=batch, sync_every=5, seed=0
    )
    return algorithm.start(sets, epochs=1)


def gradients(run: Learner, engine: Engine) -> None:
    """The two gradients of Algorithm 2, nothing else."""
    x, target, _ = run.sampler.batch(0)
    engine.step(run.state.y, run.local, x, target, lambda g, rows: run.local[rows] - 0.1 * g, 0)


def memory() -> None:
    """Peak memory of a few rounds with a thousand nodes."""
    run = learner(1000, 20, 60)
    for _ in range(3):
        run.round()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


def main() -> None:
    """Print the ratios and the peak."""
    run = learner(10, 100, 600)
    loop = Loop(run.partition, F.cross_entropy, run.rows)
    whole, part, ratio = in_turn(run.round, lambda: gradients(run, run.engine), 100)
    print(
        f"round {whole * 1e3:.2f} ms, its two gradients {part * 1e3:.2f} ms: ratio {ratio:.2f} (claim: at most 1.4)"
    )
    one_by_one, together, ratio = in_turn(
        lambda: gradients(run, loop), lambda: gradients(run, run.engine), 30
    )
    print(f"loop engine {one_by_one * 1e3:.2f} ms, vectorised {together * 1e3:.2f} ms: {ratio:.2f} times")
    peak = subprocess.run(
        [sys.executable, __file__, "memory"], capture_output=True, text=True, check=True
    ).stdout
    print(f"peak memory at N=1000, batch 20: {float(peak):.2f} GB (claim: below 3)")


if __name__ == "__main__":
    memory() if sys.argv[1:] == ["memory"] else main()
