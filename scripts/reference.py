"""Write the generated parts of the documentation: every option of every command, and public names that no page has.

python scripts/reference.py            # write
python scripts/reference.py --check    # exit code 1 if something is out of date
"""

import re
import sys
from pathlib import Path

from dpps import api
from dpps.cli import commands
from dpps.cli.help import reference

DOCS = Path(__file__).parent.parent / "docs"
COMMANDS = DOCS / "commands.md"
OPTIONS = ("<!-- options: begin (python scripts/reference.py) -->", "<!-- options: end -->")
NAMES = ("<!-- names: begin (python scripts/reference.py) -->", "<!-- names: end -->")


def python_page() -> Path:
    """The page of the Python reference."""
    return next(page for page in (DOCS / "python.md", DOCS / "reference.md") if page.exists())


def options() -> str:
    """Every command, in the order of the tree."""
    known = {command.kind(): f"dpps {' '.join(words)}" for words, command in commands()}
    return "\n".join(reference(kind, prog, known).rstrip() + "\n" for kind, prog in known.items())


def names(page: str) -> str:
    """The public names that the rest of the page does not have."""
    missing = [name for name in api.__all__ if not re.search(rf"^::: dpps\.{name}$", page, re.MULTILINE)]
    return "".join(f"::: dpps.{name}\n" for name in missing)


def between(page: str, markers: tuple[str, str], content: str) -> str:
    """The page with this content between the markers."""
    before, begin, rest = page.partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise SystemExit(f"the page lacks the lines {markers[0]} and {markers[1]}")
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"


def without(page: str, markers: tuple[str, str]) -> str:
    """The page without what is between the markers."""
    return between(page, markers, "")


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    python = python_page()
    text = python.read_text(encoding="utf-8")
    return {
        COMMANDS: between(COMMANDS.read_text(encoding="utf-8"), OPTIONS, options()),
        python: between(text, NAMES, names(without(text, NAMES))),
    }


def main() -> int:
    """Write, or check."""
    stale = {page: text for page, text in pages().items() if page.read_text(encoding="utf-8") != text}
    for page, text in stale.items():
        print(f"{page}: {'out of date' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            page.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
