"""Run notebooks and keep what they print in them: python scripts/run_notebooks.py [notebooks/first_run.ipynb ...]

A cell is plain Python and shows what it prints, so nothing but the packages it imports is needed to run it.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "notebooks"


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """Execute the cells in order, in an empty folder, and put what they print below them."""
    namespace: dict[str, Any] = {"__name__": "__notebook__"}
    number = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                continue
            number += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
            text = printed.getvalue().splitlines(keepends=True)
            cell["execution_count"] = number
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    return notebook


def main(paths: list[Path]) -> None:
    """Run and rewrite them."""
    for path in paths or sorted(FOLDER.glob("*.ipynb")):
        found = run(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"ran {os.path.relpath(path)}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
