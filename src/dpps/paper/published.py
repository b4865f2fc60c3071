"""The paper's numbers and where they stand in it, and what the authors' published logs add. Nothing here was measured by us."""

import csv
from importlib import resources
from typing import NamedTuple

TOPOLOGIES = ("exp", "4-out", "6-out", "8-out")
ALGORITHMS = ("PartPSP-1", "PartPSP-2", "SGPDP", "PEDFL")
PAIRS = {"mlp": "mnist", "resnet18": "fashion-mnist", "vit": "cifar-10"}
"""The three model/data pairs."""

#: Section V-D, table "The Final Test Accuracy (%)": algorithm, b (None: NoDP), model -> EXP, 4-, 6-, 8-Out.
ACCURACY: dict[tuple[str, float | None, str], tuple[float, float, float, float]] = {}

_ACCURACY_ROWS = """
PartPSP-1 1 41.57 40.63 38.78 43.19 82.70 82.48 82.97 82.63 33.60 37.00 45.79 66.97
PartPSP-1 2 44.67 46.25 60.03 81.00 82.85 82.54 82.10 81.90 51.63 64.33 74.97 76.76
PartPSP-1 3 48.08 63.51 80.12 88.87 82.73 81.86 82.06 82.59 71.78 76.24 76.72 76.98
PartPSP-1 none 89.66 89.71 89.74 89.75 88.01 88.17 88.01 88.14 76.98 77.04 77.03 77.00
PartPSP-2 1 21.66 25.42 28.09 22.03 69.14 81.13 80.95 81.65 18.55 18.41 17.33 22.10
PartPSP-2 2 23.33 24.78 25.70 28.68 80.17 81.11 81.29 80.93 21.49 24.74 28.10 49.24
PartPSP-2 3 18.84 24.07 34.02 67.26 81.60 80.75 82.22 81.37 29.47 40.79 54.65 71.34
PartPSP-2 none 88.85 88.91 88.95 88.99 87.33 87.49 87.37 87.42 78.45 78.54 78.50 78.48
SGPDP 1 29.23 26.68 33.23 22.38 66.38 72.36 72.58 72.85 10.46 10.39 11.91 8.70
SGPDP 2 24.89 32.39 25.91 28.31 71.77 73.26 72.65 72.63 10.86 7.61 14.39 41.08
SGPDP 3 29.78 26.94 29.34 45.63 71.65 72.12 71.01 72.83 19.43 29.55 51.64 68.96
SGPDP none 81.55 81.64 81.62 81.62 90.18 90.31 89.98 90.16 78.65 78.47 78.48 78.46
PEDFL 1 38.47 34.81 44.72 44.37 31.32 38.71 55.81 49.09 9.27 10.28 10.80 9.83
PEDFL 2 42.94 43.55 44.41 44.16 53.66 50.11 51.97 71.16 11.71 12.27 15.40 17.34
PEDFL 3 44.17 44.40 44.24 44.22 51.30 48.80 49.43 73.44 24.93 32.18 36.24 45.79
PEDFL none 84.36 84.36 84.31 84.25 72.53 72.22 71.65 72.61 75.46 74.17 75.48 77.37
"""

for _line in _ACCURACY_ROWS.split("\n")[1:-1]:
    _name, _b, *_values = _line.split()
    for _k, _model in enumerate(PAIRS):
        _four = tuple(map(float, _values[4 * _k : 4 * _k + 4]))
        ACCURACY[_name, None if _b == "none" else float(_b), _model] = _four  # type: ignore[assignment]

#: Section V-D, text: relative improvement of average accuracy over all private cells, percent.
CLAIMED_IMPROVEMENT = {
    ("PartPSP-1", "PartPSP-2"): 42.11,
    ("PartPSP-1", "SGPDP"): 61.08,
    ("PartPSP-2", "SGPDP"): 13.35,
}
#: Section V-D, text: of the 36 private cells, how many PartPSP-1 wins.
CLAIMED_WINS = 33

#: Appendix, table "Performance Comparison: PartPSP-Real vs PartPSP-Esti": noise, shared layers, model -> 2-Out, EXP.
REAL_VS_ESTIMATED = {
    ("real", "1", "mlp"): (88.50, 89.50),
    ("real", "2", "mlp"): (60.53, 61.14),
    ("paper", "1", "mlp"): (85.42, 84.88),
    ("paper", "2", "mlp"): (52.09, 53.99),
    ("real", "1", "resnet18"): (82.37, 82.40),
    ("real", "2", "resnet18"): (80.83, 81.21),
    ("paper", "1", "resnet18"): (82.28, 81.56),
    ("paper", "2", "resnet18"): (80.52, 81.10),
}
#: The authors' logs of the same MLP runs: mean real sensitivity, 2-Out and EXP.
REAL_VS_ESTIMATED_RAS = {
    ("real", "1", "mlp"): (11.1553, 10.3384),
    ("real", "2", "mlp"): (64.0272, 63.1892),
    ("paper", "1", "mlp"): (18.3604, 18.0748),
    ("paper", "2", "mlp"): (95.8251, 93.7406),
}

#: Appendix, table "The Time Cost Experiments of PartPSP" (seconds, 1 Gbps): algorithm, model -> EXP, 4-, 6-, 8-Out.
TIME = {
    ("SGP", "mlp"): (68.33, 68.85, 70.12, 70.89),
    ("SGPDP", "mlp"): (78.39, 78.93, 80.92, 81.92),
    ("PartPSP-1", "mlp"): (74.64, 74.36, 75.68, 76.22),
    ("SGP", "resnet18"): (874.5, 1260.0, 1647.0, 2034.0),
    ("SGPDP", "resnet18"): (1120.0, 1504.0, 1888.0, 2275.0),
    ("PartPSP-1", "resnet18"): (145.7, 147.6, 154.4, 159.4),
    ("SGP", "vit"): (226.3, 253.5, 281.7, 318.3),
    ("SGPDP", "vit"): (275.9, 293.3, 322.0, 364.7),
    ("PartPSP-1", "vit"): (138.1, 137.9, 138.1, 140.2),
}

#: Section V-C, figure "RAS about partial communication and network connectivity": one layer shared, d = 2..10, from the
#: authors' logs (the figure prints no numbers; the logs for two and three layers were not among those read).
FACTORS = dict(
    zip(
        range(2, 11),
        (50.1806, 40.5537, 35.1267, 30.7807, 24.3761, 18.6965, 14.5008, 10.7808, 5.7222),
        strict=True,
    )
)


class Curve(NamedTuple):
    """One panel of the figure "Comparison of Real Sensitivity and Estimated Sensitivity" (Section V-B)."""

    real: list[float]
    estimated: list[float]


def curve(name: str) -> Curve:
    """The authors' curve of a panel, such as mlp-1-exp."""
    text = resources.files("dpps.paper").joinpath("curves", f"{name}.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    return Curve([float(row["real"]) for row in rows], [float(row["estimated"]) for row in rows])
