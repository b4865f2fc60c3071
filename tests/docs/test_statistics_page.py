"""The commands of docs/statistics.md, one after the other."""

import json
import re
from pathlib import Path

from tests.docs.test_federation_tutorial import execute

PAGE = Path(__file__).parents[2] / "docs" / "statistics.md"


def test_three_clinics_ten_questions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables, plan, ask, federation = re.findall(
        r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    execute(tables)
    execute(plan)
    assert not Path("answers").exists()
    execute(ask)
    found = json.loads(Path("answers/answers.json").read_text())
    assert len(found["answers"]) == 10
    execute(federation)
    assert Path("f/federation.toml").exists()
    tables = [Path(f"node-{node}/train.csv").read_text().splitlines()[1:] for node in range(3)]
    persons = sum(len({line.split(",")[0] for line in table}) for table in tables)
    assert abs(found["answers"][0]["value"] - persons) < 6 * found["answers"][0]["noise"]
