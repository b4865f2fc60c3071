"""What the tests of the command line share."""

import pytest

from dpps.cli import WRONG, main


@pytest.fixture
def refused(capsys):
    """A request is wrong: one line says this, and no more."""

    def check(words, told):
        capsys.readouterr()
        assert main([str(word) for word in words]) == WRONG
        (said,) = capsys.readouterr().err.splitlines()
        assert told in said
        return said

    return check
