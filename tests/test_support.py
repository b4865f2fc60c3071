"""Helpers have one name, and tests leave nothing behind."""

import ast
import os
import sys
from pathlib import Path

import pytest

from dpps.data.cache import user_cache

TESTS = Path(__file__).parent


def test_helpers_are_imported_under_one_name() -> None:
    """`from tests.support.processes import ...`: under a second name, Python would run a helper a second time."""
    own = {path.stem for path in TESTS.iterdir()}
    wrong = []
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [(path.name, name) for name in named if name.split(".")[0] in own]
    assert not wrong


def test_what_is_kept_for_the_user_stays_in_the_folder_of_the_tests(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    own = tmp_path_factory.getbasetemp()
    assert Path(os.environ["DPPS_STATE"]).is_relative_to(own)
    if sys.platform == "linux":  # elsewhere the system has no setting for the place of caches
        assert user_cache().is_relative_to(own)
