"""From tables to predictions by the commands of docs/data.md, one after the other, in an empty folder."""

import csv
import re
import statistics
from pathlib import Path

import pytest

from dpps.data import read_schema
from tests.docs.test_federation_tutorial import execute

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def rows(path):
    text = Path(path).read_text().splitlines()
    return list(csv.DictReader(text, delimiter=";" if ";" in text[0] else ","))


def test_from_tables_to_predictions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables, number, survival = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    commands = re.sub(r"^#.*\n", "", number, flags=re.MULTILINE)
    assert commands.replace("\\\n", " ").count("\n") <= 6
    execute(tables)
    execute(commands)
    kinds = {column.name: column.kind for column in read_schema("schema.toml").columns}
    numbers, other = dict.fromkeys(("age", "crp"), "number"), dict.fromkeys(("ward", "died"), "category")
    assert kinds == {"patient": "ignore", "admitted": "date"} | numbers | other
    stayed = [float(row["stay_days"].replace(",", ".")) for row in rows("hospitals/node-1/test.csv")]
    predicted = [float(row["prediction"]) for row in rows("predictions.csv")]
    error = statistics.fmean((a - b) ** 2 for a, b in zip(stayed, predicted, strict=True))
    assert error < 0.7 * statistics.pvariance(stayed)
    assert Path("runs/stay/report.html").exists()
    execute(survival)
    assert not {"stay_days", "died"} & {column.name for column in read_schema("survival.toml").columns}
    for row in rows("survival.csv"):
        chances = [float(value) for name, value in row.items() if name.startswith("survival at")]
        assert chances == sorted(chances, reverse=True)
        assert float(row["risk"]) == pytest.approx(1 - chances[-1], abs=1e-5)
