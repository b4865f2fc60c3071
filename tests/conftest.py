import os
import zlib

# Several torch threads on few cores slow small tests down; who asks for more gets them (make test-portable does).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import settings

from dpps.errors import DppsError
from tests.support.browser import browser, programs

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
settings.register_profile("dpps", deadline=None, max_examples=20, derandomize=True)
settings.load_profile("dpps")


_SYSTEM = (
    "transport/test_cluster",
    "transport/test_distributed",
    "transport/test_rendezvous",
    "runs/test_kill",
    "peers/test_join",
)


def pytest_collection_modifyitems(items):
    """While you work, `pytest -m 'not slow and not system and not docs'` answers in two minutes."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        if name.startswith("docs/"):
            item.add_marker(pytest.mark.docs)
        elif name.startswith(_SYSTEM):
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_with_the_user(tmp_path_factory):
    """Runs of tests are not noted among those of the user's data, and what is kept for the next run goes where pytest removes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPPS_STATE", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def _same_numbers(request):
    """Random numbers of torch and numpy that a test draws without a seed of its own are the same in every run, and others in every test."""
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    np.random.seed(seed)


@pytest.fixture(autouse=True)
def _same_threads():
    """A test that changes the number of torch's threads changes it for itself alone, whatever the order."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_line(monkeypatch):
    """Every error that dpps makes on purpose during a test is one line of text, also where it is caught and never shown."""
    wrong = []

    def made(error, *words):
        super(DppsError, error).__init__(*words)
        text = str(error)
        if not text or text != text.strip() or len(text.splitlines()) > 1 or text[-1] in ":;,":
            wrong.append(repr(error))

    monkeypatch.setattr(DppsError, "__init__", made)
    yield
    assert wrong == [], "an error that is not one line"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A window that the tests of one file share; missing programs are a failure in CI."""
    if programs() is None:
        reason = "Chromium and its driver are not installed (Debian: apt-get install chromium chromium-driver); a snap will not do"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with browser(tmp_path_factory.mktemp("profile")) as window:
        yield window
