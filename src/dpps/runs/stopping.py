"""How a run stops before its last round. A request to stop travels on the rows, and takes effect after the same round at all processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpps.errors import DppsError
from dpps.topology import Weights

if TYPE_CHECKING:
    from dpps.runs.run import Run

logger = logging.getLogger(__name__)


def last_for_all(run: Run, *, asked: bool) -> bool:
    """Whether the round just completed was the last one for all.

    Args:
        run: after a round.
        asked: whether somebody here wants to stop; if so, it is told to the others from the next round on.
    """
    control, done = run.protocol.fabric.control, run.state.round - 1
    if asked and control.stop_after is None:
        rounds = control.rounds_until_heard(_coming(run))
        if rounds is not None:  # otherwise the run is over before everybody could know
            control.ask_to_stop(done + rounds)
    return control.stop_after is not None and done >= control.stop_after


def keep_complete_rounds(run: Run) -> None:
    """A checkpoint of a run that ends by an exception, of a callback or Ctrl-C: what its complete rounds cost is not lost with it.

    Of several processes each would keep a round of its own; they go on from the checkpoints that they planned together.
    """
    complete = 0 < run.state.round == len(run.log) != run._safe
    if run.folder is None or not run.protocol.fabric.simulation or not complete:
        return
    try:
        run.checkpoint()
    except DppsError as error:  # the first failure is the one to tell
        logger.warning("%s", error)


def _coming(run: Run) -> Iterator[Weights | None]:
    """The weights of the rounds to come that send something; the clock restarts when the rates change."""
    clock, rate = run.state.shared.clock, run.state.shared.rate
    for round_ in range(run.state.round, run.plan.count if run.algorithm.partition.shared else 0):
        epoch, within = divmod(round_, run.rounds_per_epoch)
        if within == 0 and run.algorithm.rate(epoch + 1) != rate:
            clock, rate = 0, run.algorithm.rate(epoch + 1)
        yield run.protocol.weights(clock)
        clock += 1
