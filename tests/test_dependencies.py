"""What is imported is declared: without an extra, or by the extra that an error message names; and what promises rest on is pinned."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.version import Version

import dpps

SOURCE = Path(dpps.__file__).parent
ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
MODULES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def _names(requirements):
    """Distributions, as pip compares them."""
    found = {re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0] for line in requirements}
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}


DISTRIBUTIONS = {name: _names(found) for name, found in importlib.metadata.packages_distributions().items()}


CORE = _names(PROJECT["dependencies"])


def _imported(tree):
    """Third-party packages, by the names that Python has for them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found - set(sys.stdlib_module_names) - {"dpps"}


def _extras(tree):
    """That a module names by `needs_extra`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {
        str(call.args[0].value)
        for call in calls
        if ast.unparse(call.func) == "needs_extra" and isinstance(call.args[0], ast.Constant)
    }


def test_imports_are_declared():
    missing = {}
    for module in MODULES:
        tree = ast.parse((SOURCE / module).read_text(encoding="utf-8"))
        declared = CORE.union(*(_names(EXTRAS[extra]) for extra in _extras(tree)))
        if found := [name for name in _imported(tree) if not DISTRIBUTIONS.get(name, {name}) & declared]:
            missing[module] = found
    assert not missing


def test_what_promises_rest_on_is_pinned():
    """All that a run loads: another version of it may compute, draw or encrypt in another way than what was tested."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = _names([line for line in lines if re.fullmatch(r"[\w.-]+==[\w.]+", line)])
    assert pinned >= CORE
    assert _names(EXTRAS["peers"]) <= pinned


def test_every_dependency_has_a_lower_bound_that_can_be_tested():
    """`scripts/lower_bounds.py` makes pip's constraints of them."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "lower_bounds.py"),
        "peers",
        "tables",
        "images",
        "plots",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    oldest = dict(line.split("==") for line in done.stdout.splitlines())
    assert CORE | {"grpcio", "pyarrow", "pandas", "pillow", "matplotlib"} == _names(list(oldest))
    for name, version in oldest.items():
        assert Version(importlib.metadata.version(name)) >= Version(version)


def test_extras_that_are_named_exist():
    named = set().union(*(_extras(ast.parse((SOURCE / module).read_text())) for module in MODULES))
    assert named
    assert named <= set(EXTRAS)


def test_what_contributors_are_told_to_use_is_installed():
    assert {"pre-commit", "build"} <= _names(EXTRAS["dev"])
