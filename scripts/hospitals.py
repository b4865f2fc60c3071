"""Nodes with their own tables: heart disease, breast cancer survival, two numbers, three other tables, by options of `dpps train`.

Writes each hospital's CSV files and the public schema, trains with several seeds, and prints one row per setting. Runs are kept in
OUT/cells and not repeated, unless the code has changed since:

    python scripts/hospitals.py FOLDER --seeds 10 --out out/hospitals
    python scripts/hospitals.py FOLDER --only wine fair anes96 --grid --seeds 5 --out out/grid

`--grid` also varies the clip and the step around those of the rule, and prints how far the rule is from the best of them.

FOLDER holds `heart-disease/processed.*.data` (UCI Heart Disease) and `tcga-brca/brca.csv` with `train_test_split.csv` (as FLamby
prepares them). The splits are those of FLamby (Ogier du Terrail et al., NeurIPS 2022). `diabetes` and `wine` come with scikit-learn; `fair` and `anes96` with statsmodels, which must be installed.

Everything public is written down here and read off nobody's data: ranges of what is physically possible, codes of the
questionnaires, edges of time. The rule of the library was chosen on `heart`, `tcga` and `diabetes`; no constant has seen the others.
"""

import argparse
import csv
import json
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dpps.paper import Cell, Pool, Store, cores, spread, text
from dpps.runs import Run
from dpps.runs.saved_models import Saved, choose, outputs
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
WINE = {
    "alcohol": (11, 15),
    "malic": (0, 6),
    "ash": (1, 4),
    "alcalinity": (10, 30),
    "magnesium": (70, 170),
    "phenols": (0, 4),
    "flavanoids": (0, 6),
    "nonflavanoids": (0, 1),
    "proanthocyanins": (0, 4),
    "color": (0, 15),
    "hue": (0, 2),
    "od280": (1, 4),
    "proline": (200, 1800),
}
FAIR = {
    "rate_marriage": (1, 5),
    "age": (15, 45),
    "yrs_married": (0, 25),
    "children": (0, 6),
    "religious": (1, 4),
    "educ": (9, 20),
    "occupation": "123456",
    "occupation_husb": "123456",
}
ANES96 = {
    "popul": (0, 7500),
    "TVnews": (0, 7),
    "selfLR": (1, 7),
    "ClinLR": (1, 7),
    "DoleLR": (1, 7),
    "PID": (0, 6),
    "age": (18, 95),
    "educ": (1, 7),
    "income": (1, 24),
}
CLASSES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "wine": ("kind", ["wine 0", "wine 1", "wine 2"], WINE),
    "fair": ("affairs", ["no", "yes"], FAIR),
    "anes96": ("vote", ["Clinton", "Dole"], ANES96),
}
"""Tables with classes: the column of the target, the classes, the other columns."""


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


def dealt(rows: Rows, sizes: Sequence[int]) -> list[Split]:
    """Rows at made-up nodes of these sizes, each with an equal part of the others for tests."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    rows, found, first = [rows[k] for k in order], [], 0
    tests = rows[sum(sizes) :]
    for node, size in enumerate(sizes):
        found.append((rows[first : first + size], tests[node :: len(sizes)]))
        first += size
    return found


def diabetes(_: Path) -> list[Split]:
    """Scikit-learn's diabetes data at four made-up hospitals of very different sizes."""
    from sklearn.datasets import load_diabetes

    data = load_diabetes(scaled=False)
    names = (*DIABETES, "progression")
    return dealt(
        [dict(zip(names, (*x, y), strict=True)) for x, y in zip(data.data, data.target, strict=True)],
        (150, 90, 50, 30),
    )


def wine(_: Path) -> list[Split]:
    """Three kinds of wine by their chemistry."""
    from sklearn.datasets import load_wine

    data = load_wine()
    rows = [
        {**dict(zip(WINE, x, strict=True)), "kind": f"wine {y}"}
        for x, y in zip(data.data, data.target, strict=True)
    ]
    return dealt(rows, (60, 35, 20, 15))


def _of_statsmodels(name: str, separator: str) -> Rows:
    spec = find_spec("statsmodels")
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} comes with statsmodels: pip install statsmodels")
    with open(Path(spec.origin).parent / "datasets" / name / f"{name}.csv", encoding="utf-8") as file:
        found = csv.reader(file, delimiter=separator)
        names = [title.strip("'") for title in next(found)]
        return [dict(zip(names, row, strict=True)) for row in found if row]


def fair(_: Path) -> list[Split]:
    """Fair's survey of 1978: who had an affair."""
    rows = [
        row | {"affairs": "yes" if float(row["affairs"]) > 0 else "no"}
        for row in _of_statsmodels("fair", ",")
    ]
    return dealt(rows, (2000, 1200, 700, 400))


def anes96(_: Path) -> list[Split]:
    """The American election study of 1996: Clinton or Dole."""
    rows = [
        row | {"vote": ("Clinton", "Dole")[int(float(row["vote"]))]}
        for row in _of_statsmodels("anes96", "\t")
    ]
    return dealt(rows, (330, 200, 110, 60))


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
    elif of in CLASSES:
        label, classes, inputs = CLASSES[of]
        target = f'kind = "class"\ncolumn = "{label}"\nclasses = {json.dumps(classes)}\n'
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
    "wine": wine,
    "fair": fair,
    "anes96": anes96,
}
MEASURED = {
    "heart": ("accuracy", "log-loss", "auroc", "calibration", "calibration-slope"),
    **dict.fromkeys(CLASSES, ("accuracy", "log-loss")),
    "tcga": ("c-index", "log-loss"),
    "diabetes": ("rmse", "r2"),
    "heart-rate": ("rmse", "r2"),
}


