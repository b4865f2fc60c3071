"""Every dotted name and every command in README, docs, notebooks, examples, help texts, messages and reports is one that exists."""

import ast
import json
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from dpps.cli import main
from dpps.cli.help import options_of
from dpps.cli.main import commands
from dpps.runs import Options, refuse_ignored

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "src").rglob("templates/*")),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

_NAME = re.compile(r"(?<![\w./@-])dpps(?:\.[A-Za-z_]\w*)+")
_CALLED = re.compile(rf"{_NAME.pattern}(?=\()")
NOT_OURS = {"dpps.Peers"}
"""The name of the gRPC service."""


def _strings(path):
    """Docstrings, messages and comments of a module: its text without its code."""
    text = path.read_text(encoding="utf-8")
    found = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return "\n".join([*(s for s in found if isinstance(s, str)), *re.findall(r"#.*", text)])


def _cells(path):
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


def _texts():
    """What people read, by file."""
    written = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in PAGES}
    written |= {str(p.relative_to(ROOT)): _strings(p) for p in SOURCES}
    return written | {str(p.relative_to(ROOT)): _cells(p) for p in NOTEBOOKS}


TEXTS = _texts()


def test_every_file_of_the_repository_that_is_named_exists():
    named = re.compile(
        r"(?<![\w/.-])(?:tests|scripts|benchmarks|examples|notebooks|src)/[\w/.-]*\.(?:py|ipynb|csv|json)\b"
    )
    missing = {
        f"{where}: {name}"
        for where, text in TEXTS.items()
        for name in named.findall(text)
        if not (ROOT / name).exists()
    }
    assert missing == set()


def test_every_dotted_name_exists():
    """A module, or a name in one: what the reference and a `from ... import` need."""
    missing = []
    for file, text in TEXTS.items():
        for name in sorted(set(_NAME.findall(text)) - NOT_OURS):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError) as error:
                missing.append(f"{file}: {name} ({error})")
    assert missing == []


def test_every_name_that_is_called_needs_no_other_import():
    """What stands there as a call is typed as a call, after `import dpps` and nothing else."""
    called = {name: file for file, text in TEXTS.items() for name in _CALLED.findall(text)}
    assert "dpps.Run" in called
    tries = f"import dpps\nfor name in {sorted(called)}:\n    try:\n        eval(name)\n    except AttributeError:\n        print(name)"
    found = subprocess.run([sys.executable, "-c", tries], check=True, capture_output=True, text=True)
    assert {name: called[name] for name in found.stdout.split()} == {}


# Commands


class Parsed(BaseException):
    """The parser has understood a command; its options are the argument."""


