"""What the other privacy units cost beside the unit contribution.

Claim: a round of the unit record, which clips every example's gradient, is at most 2.0 times a round of the unit contribution
(MLP, N=10, batch 100, PartPSP-1).
"""

from collections.abc import Iterator

from learners import learner
from measure import Row, compare, main


def rows(quick: bool) -> Iterator[Row]:
    """Record and node-swap, each beside contribution."""
    nodes, batch, examples, turns = (2, 4, 8, 2) if quick else (10, 100, 600, 100)
    contribution = learner(nodes, batch, examples, unit="contribution")
    for unit, target in (("record", 2.0), ("node-swap", None)):
        run = learner(nodes, batch, examples, unit=unit)
        what = f"round, unit {unit}, MLP, N={nodes}, batch {batch}"
        yield compare(what, run.step, "unit contribution", contribution.step, turns, target)


if __name__ == "__main__":
    main(rows)
