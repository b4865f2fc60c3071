"""Hospitals with their own tables: heart disease, breast cancer survival, and two numbers, by the command line alone.

Writes each hospital's CSV files and the public schema, runs `dpps train` with several seeds, and prints one row per setting:

    python scripts/hospitals.py FOLDER --seeds 10 --out out/hospitals

FOLDER holds `heart-disease/processed.*.data` (UCI Heart Disease) and `tcga-brca/brca.csv` with `train_test_split.csv` (as FLamby
prepares them). The splits are those of FLamby (Ogier du Terrail et al., NeurIPS 2022). `diabetes` comes with scikit-learn.

Everything public is written down here and read off nobody's data: ranges of what is physically possible, codes of the
questionnaires, edges of time. The rule of the library was chosen on `heart`, `tcga` and `diabetes`; `heart-rate` is a target that no constant has seen.
"""

import argparse
import csv
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from dpps.__main__ import main as dpps
from dpps.runs.saved_models import Saved, outputs, saved_models
from dpps.tasks import METRICS

Rows = list[dict[str, Any]]
Split = tuple[Rows, Rows]
DELTA = 1e-4
CENTRES = ("cleveland", "hungarian", "switzerland", "va")
HEART = (
    *("age", "sex", "chest_pain", "pressure", "cholesterol", "sugar", "ecg", "heart_rate", "angina", "st"),
    *("slope", "vessels", "thal", "diagnosis"),
)
USED = (*HEART[:10], "diagnosis")
RANGES = {
    "age": (20, 80),
    "pressure": (80, 200),
    "cholesterol": (0, 600),
    "heart_rate": (60, 220),
    "st": (-3, 7),
}
CODES = {"sex": "01", "chest_pain": "1234", "sugar": "01", "ecg": "012", "angina": "01"}
EDGES = [365, 730, 1095, 1460, 1825, 2555, 3650]
DIABETES = {
    "age": (18, 80),
    "sex": "12",
    "bmi": (18, 43),
    "bp": (60, 135),
    "s1": (90, 305),
    "s2": (40, 245),
    "s3": (20, 100),
    "s4": (2, 10),
    "s5": (3, 6.2),
    "s6": (55, 125),
}


def heart(folder: Path) -> list[Split]:
    """The four centres of the heart disease data, without the columns and patients that FLamby leaves out."""
    from sklearn.model_selection import train_test_split

    found = []
    for centre in CENTRES:
        with open(folder / "heart-disease" / f"processed.{centre}.data", encoding="utf-8") as file:
            rows = [dict(zip(HEART, row, strict=True)) for row in csv.reader(file) if row]
        rows = [{name: row[name] for name in USED} for row in rows]
        rows = [row for row in rows if not {"", "?"} & set(row.values())]
        for row in rows:
            row["diagnosis"] = "ill" if float(row["diagnosis"]) > 0 else "healthy"
        labels = [row["diagnosis"] for row in rows]
        even = min(labels.count(label) for label in ("ill", "healthy")) > 2
        train, test = train_test_split(
            range(len(rows)),
            test_size=0.34,
            train_size=0.66,
            random_state=43,
            shuffle=True,
            stratify=labels if even else None,
        )
        found.append(([rows[k] for k in train], [rows[k] for k in test]))
    return found


