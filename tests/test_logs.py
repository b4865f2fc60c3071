"""A logger that says less for a while."""

import logging

import pytest

from dpps.logs import only_from


def test_the_level_holds_within_and_comes_back_even_after_an_error(caplog):
    logger = logging.getLogger("tests.logs")
    logger.setLevel(logging.INFO)

    def fail():
        logger.warning("within")
        logger.error("an error")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), only_from(logging.ERROR, logger):
        fail()
    logger.info("after")
    assert [record.message for record in caplog.records] == ["an error", "after"]
