"""Per-example gradients of layers: one forward and one backward pass, and no gradient per example.

An example's gradient of a weight follows from two things: what went into the function that took the weight, and what came back to
its output. In a linear layer with input a and returning gradient d it is the outer product d a^T. Its norm is |d| |a|; and once
all norms of an example are known, and so the factor f that clips it, the sum of clipped gradients is one product, the sum of
f d a^T over the examples.

```
   forward                a               out
    x ──▶ ... ──▶ ──────┬─────▶ linear(a, W) ─────▶ ... ──▶ one loss per example
                        │            ▲ W is cut off: autograd computes no gradient of it
                        │ kept       │
                        ▼            │ d, caught on its way back
   backward           rule ◀─────────┴──────────── ... ◀── sum of the losses
                        │
                        ▼
               Contribution  (Outer, Rows, Explicit)
                 │ norms()                      │ total(factors)
                 ▼                              ▼
       |g_e|^2 = sum over weights  ──▶  f_e = clip / |g_e|  ──▶  sum of f_e g_e
```

- `rules`: what a rule is, and all of them. Rules are about torch *functions* (`torch.conv2d`), not modules: whatever module calls
  the function has it.
- `recording`: before the first batch, two and three made-up examples show where weights meet examples and which axis these lie
  along; the result is compared with plain autograd. A model that rules do not cover, or do not understand, goes another way
  (`vmap(grad)`, then one by one, see `dpps.learning.gradients.clipped`). Real batches then run as planned. Whatever differs from
  the plan stops it.
- `contributions`: norms and sums, exact enough for the clip.

To add a rule, subclass `Rule` anywhere and call `register` with it; here, put it into `rules`.
"""