def tcga(folder: Path) -> list[Split]:
    """The six regions of the breast cancer data."""
    with open(folder / "tcga-brca" / "train_test_split.csv", encoding="utf-8") as file:
        fold = {row["pid"]: row["fold2"] for row in csv.DictReader(file)}
    with open(folder / "tcga-brca" / "brca.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["pid"] in fold]
    return [
        (
            [r for r in rows if fold[r["pid"]] == f"train_{k}"],
            [r for r in rows if fold[r["pid"]] == f"test_{k}"],
        )
        for k in range(6)
    ]


def diabetes(_: Path) -> list[Split]:
    """Scikit-learn's diabetes data at four made-up hospitals of very different sizes, each with a part of the test patients."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    rows = [
        dict(zip((*DIABETES, "progression"), (*x, y), strict=True))
        for x, y in zip(data.data, data.target, strict=True)
    ]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    rows, tests, first = [rows[k] for k in order], [rows[k] for k in order[320:]], 0
    found = []
    for node, size in enumerate((150, 90, 50, 30)):
        found.append((rows[first : first + size], tests[node::4]))
        first += size
    return found


def column(name: str, what: Any) -> str:
    """One column of a schema: a range, codes, or nothing of it."""
    kind = "ignore" if what is None else "category" if isinstance(what, str) else "number"
    more = f"values = {json.dumps(list(what))}\n" if isinstance(what, str) else ""
    if kind == "number":
        more = f"range = {list(what)}\n"
    return f"\n[[columns]]\nname = {json.dumps(name)}\nkind = {json.dumps(kind)}\n{more}"


def schema(of: str, names: Sequence[str]) -> str:
    """The public schema of one of the tasks, for tables with these columns."""
    inputs: dict[str, Any]
    if of == "tcga":
        target = f'kind = "survival"\ntime = "T"\nevent = "E"\nedges = {EDGES}\n'
        inputs = {
            name: (20, 90) if name == "age_at_index" else "01"
            for name in names
            if name not in ("pid", "E", "T")
        }
        inputs["pid"] = None
    elif of == "diabetes":
        target, inputs = 'kind = "number"\ncolumn = "progression"\nrange = [0, 350]\n', dict(DIABETES)
    elif of == "heart":
        target = 'kind = "class"\ncolumn = "diagnosis"\nclasses = ["healthy", "ill"]\n'
        inputs = {name: RANGES.get(name, CODES.get(name)) for name in USED[:-1]}
    else:
        target = f'kind = "number"\ncolumn = "heart_rate"\nrange = {list(RANGES["heart_rate"])}\n'
        inputs = {name: RANGES.get(name, CODES.get(name)) for name in USED[:-1] if name != "heart_rate"}
        inputs["diagnosis"] = None
    return f"[target]\n{target}" + "".join(column(name, what) for name, what in inputs.items())


READERS: dict[str, Callable[[Path], list[Split]]] = {
    "heart": heart,
    "tcga": tcga,
    "diabetes": diabetes,
    "heart-rate": heart,
}
MEASURED = {
    "heart": ("accuracy", "log-loss", "auroc", "calibration", "calibration-slope"),
    "tcga": ("c-index", "log-loss"),
    "diabetes": ("rmse", "r2"),
    "heart-rate": ("rmse", "r2"),
}


def write(nodes: Iterable[Split], of: str, out: Path) -> tuple[Path, Path, int]:
    """The files of all hospitals and the schema; and how many hospitals there are."""
    count = 0
    for node, (train, test) in enumerate(nodes):
        folder = out / "data" / f"node-{node}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in (("train", train), ("test", test)):
            with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        count, names = node + 1, list(train[0])
    (out / "schema.toml").write_text(schema(of, names), encoding="utf-8")
    return out / "data" / "node-{rank}", out / "schema.toml", count


def all_pairs(run: Path, data: Path, nodes: int) -> float:
    """The c-index over all pairs of patients, of one hospital or of two."""
    saved = Saved.read(saved_models(run)[0])
    model, sets = saved.load(), []
    for node in range(nodes):
        x, targets = saved.examples(Path(str(data).replace("{rank}", str(node))) / "test.csv", labelled=True)
        assert targets is not None
        sets.append((outputs(model, x), targets))
    return METRICS["c-index"](*(torch.cat(part) for part in zip(*sets, strict=True)))


def one(
    of: str, files: tuple[Path, Path, int], epsilon: float, trust: str, seed: int, out: Path
) -> dict[str, float]:
    """One run, and what came out."""
    template, declared, nodes = files
    words = ["train", "--nodes", str(nodes), "--node-data", str(template), "--schema", str(declared)]
    words += ["--model", "linear", "--shared", "all", "--topology", "complete", "--delta", str(DELTA)]
    words += ["--colluders", "0"] if trust == "pairs" else []
    words += ["--epsilon", str(epsilon), "--trust", trust, "--seed", str(seed), "--out", str(out)]
    if dpps([*words, "--overwrite", "--quiet"]) != 0:
        raise SystemExit(f"dpps {' '.join(words)} failed")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["privacy"]["epsilon"] <= epsilon * (1 + 1e-9)
    found = {}
    for name in MEASURED[of]:
        estimates = summary["scores"]["own"][name]
        found[name], found[f"{name}, mean over hospitals"] = (
            estimates[k]["value"] for k in ("pooled", "mean")
        )
    if of == "tcga":
        found["c-index, all pairs"] = all_pairs(out, template, nodes)
    return found


def main() -> None:
    """All settings, one line each as soon as it is known, and results.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="heart-disease/ and tcga-brca/")
    parser.add_argument("--out", type=Path, default=Path("out/hospitals"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0])
    options = parser.parse_args()
    results = []
    for of in options.only:
        files = write(READERS[of](options.folder), of, options.out / of)
        for epsilon in options.epsilons:
            for trust in ("nobody", "pairs"):
                runs = [
                    one(of, files, epsilon, trust, seed, options.out / of / "run")
                    for seed in range(options.seeds)
                ]
                row: dict[str, Any] = {"data": of, "epsilon": epsilon, "trust": trust, "seeds": options.seeds}
                for name in runs[0]:
                    values = [run[name] for run in runs if not math.isnan(run[name])]
                    row[name] = [
                        statistics.fmean(values),
                        statistics.stdev(values) if len(values) > 1 else 0.0,
                    ]
                results.append(row)
                shown = "; ".join(
                    f"{k} {v[0]:.4g} ({v[1]:.2g})" for k, v in row.items() if isinstance(v, list)
                )
                print(f"RESULT {of}, epsilon {epsilon:g}, {trust}: {shown}", flush=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
