"""The oldest versions that pyproject.toml allows, as constraints for pip: the job `lower-bounds` tests with them.

python scripts/lower_bounds.py [EXTRA ...] > oldest.txt      such as: python scripts/lower_bounds.py peers tables
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def main(extras: list[str]) -> None:
    """Print one line per dependency."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    for requirement in (line for part in lists for line in part):
        bound = re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:,<[\w.]+)?", requirement)
        if bound is None:
            raise SystemExit(f"{requirement!r} in pyproject.toml has no lower bound such as numpy>=1.26")
        print(f"{bound[1]}=={bound[2]}")


if __name__ == "__main__":
    main(sys.argv[1:])
