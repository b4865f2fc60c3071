"""`dpps topology`."""

import json

from dpps.cli import main


def test_topology_reports_and_draws(tmp_path, capsys):
    assert main(["topology", "exp", "--nodes", "10", "--json", "--plot", str(tmp_path / "exp.svg")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {
        *(
            "nodes",
            "period",
            "degree",
            "doubly_stochastic",
            "connected_within",
            "diameter",
            "contraction",
            "exact_average_after",
        )
    }
    assert (report["period"], report["connected_within"], report["exact_average_after"]) == (4, 4, None)
    assert "<svg" in (tmp_path / "exp.svg").read_text()
