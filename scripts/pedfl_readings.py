"""Readings of PEDFL on MNIST with the paper's MLP, beside the printed row: synchronised or not, own row noised or not, clipped or not.

python scripts/pedfl_readings.py [--epochs 12] [--topology exp]    (data: $DPPS_DATA)
"""

import argparse

import torch
from torch import Tensor

import dpps
from dpps.learning import Nodes, Step, TrainState
from dpps.topology import parse
from dpps.transport import Exchange, Link


class Heard(dpps.Stacked):
    """Notes what every node has said, so that a node can put its own row in place of its own message."""

    def push(self, exchange: Exchange, s: Tensor, a: Tensor, link: Link) -> None:
        self.weights, self.said = exchange.weights, s.clone()
        super().push(exchange, s, a, link)


class Synchronised(dpps.PEDFL):
    """All nodes average now and then, as in the other rows of the paper's table."""

    synchronises = True


class OwnRow(Synchronised):
    """A node mixes its own row without noise: nobody else sees it."""

    def step(self, nodes: Nodes, state: TrainState) -> Step:
        own = state.shared.s + state.kept["update"]
        step = super().step(nodes, state)
        fabric = nodes.protocol.fabric
        if isinstance(fabric, Heard) and fabric.weights is not None:
            kept = torch.from_numpy(fabric.weights.dense().diagonal().copy()).to(own)[:, None]
            state.shared.s = state.shared.s + kept * (own - fabric.said)
        return step


def main() -> None:
    """A line per reading."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--topology", default="exp")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    digits = dpps.data.load("mnist")
    parts = dpps.data.split(digits.train.labels.numpy(), 10, "iid", seed=2024)
    nodes = [digits.train.ordered(part) for part in parts]
    test = digits.test.inputs(), digits.test.labels
    readings: list[
        tuple[str, type[dpps.PEDFL], dict[str, float], dpps.NodeSwap | dpps.Contribution | None]
    ] = [
        ("no noise", dpps.PEDFL, {}, None),
        ("b=1 sync 7", Synchronised, {"sync_every": 7}, dpps.NodeSwap(1.0)),
        ("b=3 sync 7", Synchronised, {"sync_every": 7}, dpps.NodeSwap(3.0)),
        ("b=1 sync 7 own", OwnRow, {"sync_every": 7}, dpps.NodeSwap(1.0)),
        ("b=3 sync 7 own", OwnRow, {"sync_every": 7}, dpps.NodeSwap(3.0)),
        ("b=1 sync 2", Synchronised, {"sync_every": 2}, dpps.NodeSwap(1.0)),
        ("b=1 sync 3", Synchronised, {"sync_every": 3}, dpps.NodeSwap(1.0)),
        ("b=3 sync 3", Synchronised, {"sync_every": 3}, dpps.NodeSwap(3.0)),
        ("b=1 never", dpps.PEDFL, {}, dpps.NodeSwap(1.0)),
        ("b=1 never own", OwnRow, {}, dpps.NodeSwap(1.0)),
        ("b=1 sync 7 clip 100", Synchronised, {"sync_every": 7}, dpps.NodeSwap(1.0, clip=100.0)),
        ("contribution b=1 clip 100", dpps.PEDFL, {}, dpps.Contribution(100.0, round_epsilon=1000.0)),
        ("contribution b=1 clip 30", dpps.PEDFL, {}, dpps.Contribution(30.0, round_epsilon=1000.0)),
        ("contribution b=3 clip 30", dpps.PEDFL, {}, dpps.Contribution(30.0, round_epsilon=3000.0)),
    ]
    for name, kind, options, unit in readings:
        if given.only not in name:
            continue
        torch.manual_seed(2024)
        algorithm = kind(dpps.models.MLP(), "all", lr_shared=0.1, lr_step=5)
        topology = parse(given.topology, 10)
        deployment = dpps.Simulation(Heard(10)) if kind is OwnRow else dpps.Simulation()
        period = int(options.get("sync_every", 0))
        run = dpps.Run(
            algorithm,
            nodes,
            topology=topology,
            privacy=unit,
            test=test,
            deployment=deployment,
            seed=2024,
            sync_every=period,
        )
        try:
            run.fit(epochs=given.epochs)
            print(f"{name:28} {run.accuracy:.1f} %", flush=True)
        except dpps.RunError as error:
            print(f"{name:28} broke off in round {run.state.round}: {str(error)[:60]}", flush=True)


if __name__ == "__main__":
    main()
