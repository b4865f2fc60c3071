"""Tables that are looked up."""

from collections.abc import Sequence

from torch import Tensor

from dpps.learning.gradients.contributions import Contribution, Rows
from dpps.learning.gradients.layers.rule import Call, Key, Rule, register


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


register(Embedding())
