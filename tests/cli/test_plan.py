"""`dpps plan`."""

import json

import pytest

from dpps.cli import main


def test_plan_answers_both_ways(capsys):
    assert main(["plan", "--epsilon", "3", "--json"]) == 0
    forward = json.loads(capsys.readouterr().out)
    assert main(["plan", "--noise-multiplier", str(forward["noise_multiplier"]), "--json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert back["epsilon"] == pytest.approx(3, rel=2e-3)
    assert main(["plan", "--unit", "node-swap", "--budget", "5", "--parameters", "7850"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1.897" in shown  # 0.55 (1 + 2 x 0.78 x 0.001 x 7850 / 5)
    assert "no meaningful protection" in shown
    assert "sum of rounds, no guarantee" in shown
    assert "total" not in shown
