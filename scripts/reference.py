"""Write the generated part of docs/commands.md: every option of every command.

python scripts/reference.py            # write
python scripts/reference.py --check    # exit code 1 if something is out of date
"""

import re
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpps.cli import commands
from dpps.cli.help import OPTIONS, Option, description, groups_of, options_of, usage

DOCS = Path(__file__).parent.parent / "docs"
COMMANDS = DOCS / "commands.md"
MARKERS = ("<!-- options: begin (python scripts/reference.py) -->", "<!-- options: end -->")


def options() -> str:
    """Every command, in the order of the tree."""
    known = {command.kind(): f"dpps {' '.join(words)}" for words, command in commands()}
    return "\n".join(reference(kind, prog, known).rstrip() + "\n" for kind, prog in known.items())


def reference(kind: type[Any], prog: str, known: Mapping[type[Any], str]) -> str:
    """A command in Markdown: how it is typed, what it does, and its options in tables.

    Args:
        kind: the dataclass of its options.
        prog: the command.
        known: commands by the dataclasses of their options, so that what a class takes from another is not repeated.
    """
    lines = [f"### {prog}", "", f"`{usage(kind, prog)}`", ""]
    for paragraph in description(kind):
        if paragraph.startswith("Example"):
            lines += ["```text", *re.findall(r"((?:source|dpps) .*)", paragraph), "```", ""]
        else:
            lines += [*textwrap.wrap(" ".join(paragraph.split()), 100, break_long_words=False), ""]
    groups = groups_of(kind)
    base = next((each for each in kind.__mro__[1:] if each in known), None)
    if base is not None:
        own = [option.flag for option in options_of(kind)]
        taken = [option.flag for option in options_of(base)]
        without = [f"`{flag}`" for flag in taken if flag not in own]
        words = f"It takes the options of `{known[base]}` except {', '.join(without)}, and these:"
        lines += [*textwrap.wrap(words, 100, break_long_words=False, break_on_hyphens=False), ""]
        groups = {OPTIONS: [option for option in options_of(kind) if option.flag not in taken]}
    for title, options in groups.items():
        lines += [f"**{title[0].upper()}{title[1:]}**", ""] if len(groups) > 1 else []
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [f"| {' | '.join(_cells(option))} |" for option in options]
        lines.append("")
    return "\n".join(lines)


def _cells(option: Option) -> tuple[str, str, str]:
    """Name, default, and what it does."""
    words = option.help
    if option.choices:
        words += f": {', '.join(f'`{choice}`' for choice in option.choices)}"
    words += f". {option.details}" if option.details else "."
    default = option.default if " " in option.default or not option.default else f"`{option.default}`"
    cells = (f"`{option.spelled}`", default, words)
    name, default, words = (cell.replace("|", r"\|").replace("$", "&#36;") for cell in cells)
    return name.replace("&#36;", "$"), default, words


def between(page: str, markers: tuple[str, str], content: str) -> str:
    """The page with this content between the markers."""
    before, begin, rest = page.partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise SystemExit(f"the page lacks the lines {markers[0]} and {markers[1]}")
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"


def page() -> str:
    """The page as it should be."""
    return between(COMMANDS.read_text(encoding="utf-8"), MARKERS, options())


def main() -> int:
    """Write, or check."""
    found = page()
    stale = COMMANDS.read_text(encoding="utf-8") != found
    if stale:
        print(f"{COMMANDS}: {'out of date' if '--check' in sys.argv else 'written'}")
    if stale and "--check" not in sys.argv:
        COMMANDS.write_text(found, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
