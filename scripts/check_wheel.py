"""Build a wheel, install it into an empty environment and do there what a new user does, with files as hospitals have them.

python scripts/check_wheel.py [EXTRA ...]      such as: python scripts/check_wheel.py tables images plots
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.hospitals import write_hospitals  # noqa: E402 - found by the line above

NEW = "temperature;age;smoker;ward\n39,9;80;yes;north\n36,1;22;;?\n"
DESCRIBE = "data describe hospitals/node-2/train.csv --label diagnosis --out schema.toml"
TRAIN = "train --nodes 3 --node-data hospitals/node-{rank} --schema schema.toml --model linear --shared all --baselines --out run"
COMMANDS = (
    "--version",
    DESCRIBE,
    TRAIN,
    "predict run --input new.csv --output predictions.csv",
    "evaluate run --input hospitals/node-0/train.csv --per-class",
    "report run",
    "train --epochs 1 --out digits",
)


def main(extras: list[str]) -> None:
    """Stop with the first command that fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder / "dist", ROOT])
        (wheel,) = (folder / "dist").glob("*.whl")
        venv.create(folder / "empty", with_pip=True)
        programs = folder / "empty" / "bin"
        wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
        _run([programs / "pip", "install", "-q", "-c", ROOT / "constraints.txt", wanted])
        work = folder / "work"
        write_hospitals(work / "hospitals")
        (work / "new.csv").write_text(NEW)
        for command in COMMANDS:
            print(f"$ dpps {command}", flush=True)
            _run([programs / "dpps", *command.split()], work)
        assert len((work / "predictions.csv").read_text().splitlines()) == 3
        assert (work / "run" / "report.html").stat().st_size > 10_000
    print("the wheel works in an empty environment")


def _run(command: list[object], folder: Path = ROOT) -> None:
    subprocess.run([str(word) for word in command], cwd=folder, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
