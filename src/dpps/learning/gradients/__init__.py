"""Gradients of all nodes held here. Whatever is clever about them lives here and nowhere else.

`choose` picks the fastest way that is right for a model:

| gradients of whole batches (`batch`)       | clipped per example, unit record (`clipped`)             |
|--------------------------------------------|----------------------------------------------------------|
| `Chained`: chains of linear layers         | `Chains`: the same chains (`chain`)                      |
| `Vectorised`: all nodes by `torch.vmap`    | `Batched`: rules for layers, one pass (see `layers`),    |
| `Loop`: node by node, some in threads      | else `vmap(grad)`, one gradient per example              |
|                                            | `OneByOne`: plain autograd, the reference                |
"""
