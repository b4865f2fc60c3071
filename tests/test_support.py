"""Helpers have one name, and tests leave nothing behind."""

import ast
import os
import re
import sys
from pathlib import Path

from dpps.data import user_cache
from tests.support import browser

TESTS = Path(__file__).parent


def test_helpers_are_imported_under_one_name():
    """`from tests.support.processes import ...`: under a second name, Python would run a helper a second time."""
    own = {path.stem for path in TESTS.iterdir()} - sys.stdlib_module_names
    wrong = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [(path.name, name) for name in named if name.split(".")[0] in own]
    assert not wrong


def test_who_reads_proc_says_so():
    """macOS has no /proc: such a test is marked `needs_proc`, and skipped there."""
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/proc\b(?!/nope)", text.replace(str(TESTS), "")) or "needs_proc" in text, path


def test_what_a_snap_wraps_is_no_browser(tmp_path, monkeypatch):
    """Ubuntu's `chromium-browser` starts a snap, which has temporary folders of its own and can open no page of ours."""
    programs = {
        "chromium-browser": "#!/bin/sh\nexec /snap/bin/chromium\n",
        "google-chrome": "\x7fELF",
        "chromedriver": "",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROME", raising=False)
    monkeypatch.delenv("CHROMEDRIVER", raising=False)
    assert browser.programs() == (str(tmp_path / "google-chrome"), str(tmp_path / "chromedriver"))
    (tmp_path / "google-chrome").unlink()
    assert browser.programs() is None
    monkeypatch.setenv("CHROME", "/where/it/is")
    assert browser.programs() == ("/where/it/is", str(tmp_path / "chromedriver"))


def test_what_is_kept_for_the_user_stays_in_the_folder_of_the_tests(tmp_path_factory):
    own = tmp_path_factory.getbasetemp()
    assert Path(os.environ["DPPS_STATE"]).is_relative_to(own)
    if sys.platform == "linux":  # elsewhere the system has no setting for the place of caches
        assert user_cache().is_relative_to(own)
