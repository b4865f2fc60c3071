"""How far answers are off, compared with central libraries (diffprivlib and OpenDP) on the same records and at the same epsilon.

Those libraries need all records in one place, at a server that everybody trusts. dpps has three nodes that trust nobody, or that
share noise that cancels. The libraries are called in an environment of their own, because diffprivlib 0.6.6 does not import with
scikit-learn 1.9:

    python -m venv central && central/bin/pip install diffprivlib==0.6.6 'scikit-learn<1.9' opendp
    python scripts/central.py --python central/bin/python

Each library answers as its documentation shows, with the whole epsilon split evenly over the questions it can answer. OpenDP adds
Gaussian noise (zero-concentrated privacy, converted to the same epsilon and delta), diffprivlib pure noise.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

NODES, RECORDS, EPSILON, DELTA = 3, 4500, 1.0, 1e-5
AT = (0.25, 0.5, 0.75)
AGE, PRESSURE = (0.0, 120.0), (60.0, 240.0)
QUESTIONS = {
    "count": "count()",
    "mean": "mean(age)",
    "variance": "variance(pressure)",
    "histogram": "histogram(stage)",
    "quantiles": "quantiles(age, 0.25, 0.5, 0.75)",
    "slope": "regression(pressure ~ age)",
}
UNITS = {
    "count": "records",
    "mean": "years",
    "variance": "mmHg²",
    "histogram": "percentage points",
    "quantiles": "rank, points",
    "slope": "mmHg per year",
}
Table = dict[str, np.ndarray]


def made_up() -> Table:
    """Patients as in docs/statistics.md: nothing here is anybody's."""
    draw = np.random.default_rng(0)
    age = draw.integers(18, 95, RECORDS).astype(float)
    pressure = np.clip(np.round(100 + 0.5 * age + draw.normal(0, 12, RECORDS)), *PRESSURE)
    return {"age": age, "pressure": pressure, "stage": draw.integers(0, 3, RECORDS).astype(float)}


def truth(table: Table) -> dict[str, Any]:
    """Without noise."""
    age, pressure, stage = table["age"], table["pressure"], table["stage"]
    return {
        "count": float(len(age)),
        "mean": age.mean(),
        "variance": pressure.var(),
        "histogram": np.bincount(stage.astype(int), minlength=3) / len(age),
        "slope": np.polyfit(age, pressure, 1)[0],
    }


def off(name: str, answer: Any, table: Table, exact: dict[str, Any]) -> float:
    """Mean square of how far an answer is off; ranks and shares in percentage points."""
    if name == "quantiles":
        # of the nearest rank that the value has: values repeat
        below = [(table["age"] < x).mean() for x in answer]
        up_to = [(table["age"] <= x).mean() for x in answer]
        apart = [max(0.0, lo - p, p - hi) for lo, hi, p in zip(below, up_to, AT, strict=True)]
        return float(np.mean(np.square(apart))) * 1e4
    scale = 100.0 if name == "histogram" else 1.0
    return float(np.mean(np.square(scale * (np.asarray(answer) - exact[name]))))


# dpps


def ours(table: Table, names: list[str], trust: Any, repeats: int) -> dict[str, list[float]]:
    """Errors of our answers. The noise of every node is drawn with the standard deviation that its release has
    (tests/statistics/test_release.py compares that with what is really drawn)."""
    from dpps.statistics import Category, Number, Survey
    from dpps.statistics.questions import Columns
    from dpps.statistics.release import choose_unit, planned_noise

    columns: Columns = {
        "age": Number("age", *AGE),
        "pressure": Number("pressure", *PRESSURE),
        "stage": Category("stage", ("I", "II", "III")),
    }
    survey = Survey([QUESTIONS[name] for name in names], columns)
    unit = choose_unit(survey, NODES, EPSILON, DELTA, trust)
    noise, sums, exact = planned_noise(unit, NODES), survey.sums(table), truth(table)
    draw, found = np.random.default_rng(1), {name: [] for name in names}  # type: ignore[var-annotated]
    laplace = getattr(unit, "mechanism", "gaussian") == "laplace"
    for _ in range(repeats):
        if laplace:
            scale = noise / math.sqrt(2 * NODES)
            drawn = draw.laplace(0, scale, (NODES, survey.width)).sum(0)
        else:
            drawn = draw.normal(0, noise, survey.width)
        for name, answer in zip(names, survey.answers(sums + drawn, noise), strict=True):
            lost = bool(answer.too_noisy.any())
            picked: Any = answer.value
            picked = {"histogram": picked[:3], "quantiles": picked, "slope": picked[-1]}.get(name, picked[0])
            found[name].append(math.nan if lost else off(name, picked, table, exact))
    return found


