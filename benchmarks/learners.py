"""The runs that are measured: PartPSP-1 on random numbers of the shape of the paper's data."""

from dataclasses import replace

import torch
from torch.utils.data import TensorDataset

import dpps
from dpps.learning import Engine, Partition
from dpps.noise import NoiseSource
from dpps.privacy import NOBODY, Trust, Unit
from dpps.runs import Run
from dpps.transport import Stacked

SHAPES = {"mlp": (1, 28, 28), "resnet18": (3, 28, 28), "vit": (3, 32, 32)}
PARAMETERS = 7850  # the shared part of the paper's MLP


def unit_of(name: str, shared: int) -> Unit:
    """The units, with so little noise that numbers stay in the range of a real run however long it is measured."""
    # the paper's estimate grows with d_s: the same growth for every model
    budget = 5 * shared / PARAMETERS
    return {
        "node-swap": dpps.NodeSwap(budget=budget, sensitivity=dpps.Paper(0.78, 0.55)),
        "contribution": dpps.Contribution(clip=30, round_epsilon=1e3),
        "record": dpps.Record(noise_multiplier=1.0),
    }[name]


def learner(
    nodes: int,
    batch: int,
    examples: int,
    *,
    model: str = "mlp",
    unit: str = "node-swap",
    hidden: int = 10,
    noise: NoiseSource | None = None,
    fabric: Stacked | None = None,
    trust: Trust = NOBODY,
) -> Run:
    """A run before its first round: EXP, synchronised every 5 rounds, as many examples at every node.

    Args:
        hidden: the width of the MLP's shared layer: d_s = 785 hidden.
        fabric: by default all nodes in this process.
        trust: partners, in the unit record.
    """
    torch.manual_seed(0)
    rows = nodes if fabric is None else len(fabric.rows)
    x, labels = torch.rand(rows * examples, *SHAPES[model]), torch.randint(0, 10, (rows * examples,))
    parts = (slice(k * examples, (k + 1) * examples) for k in range(rows))
    norm, dropout = ("group", 0.0) if unit == "record" else ("batch", 0.1)
    net, shared = dpps.models.build(model, "1", SHAPES[model], 10, norm, dropout)
    if model == "mlp":
        net = dpps.models.MLP((784, hidden, 784, 10))
    privacy = unit_of(unit, Partition(net, shared).shared_size)
    run = dpps.Run(
        dpps.PartPSP(net, shared, batch_size=batch),
        [TensorDataset(x[part], labels[part]) for part in parts],
        topology=dpps.Exponential(nodes),
        privacy=replace(privacy, trust=trust) if isinstance(privacy, dpps.Record) else privacy,
        sync_every=5,
        seed=0,
        noise=noise,
        deployment=dpps.Simulation(fabric),
    )
    return run.start(epochs=1_000_000)


def gradients(run: Run, engine: Engine) -> None:
    """The two gradients of Algorithm 2 with shared stages forward once, nothing else."""
    x, target, _ = run.nodes.updates.sampler.batch(run.state.round)
    local = run.state.local  # `run.local` would be a copy
    engine.step(run.state.shared.y, local, x, target, lambda g, rows: local[rows] - 0.1 * g, 0)
