"""The model card of a run: what a reader must know before using or passing on its models, in Markdown."""

from dpps.report.html import render
from dpps.report.page import badges, epsilon, protected, statement
from dpps.report.reading import RunRecord


def model_card(run: RunRecord) -> str:
    """The card of one run: data, models, what they are worth, and the privacy statement word for word.

    What was not noised (training loss, label counts, accuracies on a node's own data, baselines) is left out:
    the card is made to be passed on.
    """
    return render(
        "card.md",
        run=run,
        badges=badges(run),
        epsilon=epsilon(run.privacy),
        protected=protected,
        statement=statement,
    )
