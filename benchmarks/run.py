"""Every benchmark, one after the other, each in a process of its own: a table, a JSON file, a plot.

python benchmarks/run.py [--quick] [--only NAME ...] [--out FILE.json]    measure
python benchmarks/run.py --compare BEFORE.json AFTER.json                 two runs side by side
python benchmarks/run.py --markdown FILE.json                             the table for docs/performance.md
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from measure import HEADINGS, Row, amount, cells, markdown_table, ratio, text_table

from dpps.version import versions

HERE = Path(__file__).parent
BENCHMARKS = (
    "training",
    "mnist",
    "scale",
    "networks",
    "gradients",
    "units",
    "per_example",
    "noise",
    "pairs",
    "round",
    "growth",
    "distributed",
    "latency",
    "peers",
)

Results = dict[str, Any]


def measure(names: Sequence[str], quick: bool) -> Results:
    """All that one run leaves: plain JSON. What a benchmark measured before it failed stays, and so do the others."""
    results: Results = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "quick": quick} | machine()
    results |= {"rows": {}, "failed": []}
    for name in names:
        kept = results["rows"].setdefault(name, [])
        try:
            kept.extend(json.loads(line) for line in printed(name, quick))
        except (BenchmarkError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            results["failed"].append(name)
    return results


class BenchmarkError(Exception):
    """A benchmark did not end well; what went wrong stands on its standard error."""


def printed(name: str, quick: bool) -> Iterator[str]:
    """The lines one benchmark prints, as they come."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from (line.rstrip() for line in process.stdout)
    if process.returncode:
        raise BenchmarkError(f"ended with exit code {process.returncode}")


def machine() -> Results:
    """What the numbers depend on, and nothing that says whose machine it is."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=HERE
    )
    return {
        "commit": commit.stdout.strip(),
        "versions": versions(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor()


# What is made of results


def rows(results: Results) -> list[Row]:
    """The rows of the table; those of the plot are not among them."""
    plain = [row for name, own in results["rows"].items() if name != "growth" for row in own]
    return [Row.from_json(row) for row in plain]


def lines(results: Results) -> list[Sequence[str]]:
    """The table; tiny sizes are judged by nobody."""
    own = [cells(row) for row in rows(results)]
    return [HEADINGS, *([(*cell[:-1], "") for cell in own] if results["quick"] else own)]


def about(results: Results) -> str:
    """The circumstances in one line."""
    sizes = "tiny sizes, only to see that it runs; " if results["quick"] else ""
    known = results["versions"]
    return (
        f"{sizes}{results['date']}, {results['cpu']}, {results['cores']} cores, load {results['load']} at the start{_disturbed(results)}, "
        f"dpps {known['dpps']} ({results['commit']}), torch {known['torch']}, numpy {known['numpy']}, python {known['python']}"
    )


def _disturbed(results: Results) -> str:
    """Nothing where every row had the machine to itself."""
    busy = sum(row.busy for row in rows(results))
    return f", busy in {busy} of {len(rows(results))} rows" if busy else ""


def comparison(before: Results, after: Results) -> str:
    """Every row of either file: what is judged before and after, and how it changed."""
    old, new = ({(r.what, r.beside_what): r for r in rows(results)} for results in (before, after))
    table: list[Sequence[str]] = [
        ("what", "beside", "before", "after", "after / before", "ours before", "ours after")
    ]
    for what, beside in dict.fromkeys((*old, *new)):
        a, b = (known.get((what, beside), Row(what)) for known in (old, new))
        change = f"{b.judged / a.judged:.2f}" if a.judged and b.judged else ""
        both = (ratio(r.ratio) or amount(r.ours, r.unit) for r in (a, b))
        table.append((what, beside, *both, change, amount(a.ours, a.unit), amount(b.ours, b.unit)))
    return f"before: {about(before)}\nafter:  {about(after)}\n\n{text_table(table)}"


def plot(results: Results, file: Path) -> None:
    """What a round costs against N, d_s and batch, with quartiles."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    points = [Row.from_json(row) for row in results["rows"]["growth"]]
    axes_named = list(dict.fromkeys(row.at[0] for row in points if row.at))
    fixed = {"N": "batch 20, d_s = 7,850", "d_s": "N = 10, batch 100", "batch": "N = 10, d_s = 7,850"}
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axis, named in zip(figure.subplots(1, len(axes_named)), axes_named, strict=True):
        own = [row for row in points if row.at and row.at[0] == named]
        where = [row.at[1] for row in own if row.at]
        for label, colour, series in (
            ("a round", "#1f5fa8", [row.ours for row in own]),
            ("its two gradients", "#c05a00", [row.beside for row in own]),
        ):
            known = [value for value in series if value is not None]
            axis.plot(where, [1e3 * v for v in known], color=colour, marker="o", markersize=3, label=label)
            low, high = [1e3 * v.low for v in known], [1e3 * v.high for v in known]
            axis.fill_between(where, low, high, color=colour, alpha=0.2, linewidth=0)
        axis.set(xscale="log", yscale="log", xlabel=named, ylabel="ms", title=fixed[named])
        axis.grid(which="major", alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    with mpl.rc_context({"svg.hashsalt": "dpps", "svg.fonttype": "none"}):
        figure.savefig(file, metadata={"Date": None})


def read(file: Path) -> Results:
    """A results file."""
    try:
        results: Results = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file} cannot be read ({error}): name a file that this command saved") from error
    return results


def default_file() -> Path:
    """Says when and on how many cores, not where."""
    return HERE / "results" / f"{datetime.now(UTC):%Y-%m-%d-%H%M}-{os.cpu_count()}-cores.json"


def main() -> None:
    """Measure, or read what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="smallest sizes, only to see that everything runs"
    )
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=BENCHMARKS, metavar="NAME")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.compare:
        print(comparison(*map(read, options.compare)))
    elif options.markdown:
        results = read(options.markdown)
        print(f"{markdown_table(lines(results))}\n\n{about(results)}.")
    else:
        measure_and_save(options.only, options.quick, options.out or default_file())


def measure_and_save(names: Sequence[str], quick: bool, file: Path) -> None:
    """The one command."""
    results = measure(names, quick)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
    print("\n".join([about(results), "", text_table(lines(results)), "", f"saved {file}"]))
    if results["rows"].get("growth"):
        plot(results, file.with_suffix(".svg"))
        print(f"saved {file.with_suffix('.svg')}")
    if results["failed"]:
        raise SystemExit(f"failed: {', '.join(results['failed'])}; all other results are saved")


if __name__ == "__main__":
    main()