# The libraries, in an environment of their own


def diffprivlib(table: Table, names: list[str], repeats: int) -> dict[str, list[float]]:
    """Pure epsilon, split evenly. The number of records is public there: its count would never be above it, and is left out."""
    from diffprivlib import models, tools

    names = [name for name in names if name != "count"]
    epsilon, exact = EPSILON / max(1, len(names)), truth(table)
    age, pressure, stage = table["age"], table["pressure"], table["stage"]

    def histogram() -> Any:
        counts, _ = tools.histogram(stage, epsilon=epsilon, bins=3, range=(-0.5, 2.5))
        return np.asarray(counts) / max(1, np.sum(counts))

    def slope() -> Any:
        model = models.LinearRegression(epsilon=epsilon, bounds_X=AGE, bounds_y=PRESSURE)
        return model.fit(age[:, None], pressure).coef_.reshape(-1)[0]

    ask: dict[str, Callable[[], Any]] = {
        "mean": lambda: tools.mean(age, epsilon=epsilon, bounds=AGE),
        "variance": lambda: tools.var(pressure, epsilon=epsilon, bounds=PRESSURE),
        "histogram": histogram,
        "quantiles": lambda: tools.quantile(age, AT, epsilon=epsilon, bounds=AGE),
        "slope": slope,
    }
    return {name: [off(name, ask[name](), table, exact) for _ in range(repeats)] for name in names}


def opendp(table: Table, names: list[str], repeats: int) -> dict[str, list[float]]:
    """Gaussian noise, calibrated for all measurements together; no regression. Sums and counts serve several questions."""
    import opendp.prelude as dp

    dp.enable_features("contrib", "idealized-numerics", "honest-but-curious")
    names, exact = [name for name in names if name != "slope"], truth(table)
    needs = {
        "count": ("count",),
        "mean": ("count", "age"),
        "variance": ("count", "pressure", "squares"),
        "histogram": ("stages",),
        "quantiles": tuple(f"quantile {p}" for p in AT),
    }
    measured = list(dict.fromkeys(part for name in names for part in needs[name]))
    middle, half = (PRESSURE[0] + PRESSURE[1]) / 2, (PRESSURE[1] - PRESSURE[0]) / 2
    data = {
        "age": table["age"] - 60.0,
        "pressure": table["pressure"] - middle,
        "squares": (table["pressure"] - middle) ** 2 - half**2 / 2,
    }
    bound = {"age": 60.0, "pressure": half, "squares": half**2 / 2}
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.symmetric_distance()
    whole = dp.vector_domain(dp.atom_domain(T=int)), dp.symmetric_distance()
    candidates = [float(x) for x in range(121)]

    def measurement(part: str, scale: float) -> Any:
        if part == "count":
            return space >> dp.t.then_count() >> dp.m.then_gaussian(scale)
        if part == "stages":
            return (
                whole
                >> dp.t.then_count_by_categories([0, 1, 2], null_category=False, MO=dp.L2Distance[int])
                >> dp.m.then_gaussian(scale)
            )
        if part.startswith("quantile"):
            scored = space >> dp.t.then_quantile_score_candidates(candidates, float(part.split()[1]))
            return scored >> dp.m.then_noisy_max(dp.zero_concentrated_divergence(), scale, negate=True)
        clamped = space >> dp.t.then_clamp((-bound[part], bound[part])) >> dp.t.then_sum()
        return clamped >> dp.m.then_gaussian(scale * bound[part])

    def rho(delta: float) -> float:
        """The largest rho of zero-concentrated privacy that implies epsilon at this delta."""

        def epsilon(value: float) -> float:
            single = space >> dp.t.then_count() >> dp.m.then_gaussian(math.sqrt(1 / (2 * value)))
            return float(dp.c.make_zCDP_to_approxDP(single).map(1).epsilon(delta))

        return float(dp.binary_search(lambda value: epsilon(value) <= EPSILON, bounds=(1e-6, 1.0)))

    if not measured:
        return {}
    each = rho(DELTA) / len(measured)
    made = {
        part: dp.binary_search_chain(lambda s, p=part: measurement(p, s), 1, each, bounds=(1e-3, 1e6))
        for part in measured
    }
    inputs = {part: data.get(part, table["age"]).tolist() for part in measured}
    if "stages" in inputs:
        inputs["stages"] = table["stage"].astype(int).tolist()
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        got = {part: made[part](inputs[part]) for part in measured}
        count = max(1.0, float(got.get("count", 1)))
        answers: dict[str, Any] = {"count": got.get("count")}
        if "mean" in names:
            answers["mean"] = 60 + got["age"] / count
        if "variance" in names:
            answers["variance"] = (got["squares"] + half**2 / 2 * count) / count - (
                got["pressure"] / count
            ) ** 2
        if "histogram" in names:
            stages = np.maximum(np.array(got["stages"][:3], float), 0)
            answers["histogram"] = stages / max(1.0, stages.sum())
        if "quantiles" in names:
            answers["quantiles"] = [candidates[got[f"quantile {p}"]] for p in AT]
        for name in names:
            found[name].append(off(name, answers[name], table, exact))
    return found


