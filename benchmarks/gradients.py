"""Gradients without clipping (units contribution and none, and no unit at all) beside a hand-written loop over the nodes.

Claim: for convolutional, attention and recurrent models the engine that a run chooses is no slower than one plain module per node,
`loss.backward()` one after the other. ResNet-18 and ViT stand in networks.py.
"""

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from measure import Row, compare, main
from per_example import CASES, QUICK, Case

from dpps.learning import Partition, choose_engine

NAMES = ("tanh CNN, 10 x 200", "transformer, 4 x 64", "LSTM, 4 x 64")


def row(name: str, case: Case, turns: int) -> Row:
    """One model, everything shared."""
    torch.manual_seed(0)
    x, target = case.data()
    partition = Partition(case.make(), "all")
    y = partition.initial()[0].repeat(case.nodes, 1)
    local = y.new_zeros(case.nodes, 0)
    example = x[0, 0], target[0, 0]
    engine = choose_engine(partition, F.cross_entropy, example, range(case.nodes), batch=case.batch)
    models = [copy.deepcopy(partition.model).train() for _ in range(case.nodes)]

    def ours() -> None:
        engine.step(y, local, x, target, lambda g, _: g, 0)

    def by_hand() -> None:
        for model, inputs, labels in zip(models, x, target, strict=True):
            model.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(inputs), labels))

    return compare(f"gradients, {name} ({type(engine).__name__})", ours, "by hand", by_hand, turns, 1.0)


def rows(quick: bool) -> Iterator[Row]:
    """Every model."""
    cases = {"tanh CNN": QUICK["tanh CNN"]} if quick else {name: CASES[name] for name in NAMES}
    for name, case in cases.items():
        yield row(name, case, 2 if quick else 15)


if __name__ == "__main__":
    main(rows)
