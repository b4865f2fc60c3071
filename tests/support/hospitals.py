"""Three hospitals' files as they come: texts, gaps, other separators, other orders of columns, other sizes."""

from pathlib import Path

import numpy as np

SIZES = (35, 90, 180)
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