def write(nodes: Iterable[Split], of: str, out: Path) -> Cell:
    """Write the files of all hospitals and the schema; the run over them by the rule alone."""
    sizes = []
    for node, (train, test) in enumerate(nodes):
        folder = out / "data" / f"node-{node}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in (("train", train), ("test", test)):
            with open(folder / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
        names = list(train[0])
        sizes.append(len(train))
    (out / "schema.toml").write_text(schema(of, names), encoding="utf-8")
    files = {"node_data": out / "data" / "node-{rank}", "schema": out / "schema.toml"}
    declared = {"nodes": len(sizes), "declared_sizes": ",".join(map(str, sizes))}
    fixed = {"model": "linear", "shared": "all", "topology": "complete", "delta": DELTA}
    return Cell.of(variant=of, **files, **declared, **fixed)


def all_pairs(run: Path, data: Path, nodes: int) -> float:
    """The c-index over all pairs of patients, of one hospital or of two."""
    saved = Saved.read(choose(run)[0])
    model, sets = saved.load(), []
    for node in range(nodes):
        x, targets = saved.examples(Path(str(data).replace("{rank}", str(node))) / "test.csv", labelled=True)
        assert targets is not None
        sets.append((outputs(model, x), targets))
    return METRICS["c-index"](*(torch.cat(part) for part in zip(*sets, strict=True)))


def train(cell: Cell, _: Path | None = None) -> dict[str, Any]:
    """What comes out of a run: every metric over all patients, and as a mean over the hospitals."""
    config = cell.config()
    with TemporaryDirectory() as name:
        folder = Path(name) / "run"
        Run.from_options(config, folder).fit()
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["privacy"]["epsilon"] <= cell["epsilon"] * (1 + 1e-9)
        found = {}
        for metric in MEASURED[cell.variant]:
            estimates = summary["scores"]["own"][metric]
            found |= {metric: estimates["pooled"]["value"]}
            found |= {f"{metric}, mean over hospitals": estimates["mean"]["value"]}
        if cell.variant == "tcga":
            assert config.node_data is not None
            found["c-index, all pairs"] = all_pairs(folder, config.node_data, config.nodes)
    return {"found": found}


def around(cell: Cell) -> dict[str, Cell]:
    """The settings of the grid: other clips and steps than those that the rule gives this run."""
    rule = cell.config()
    assert rule.clip is not None
    assert rule.lr_shared is not None
    cell = cell.but(epochs=rule.epochs, batch_size=rule.batch_size)
    return {
        f"clip x {c:g}, step x {s:g}": cell.but(
            clip=float(f"{rule.clip * c:.3g}"), lr_shared=float(f"{rule.lr_shared * s / c:.3g}")
        )
        for c, s in product((0.5, 1, 2), (0.3, 1, 3))
        if (c, s) != (1, 1)
    }


def main() -> None:
    """One line for every setting, and results.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="heart-disease/ and tcga-brca/")
    parser.add_argument("--out", type=Path, default=Path("out/hospitals"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--only", nargs="+", choices=READERS, default=[k for k in READERS if k not in CLASSES]
    )
    parser.add_argument("--epsilons", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--trust", nargs="+", choices=("nobody", "pairs"), default=["nobody", "pairs"])
    parser.add_argument("--grid", action="store_true", help="the rule, and settings around it")
    parser.add_argument("--workers", type=int, default=cores())
    options = parser.parse_args()
    pool, results = Pool(Store(options.out / "cells"), options.workers, train=train), []
    for of in options.only:
        base = write(READERS[of](options.folder), of, options.out / of)
        for epsilon, trust in product(options.epsilons, options.trust):
            rule = base.but(epsilon=epsilon, trust=trust, **({"colluders": 0} if trust == "pairs" else {}))
            settings = {"rule": rule, **(around(rule) if options.grid else {})}
            cells = {name: [c.but(seed=k) for k in range(options.seeds)] for name, c in settings.items()}
            found, rows = pool.run([cell for seeds in cells.values() for cell in seeds]), []
            pool.raise_errors()
            for name, seeds in cells.items():
                row = {
                    "data": of,
                    "epsilon": epsilon,
                    "trust": trust,
                    "seeds": options.seeds,
                    "setting": name,
                }
                measured = {k: [found[c]["found"][k] for c in seeds] for k in found[seeds[0]]["found"]}
                # a metric that no hospital defines is None
                known = {k: [v for v in values if v is not None] for k, values in measured.items()}
                rows.append(row | {k: list(spread(values)) for k, values in known.items()})
                shown = "; ".join(f"{k} {text(spread(values))}" for k, values in known.items())
                print(f"RESULT {of}, epsilon {epsilon:g}, {trust}, {name}: {shown}", flush=True)
            if options.grid:
                summarise(of, rows)
            results += rows
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def summarise(of: str, rows: Rows) -> None:
    """The rule, and the best of all settings."""
    for name in MEASURED[of][:2]:
        higher = name in ("accuracy", "auroc", "c-index", "r2")
        best = (max if higher else min)(rows, key=lambda row: row[name][0])
        shown = f"rule {rows[0][name][0]:.4g}, best {best[name][0]:.4g} ({best['setting']})"
        print(f"GRID {of}, epsilon {rows[0]['epsilon']:g}, {rows[0]['trust']}, {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
