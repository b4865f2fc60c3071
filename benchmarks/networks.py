"""ResNet-18 and ViT: a whole round compared with the nodes' bare gradients.

Claim: a round of PartPSP-1, N=10, batch 100, takes at most 1.10 times as long as the nodes' gradient computations in plain torch:
one module per node, one pass for the local and one for the shared gradient, no flat vectors.
"""

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from learners import learner
from measure import Row, main, spreads, times

from dpps.runs import Run


class Plain:
    """One ordinary module per node, as a user of torch alone would have it."""

    def __init__(self, run: Run) -> None:
        self.models = [copy.deepcopy(run.algorithm.model).train() for _ in run.nodes.rows]
        self.run = run
        self.names = {slot.name for slot in run.nodes.partition.shared}

    def gradients(self) -> None:
        """Algorithm 2 for every node: the local gradients, then the shared ones."""
        x, target, _ = self.run.nodes.updates.sampler.batch(self.run.state.round)
        for model, inputs, labels in zip(self.models, x, target, strict=True):
            shared = [p for name, p in model.named_parameters() if name in self.names]
            local = [p for name, p in model.named_parameters() if name not in self.names]
            for part in (local, shared):
                torch.autograd.grad(F.cross_entropy(model(inputs), labels), part)


def rows(quick: bool) -> Iterator[Row]:
    """Both models. A round takes seconds, so few turns and no warming up are enough."""
    nodes, batch = (2, 2) if quick else (10, 100)
    for model, named, turns in (("resnet18", "ResNet-18", 3), ("vit", "ViT", 2)):
        run = learner(nodes, batch, batch, model=model)
        plain = Plain(run)
        ours, bare = times((run.step, plain.gradients), 1 if quick else turns)
        what = f"round, {named}, N={nodes}, batch {batch}, PartPSP-1"
        first, second, ratio = spreads(ours, bare)
        yield Row(what, first, "the nodes' gradients in plain torch", second, ratio, target=1.10)


if __name__ == "__main__":
    main(rows)
