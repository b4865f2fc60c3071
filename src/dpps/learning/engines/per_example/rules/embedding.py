"""Tables that are looked up, and the bags that add up what was read."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dpps.learning.engines.per_example.calls import Call, IrregularModel, Key
from dpps.learning.engines.per_example.contributions import Contribution, Rows
from dpps.learning.engines.per_example.rules.base import Rule, register


class Embedding(Rule):
    """Rows of a table; the row `padding_idx` learns nothing."""

    functions = ("embedding",)
    arguments = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")

    def suits(self, call: Call) -> bool:
        return not call["scale_grad_by_freq"] and call.dims.get(("indices", -1)) is not None

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        rows = call.input("indices").reshape(call.examples, -1)
        d = call.output(back[0]).reshape(*rows.shape, -1)
        padding = call["padding_idx"]
        if padding is not None and padding >= 0:
            d = d.masked_fill((rows == padding)[:, :, None], 0.0)
        return {("weight", -1): Rows(rows, d, call["weight"].shape)}


class EmbeddingBag(Rule):
    """Sums or means of as many rows for every example; every row of a bag gets what came back to the bag."""

    functions = ("embedding_bag",)
    arguments = (
        *("weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse"),
        *("per_sample_weights", "include_last_offset", "padding_idx"),
    )

    def suits(self, call: Call) -> bool:
        plain = not call["scale_grad_by_freq"] and call["per_sample_weights"] is None
        bags = not call["include_last_offset"] and call["padding_idx"] in (None, -1)
        along = all(call.dims.get((name, -1)) == 0 for name in ("indices", "offsets"))
        return plain and bags and along and call["mode"] in (0, 1) and not call.minor

    def run(self, call: Call) -> Any:
        bags, *more = call.run()
        return (call.watch(bags), *more)

    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        rows = call["indices"].view(call.examples, -1)
        length = rows.shape[1]
        if not torch.equal(call["offsets"], length * torch.arange(call.examples).to(call["offsets"])):
            raise IrregularModel("embedding_bag: the examples' bags are not of the same length")
        d = back[0] / length if call["mode"] == 1 else back[0]
        each = d[:, None].expand(-1, length, -1)
        return {("weight", -1): Rows(rows, each, call["weight"].shape)}


register(Embedding())
register(EmbeddingBag())
