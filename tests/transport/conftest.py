from pathlib import Path

import pytest

from tests.support.processes import Trainers
from tests.support.transport import SEEDED


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of 25 rounds in two processes, nothing goes wrong."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    trainers = Trainers(2, out, *SEEDED, "--epochs", "2")
    assert trainers.wait() == [0, 0], trainers.said()
    return out
