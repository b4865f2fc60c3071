"""A whole round of PartPSP-1 beside the bare matrix products it needs and beside its two gradients; a thousand nodes' memory.

Claims for the paper's MLP (784-10-784-10), N=10, batch 100, EXP, Laplace noise, the paper's sensitivity: a round is at most 3.0
times its matrix products and at most 1.25 times the two gradients of Algorithm 2 as the engine computes them, both with the
shared layer forward once. The loop engine stands beside the vectorised one. Peak memory of a run with N=1000 and batch 20 stays
below 3 GB.
"""

import json
import sys
from collections.abc import Iterator
from itertools import cycle

import torch
import torch.nn.functional as F
from learners import gradients, learner
from measure import Row, Spread, compare, in_fresh_process, main, peak_memory
from torch import Tensor

from dpps.learning import Loop
from dpps.runs import Run


class Products:
    """The eleven matrix products of Algorithm 2, all nodes at once, into memory that is there already; nothing between them.

    Local step: three forward, the gradients of W3 and W2, and what comes back through W3. Then with the new W2 and W3: two
    forward (the first layer's output stands), back through W3 and W2, and the gradient of W1. Every product has the fastest
    layout found: every result is wide (10 x 784, 10 x 100 or 100 x 784), and W2 lies transposed, as W1 and W3 do.
    """

    def __init__(self, run: Run) -> None:
        nodes, batch = len(run.nodes.rows), int(run.plan.batch_size)
        hidden, inner, classes = 10, 784, 10
        views = torch.vmap(run.nodes.partition.views)(run.state.shared.s, run.local)
        self.w1, self.w3 = (views[f"layer{k}.weight"].contiguous() for k in (1, 3))
        self.w2 = views["layer2.weight"].mT.contiguous()
        rounds = range(run.nodes.data.sizes[0] // batch)
        self.batches = cycle([run.nodes.updates.sampler.batch(t)[0].flatten(2) for t in rounds])
        self.h, self.d1 = torch.empty(2, nodes, hidden, batch)
        self.z2, self.d2 = torch.empty(2, nodes, batch, inner)
        self.z3, self.d3 = torch.empty(nodes, classes, batch), torch.rand(nodes, classes, batch)
        self.g1, self.g2, self.g3 = (torch.empty_like(w) for w in (self.w1, self.w2, self.w3))

    @torch.no_grad()
    def __call__(self) -> None:
        x: Tensor = next(self.batches)
        torch.bmm(self.w1, x.mT, out=self.h)
        self._local_forward()
        torch.bmm(self.d3, self.z2, out=self.g3)
        torch.bmm(self.d3.mT, self.w3, out=self.d2)
        torch.bmm(self.h, self.d2, out=self.g2)
        self._local_forward()
        torch.bmm(self.d3.mT, self.w3, out=self.d2)
        torch.bmm(self.w2, self.d2.mT, out=self.d1)
        torch.bmm(self.d1, x, out=self.g1)

    def _local_forward(self) -> None:
        torch.bmm(self.h.mT, self.w2, out=self.z2)
        torch.bmm(self.w3, self.z2.mT, out=self.z3)


def rows(quick: bool) -> Iterator[Row]:
    """The ratios and the peak."""
    nodes, batch, examples, turns = (2, 4, 8, 2) if quick else (10, 100, 600, 200)
    run = learner(nodes, batch, examples)
    named = f"round, MLP, N={nodes}, batch {batch}, PartPSP-1"
    yield compare(named, run.step, "its bare matrix products", Products(run), turns, 3.0)
    yield compare(
        named, run.step, "its two gradients alone", lambda: gradients(run, run.nodes.engine), turns, 1.25
    )
    loop = Loop(run.nodes.partition, F.cross_entropy, run.nodes.rows)
    yield compare(
        f"gradients node by node, MLP, N={nodes}",
        lambda: gradients(run, loop),
        "all nodes at once",
        lambda: gradients(run, run.nodes.engine),
        turns // 4 + 1,
    )
    nodes, batch = (20, 2) if quick else (1000, 20)
    peak = Spread.of([in_fresh_process(__file__, "memory", nodes, batch)["peak"]])
    yield Row(f"peak memory, MLP, N={nodes}, batch {batch}", peak, target=3.0, unit="GB")


def memory(nodes: int, batch: int) -> None:
    """Print the peak memory of a few rounds."""
    run = learner(nodes, batch, 3 * batch)
    for _ in range(3):
        run.step()
    print(json.dumps({"peak": peak_memory()}))


if __name__ == "__main__":
    memory(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["memory"] else main(rows)
