"""Three hospitals' files as they come: texts, gaps, other separators, other orders of columns, other sizes."""

from pathlib import Path

import numpy as np

SIZES = (35, 90, 180)
CLINICS = (150, 80, 40)
_ORDERS = (
    ("patient", "age", "temperature", "smoker", "ward", "diagnosis"),
    ("diagnosis", "ward", "temperature", "patient", "age", "smoker"),
    ("smoker", "diagnosis", "age", "patient", "ward", "temperature"),
)
_SEPARATORS = (",", ";", "\t")
_WARDS = ("north", "south, new", "east; old")


def write_hospitals(folder: Path, sizes: tuple[int, ...] = SIZES) -> Path:
    """Write node-0, node-1, ... and return the template for --node-data."""
    random = np.random.default_rng(7)
    for node, size in enumerate(sizes):
        order, separator = _ORDERS[node % 3], _SEPARATORS[node % 3]
        lines = [separator.join(order)]
        for k in range(size):
            age, temperature = random.uniform(18, 95), random.normal(37.5, 1)
            smoker = random.random() < 0.4
            ill = age / 40 + temperature - 37.5 + smoker > 2
            shown = {
                "patient": f"P-{node}-{k:04}",
                "age": "NA" if random.random() < 0.1 else f"{age:.0f}",
                "temperature": "" if random.random() < 0.1 else f"{temperature:.1f}",
                "smoker": "?" if random.random() < 0.1 else "yes" if smoker else "no",
                "ward": f'"{_WARDS[k % 3]}"',
                "diagnosis": "ill" if ill else "healthy",
            }
            if separator == ";":
                shown["temperature"] = shown["temperature"].replace(".", ",")
            lines.append(separator.join(shown[name] for name in order))
        path = folder / f"node-{node}" / "train.csv"
        path.parent.mkdir(parents=True)
        path.write_text("\ufeff" * (node == 1) + "\r\n".join(lines) + "\r\n", encoding="utf-8")
    return folder / "node-{rank}"


def write_clinics(folder: Path) -> Path:
    """Write clinic-0, clinic-1, ... with a date, an id, texts, gaps, decimal commas and a target for every task, and return the template
    for --node-data."""
    rng = np.random.default_rng(3)
    for node, size in enumerate(CLINICS):
        for part, rows in (("train", size), ("test", 60)):
            lines = ["id;admitted;sex;age;crp;ward;stay;died;ill"]
            for k in range(rows):
                age, crp, west = rng.integers(20, 95), rng.gamma(2, 20), rng.random() < 0.3
                stay = max(0.5, 3 + 0.12 * age + 0.08 * crp + 6 * west + 2 * rng.normal())
                day = f"{rng.integers(1, 28):02}.{rng.integers(1, 12):02}.{rng.integers(2019, 2023)}"
                ward = "" if k % 11 == 0 else "west" if west else rng.choice(["north", "south"])
                known = f"{stay:.1f};{int(rng.random() < 0.7)};{'yes' if stay > 18 else 'no'}"
                numbers = f"{age};{crp:.1f};{ward};{known}".replace(".", ",")
                lines.append(f"P{node}{k:04};{day};{rng.choice(['m', 'f'])};{numbers}")
            path = folder / f"clinic-{node}" / f"{part}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines))
    return folder / "clinic-{rank}"
