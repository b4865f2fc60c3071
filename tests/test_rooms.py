"""The rooms of the house: imports between them go one way."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import dpps

SOURCE = Path(dpps.__file__).parent
LEAVES = {"errors", "disk", "registry", "version", "frozen", "logs", "lazy"}
"""Small modules that anybody may use; they import nothing but each other."""
FRONT = {"api", "__init__", "__main__"}
"""What users import: it may import everything, and no room imports it."""
MAY = {
    "topology": set(),
    "noise": set(),
    "transport": {"topology"},
    "sensitivity": {"topology", "transport", "noise"},
    "privacy": {"noise", "sensitivity", "topology"},
    "protocol": {"topology", "noise", "transport", "sensitivity", "privacy"},
    "models": set(),
    "tasks": set(),
    "data": {"tasks"},
    "features": {"data"},
}
MAY["learning"] = {"protocol", "models", "data", "tasks"} | MAY["protocol"]
MAY["runs"] = {"learning", "features"} | MAY["learning"]
MAY["statistics"] = {"runs"} | MAY["runs"]
MAY["peers"] = {"statistics"} | MAY["statistics"]
"""What each room may import; audit, paper, report and cli stand above all of them."""
ABOVE = {"audit", "paper", "report", "cli"}
ON_CALL = {("runs", "report"): "run.report() writes a page, of which a run knows nothing else"}
"""Imports of what stands above, by name and when it is asked for."""


def _room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path):
    """The rooms that a module imports anywhere, also inside functions and for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "dpps":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dpps.")}
    return found


def _on_call(path):
    """The rooms that a module imports by `import_module("dpps.ROOM...")`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [c.args[0] for c in calls if ast.unparse(c.func).endswith("import_module") and c.args]
    texts = [str(name.value) for name in named if isinstance(name, ast.Constant)]
    return {text.split(".")[1] for text in texts if text.startswith("dpps.")}


def _graph():
    graph = {}
    for path in SOURCE.rglob("*.py"):
        graph.setdefault(_room(path), set()).update(_imports(path) - {_room(path)})
    return graph


def test_imports_go_one_way():
    graph = {room: rooms - LEAVES for room, rooms in _graph().items() if room not in FRONT | LEAVES}
    wrong = {(room, other) for room, rooms in graph.items() if room in MAY for other in rooms - MAY[room]}
    assert not wrong, "(room, what it imports)"
    assert set(graph) <= set(MAY) | ABOVE, "a room that this test does not know"


def test_imports_by_name_are_known():
    """They are seen by no other test here, and would hide a circle."""
    found = {(_room(p), room) for p in SOURCE.rglob("*.py") for room in _on_call(p) - {_room(p)}}
    assert {pair for pair in found if pair[0] in MAY} == set(ON_CALL)


def test_there_are_no_cycles():
    graph = {room: rooms for room, rooms in _graph().items() if room not in FRONT}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"rooms import each other in a circle: {error.args[1]}") from None


def test_leaves_import_leaves_only():
    graph = _graph()
    assert all(graph.get(leaf, set()) <= LEAVES for leaf in LEAVES)