def _lines(text):
    """Lines of blocks that are no Python, which somebody copies; and code within sentences, which may be a part of a command."""
    fenced = re.findall(r"^ *```([a-z]*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    blocks = [body for language, body in fenced if language != "python"]
    plain = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^(?: {4,}|\t).*", plain, re.MULTILINE)
    whole = [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return whole, [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", plain)]


_BEFORE = r"(?:\w+=\S+|[$@(]+|!|torchrun .* -m|python -m)"


def _commands(lines):
    """What stands behind `dpps` in those lines that are commands, without remarks, pipes, and dots for what is left out."""
    for line in lines:
        if found := re.match(rf"\s*(?:{_BEFORE} *)*dpps +([a-z-](?:'[^']*'|[^)'])*)", line):
            yield re.split(r" {2,}| #| [|>&] ?|…|\.\.\.", found[1])[0].strip()


WHOLE = {line: file for file, text in TEXTS.items() for line in _commands(_lines(text)[0])}
PARTS = {line: file for file, text in TEXTS.items() for line in _commands(_lines(text)[1])}


def test_commands_are_found_where_they_are_written():
    places = {*WHOLE.values(), *PARTS.values()}
    assert {"README.md", "docs/commands.md", "docs/accuracy.md", "src/dpps/cli/plan.py"} <= places
    assert len(WHOLE) > 60
    assert len(PARTS) > 40


@pytest.mark.parametrize("line", sorted(WHOLE))
def test_the_parser_understands_every_command(line, monkeypatch, capsys):
    """What can be copied is understood, and what `dpps train` would ignore or refuse is not there."""
    parse, words = tyro.cli, shlex.split(line)

    def stop(*arguments, **options):
        raise Parsed(parse(*arguments, **options))

    monkeypatch.setattr(tyro, "cli", stop)
    try:
        code = main(words)
    except Parsed as parsed:
        options = parsed.args[0]
        if (
            type(options) is Options and "--print-config" not in words
        ):  # which writes what is not whole yet, too
            refuse_ignored(words[1:], options)
            options.check()
    else:
        assert code == 0, (WHOLE[line], capsys.readouterr().err)  # --help


@pytest.mark.parametrize("line", sorted(PARTS))
def test_every_command_and_option_that_is_mentioned_exists(line, monkeypatch, capsys):
    """Values may be left out, or be letters that stand for them."""

    def stop(*_, **__):
        raise Parsed

    monkeypatch.setattr(tyro, "cli", stop)  # names of options have been looked at before
    try:
        code = main(shlex.split(line))
    except Parsed:
        return
    assert code == 0, (PARTS[line], capsys.readouterr().err)


def test_every_import_that_a_sentence_names_works():
    """`from dpps.runs.baselines import Baseline`, as code within a sentence."""
    missing, found = [], 0
    for file, text in TEXTS.items():
        for module, name in re.findall(r"`from (dpps[\w.]*) import (\w+)`", text):
            found += 1
            if not hasattr(pkgutil.resolve_name(module), name):
                missing.append(f"{file}: from {module} import {name}")
    assert found
    assert missing == []


_WITHIN = re.compile(r"\bdpps ((?:[a-z]+ )+)((?:[A-Z][A-Z./]* |\S+\.\w+ )*)(--[a-z-]+)")


def test_options_of_commands_within_messages_exist():
    """A message names a command in the middle of a sentence, without marks around it."""
    known = {" ".join(words): command.kind() for words, command in commands()}
    strange, found = [], 0
    for file, text in TEXTS.items():
        sentences = text if file.endswith(".py") else " ".join(text.split())  # strings of code do not run on
        for words, _, option in _WITHIN.findall(sentences):
            path = next((p for p in (words.strip(), words.split()[0]) if p in known), None)
            if path is None or option in ("--help", "--version"):
                continue
            found += 1
            if option not in {o.flag for o in options_of(known[path])} | {"--resume"}:
                strange.append(f"{file}: dpps {path} {option}")
    assert found > 50
    assert strange == []


def test_scripts_that_pages_name_exist_and_know_their_options():
    """`python scripts/accuracy.py units --seeds 1`: the file is there, and has these options; those behind `--` are of dpps train."""
    missing, found = [], 0
    for file, text in TEXTS.items():
        for script, words in re.findall(r"python ((?:scripts|benchmarks|examples)/\w+\.py)([^`\n|]*)", text):
            found += 1
            path = ROOT / script
            source = "\n".join(each.read_text(encoding="utf-8") for each in path.parent.glob("*.py"))
            own = words.split(" -- ")[0].split("#")[0]
            missing += [f"{file}: {script}"] if not path.exists() else []
            for option in re.findall(r"(?<= )--[a-z-]+", own):
                if option not in source and option.removeprefix("--").replace("-", "_") not in source:
                    missing.append(f"{file}: {script} {option}")
    assert found > 20
    assert missing == []


def _anchor(heading):
    """As Markdown's table of contents makes it of a heading."""
    text = re.sub(r"<[^>]*>|`|\*|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def test_links_to_sections_lead_to_headings():
    """mkdocs mentions a section that is not there, and goes on. (Dotted names are resolved above.)"""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    texts = {
        page: re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE) for page in pages
    }
    anchors = {
        p: {_anchor(h) for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)} for p, text in texts.items()
    }
    lost, found = [], 0
    for page, text in texts.items():
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#(?!dpps\.)([^)\s]+)\)", text):
            found += 1
            place = (page.parent / target).resolve() if target else page
            if anchor not in anchors.get(place, ()):
                lost.append(f"{page.name}: {target}#{anchor}")
    assert found > 50
    assert lost == []