LIBRARIES = {"diffprivlib": diffprivlib, "opendp": opendp}


def asked(python: str, library: str, table: Path, names: list[str], repeats: int) -> dict[str, list[float]]:
    """What a library found, in its own environment."""
    command = [python, __file__, "--library", library, "--table", str(table), "--repeats", str(repeats)]
    done = subprocess.run([*command, "--questions", *names], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{library} failed in {python}:\n{done.stderr}")
    result: dict[str, list[float]] = json.loads(done.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--python", default=sys.executable, help="the interpreter that has diffprivlib and opendp"
    )
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--library", choices=LIBRARIES)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--questions", nargs="+", default=list(QUESTIONS))
    options = parser.parse_args()
    if options.library:
        with np.load(options.table) as file:
            table = dict(file)
        print(json.dumps(LIBRARIES[options.library](table, options.questions, options.repeats)))
        return
    from dpps import Pairs
    from dpps.privacy import NOBODY

    table = made_up()
    columns: dict[str, Callable[[list[str]], dict[str, list[float]]]] = {
        "dpps, independent": lambda names: ours(table, names, NOBODY, options.repeats),
        "dpps, pairs, 1 colluder": lambda names: ours(table, names, Pairs(1), options.repeats),
        "dpps, pairs, none": lambda names: ours(table, names, Pairs(0), options.repeats),
    }
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "table.npz"
        np.savez(place, **table)  # type: ignore[arg-type]
        for library in LIBRARIES:
            columns[library] = lambda names, library=library: asked(  # type: ignore[misc]
                options.python, library, place, names, options.repeats
            )
        for title, groups in (
            ("together", [options.questions]),
            ("alone", [[name] for name in options.questions]),
        ):
            print(
                f"\n| root mean square error, {title} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}"
            )
            for names in groups:
                found = {what: column(names) for what, column in columns.items()}
                for name in names:
                    cells = [_shown(each.get(name)) for each in found.values()]
                    print(f"| `{QUESTIONS[name]}`, {UNITS[name]} | {' | '.join(cells)} |")


def _shown(squares: list[float] | None) -> str:
    if not squares:
        return "-"
    lost = float(np.isnan(squares).mean())
    if lost == 1:
        return "too noisy"
    return f"{math.sqrt(np.nanmean(squares)):.3g}" + (f" ({lost:.0%} too noisy)" if lost else "")


if __name__ == "__main__":
    main()
