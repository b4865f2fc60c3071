"""Write the generated part of docs/commands.md: every option of every command.

python scripts/reference.py            # write
python scripts/reference.py --check    # exit code 1 if something is out of date
"""

import sys
from pathlib import Path

from dpps.cli import commands
from dpps.cli.help import reference

DOCS = Path(__file__).parent.parent / "docs"
COMMANDS = DOCS / "commands.md"
OPTIONS = ("<!-- options: begin (python scripts/reference.py) -->", "<!-- options: end -->")


def options() -> str:
    """Every command, in the order of the tree."""
    known = {command.kind(): f"dpps {' '.join(words)}" for words, command in commands()}
    return "\n".join(reference(kind, prog, known).rstrip() + "\n" for kind, prog in known.items())


def between(page: str, markers: tuple[str, str], content: str) -> str:
    """The page with this content between the markers."""
    before, begin, rest = page.partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise SystemExit(f"the page lacks the lines {markers[0]} and {markers[1]}")
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"


def page() -> str:
    """The page as it should be."""
    return between(COMMANDS.read_text(encoding="utf-8"), OPTIONS, options())


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
