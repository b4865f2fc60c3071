"""Loggers that are asked to say less for a while."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_from(level: int, logger: logging.Logger) -> Iterator[None]:
    """Within, the logger says nothing below this level."""
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
