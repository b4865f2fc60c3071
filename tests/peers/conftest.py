import os

import pytest


@pytest.fixture
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the disk: processes die here, machines do not."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
