"""Wording is free to change: tests assert values and names, and every refusal is one line with a remedy."""

import ast
import re
from pathlib import Path

import pytest

import dpps

TESTS, SOURCE = Path(__file__).parent, Path(dpps.__file__).parent
PLAIN = re.compile(r"[A-Za-z][a-z]*[,.;:]?")
"""A word of English, as far as letters tell; numbers, paths, options, quoted names and wildcards of a pattern are none."""
TOO_MANY = 4
MADE_UP = {
    "no example of class 7",  # an exception of the test's own
    "two\nlines, and a comma",  # a cell of a table
}
"""What the test itself wrote, and finds again."""
REFUSALS = {"UsageError", "RunError"}


def _sentence(text):
    """Whether four words of English or more stand in a row."""
    row = 0
    for word in text.split():
        row = row + 1 if PLAIN.fullmatch(word) else 0
        if row >= TOO_MANY:
            return text not in MADE_UP
    return False


def _texts(node):
    """All texts in an expression; what is filled in counts as no word."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{0}" for part in node.values)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def _names(node):
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _compared(function):
    """Names that a function looks for in what was said: match=NAME, NAME in ..., re.search(NAME, ...)."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            found |= {name for key in node.keywords if key.arg == "match" for name in _names(key.value)}
            if ast.unparse(node.func) in ("re.search", "re.match", "re.fullmatch"):
                found |= _names(node.args[0])
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            found |= {node.left.id} if isinstance(node.left, ast.Name) else set()
    return found


def _tables(body):
    """Lists and dictionaries that are written down under a name."""
    assigned = [node for node in body if isinstance(node, ast.Assign)]
    return {t.id: node.value for node in assigned for t in node.targets if isinstance(t, ast.Name)}


def _rows(table, tables):
    """The rows of a table, or of one that is named; the values of a dictionary."""
    table = table.value if isinstance(table, ast.Subscript) else table
    table = tables.get(table.id, table) if isinstance(table, ast.Name) else table
    return table.values if isinstance(table, ast.Dict) else getattr(table, "elts", [])


def _cases(function, tables):
    """The values of what a test compares, where a table gives them: parametrised, in a loop, or looked up."""
    compared, tables = _compared(function), tables | _tables(function.body)
    given = [([name], tables[name]) for name in compared & set(tables)]
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize"):
            named = ast.literal_eval(mark.args[0])
            columns = re.split(", *", named) if isinstance(named, str) else list(named)
            given.append((columns, mark.args[1]))
    for node in ast.walk(function):
        if isinstance(node, ast.For):
            given.append((ast.unparse(node.target).strip("()").split(", "), node.iter))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            given.append((ast.unparse(node.targets[0]).strip("()").split(", "), node.value))
    for columns, table in given:
        for row in _rows(table, tables):
            cells = row.elts if isinstance(row, ast.Tuple) and len(columns) > 1 else [row]
            yield from (cell for name, cell in zip(columns, cells, strict=False) if name in compared)


def _given(tree):
    """What is given to helpers of the same file for an argument that they compare."""
    helpers = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in helpers:
            helper = helpers[node.func.id]
            compared = _compared(helper)
            arguments = zip(helper.args.args, node.args, strict=False)
            yield from (value for argument, value in arguments if argument.arg in compared)
            yield from (key.value for key in node.keywords if key.arg in compared)


def _asserted(tree):
    """All expressions of a file of tests that say what a text must be."""
    tables = _tables(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.Call):
            yield from (key.value for key in node.keywords if key.arg == "match")
        elif isinstance(node, ast.FunctionDef):
            yield from _cases(node, tables)
    yield from _given(tree)


def _sentences(source):
    found = {(each.lineno, text) for each in _asserted(ast.parse(source)) for text in _texts(each)}
    return sorted((line, text) for line, text in found if _sentence(text))


def test_no_test_asserts_a_sentence():
    """The offending value and the name of the option or argument are asserted instead, and the type of the exception."""
    found = {
        f"{path.relative_to(TESTS)}:{line}": text
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for line, text in _sentences(path.read_text())
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("with raises(E, match='rows are too far apart'): pass", [1]),
        ("with raises(E, match='rows .* far apart, start_distance 5'): pass", []),
        ("assert f'{x} was refused by the other side' in said", [1]),
        ("assert '--clip is 3' in said, 'this is said only when it fails'", []),
        ("@parametrize(('a', 'told'), [(1, 'one'), (2, 'it was said like this')])\n"
         "def test(a, told):\n    with raises(E, match=told): pass", [1]),
        ("@parametrize('name', ['a case with a long name'])\ndef test(name):\n    run(name)", []),
        ("CASES = [('x', 'it was said like this')]\n@parametrize('a, told', CASES)\n"
         "def test(a, told):\n    assert told in run(a)", [1]),
        ("CASES = {'x': 'it was said like this'}\ndef test(a):\n    with raises(E, match=CASES[a]): pass", [1]),
        ("def test():\n    for call, told in ((f, 'it was said like this'),):\n        assert told in call()", [2]),
        ("def refused(words):\n    assert words in said\nrefused('nobody has ever said so')", [3]),
    ],
)  # fmt: skip
def test_sentences_are_found_where_they_hide(source, lines):
    assert [line for line, _ in _sentences(source)] == lines


def _raised():
    """Place and template of every refusal whose message is written where it is made."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSALS:
                place = f"{path.relative_to(SOURCE)}:{node.lineno}"
                if node.args and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                    yield place, next(_texts(node.args[0]))


def test_every_refusal_says_what_is_allowed_or_what_to_do():
    """After a colon or semicolon. Messages that are put together elsewhere, of placeholders alone, are not seen here."""
    templates = dict(_raised())
    assert len(templates) > 400, "they are found at all"
    bare = {
        place: text
        for place, text in templates.items()
        if re.search("[a-z]", text) and not re.search(r"[:;] \S", text)
    }
    assert bare == {}
    assert {place: text for place, text in templates.items() if "\n" in text or text != text.strip()} == {}
