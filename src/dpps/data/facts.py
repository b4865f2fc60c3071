"""What is known of the named data sets before they are read: it is published, so a plan may rest on it."""

from typing import NamedTuple


class Facts(NamedTuple):
    """Of one data set."""

    examples: int
    """For training."""
    shape: tuple[int, int, int]
    """(channels, height, width) of an image in its file."""
    read: tuple[int, int, int]
    """The same, as a model reads it: a grey image may be wanted in three channels."""


CLASSES = 10
"""Of each of them."""


FACTS = {
    "mnist-mini": Facts(10_000, (1, 28, 28), (1, 28, 28)),
    "mnist": Facts(60_000, (1, 28, 28), (1, 28, 28)),
    "fashion-mnist": Facts(60_000, (1, 28, 28), (3, 28, 28)),
    "cifar-10": Facts(50_000, (3, 32, 32), (3, 32, 32)),
}
