"""Every Python block of the README and the docs runs."""

import re
from pathlib import Path

import pytest

from dpps.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN_ELSEWHERE = {"architecture.md"}
"""tests/docs/test_extending.py runs these: they register names, which it takes back."""
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{k}")
    for page in PAGES
    if page.name not in RUN_ELSEWHERE
    for k, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<documentation>", "exec"), {"__name__": "__documentation__"})


def test_links_between_pages_and_figures_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tutorials_numbers_are_those_of_its_command(tmp_path, capsys):
    """What the tutorial shows of `make demo`; the accuracy of another processor may differ by a few of a thousand images."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    shown = re.search(r"^```\n(accuracy  .*?)^```", page, re.DOTALL | re.MULTILINE)[1]
    command = re.search(r"`dpps (train --features [^`]*)`", page)[1]
    assert f"dpps {command} --out out/demo" in (ROOT / "Makefile").read_text()
    assert main([*command.split(), "--quiet", "--out", str(tmp_path / "demo")]) == 0
    found, pattern = capsys.readouterr().out, r"accuracy +([\d.]+) %"
    assert float(re.search(pattern, found)[1]) == pytest.approx(float(re.search(pattern, shown)[1]), abs=0.5)
    (line,) = (line for line in shown.splitlines() if line.startswith("privacy"))
    assert line in found


def test_lists_follow_an_empty_line():
    """Without one the site's Markdown runs the points together in one paragraph."""
    for page in PAGES:
        code, before = False, ""
        for line in page.read_text().splitlines():
            code ^= line.startswith("```")
            if not code and line.startswith("- "):
                assert not before or before.startswith(("- ", "  ")), f"{page.name}: {line}"
            before = line
