"""What a round costs against the number of nodes N, the shared parameters d_s and the batch; `run.py` draws it.

No claim: the time of a round of PartPSP-1 (MLP) beside its two gradients, one thing varied at a time.
"""

from collections.abc import Iterator

from learners import PARAMETERS, gradients, learner
from measure import Row, compare, main

NODES = (10, 30, 100, 300, 1000)  # batch 20
HIDDEN = (1, 3, 10, 30, 100)  # N=10, batch 100; d_s = 785 hidden
BATCH = (3, 10, 30, 100, 300)  # N=10


def rows(quick: bool) -> Iterator[Row]:
    """A row per point; the first point of every axis when quick."""
    few = 1 if quick else None
    for nodes in NODES[:few]:
        yield point("N", nodes, nodes=nodes, batch=20, quick=quick)
    for hidden in HIDDEN[:few]:
        yield point("d_s", hidden * PARAMETERS // 10, hidden=hidden, quick=quick)
    for batch in BATCH[:few]:
        yield point("batch", batch, batch=batch, quick=quick)


def point(
    axis: str, value: int, *, nodes: int = 10, batch: int = 100, hidden: int = 10, quick: bool = False
) -> Row:
    """One learner, its round beside its gradients."""
    run = learner(nodes, batch, 3 * batch, hidden=hidden)
    turns = 2 if quick else 5 if nodes >= 300 else 25
    what = f"round, {axis}={value:,}"
    alone = "its two gradients alone"
    return compare(what, run.step, alone, lambda: gradients(run, run.nodes.engine), turns, at=(axis, value))


if __name__ == "__main__":
    main(rows)
