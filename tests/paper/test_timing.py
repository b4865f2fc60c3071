"""The table of times: the claims of the text, and the bytes of a round."""

import dataclasses

import pytest

from dpps.paper import published, run, timing
from tests.support.paper import TINY


def test_time_table_gives_the_differences_the_text_claims_as_ratios_of_sums():
    def change(algorithm, *models):
        ours, sgp = (sum(sum(published.TIME[a, m]) for m in models) for a in (algorithm, "SGP"))
        return 100 * (ours / sgp - 1)

    claimed = published.CLAIMED_TIME
    assert change("SGPDP", "mlp", "resnet18", "vit") == pytest.approx(claimed["SGPDP, all"], abs=0.02)
    assert change("PartPSP-1", "mlp") == pytest.approx(claimed["PartPSP-1, mlp"], abs=0.02)
    assert change("PartPSP-1", "resnet18", "vit") == pytest.approx(
        claimed["PartPSP-1, resnet18 and vit"], abs=0.02
    )


def test_bytes_of_the_time_table_are_those_the_protocol_counts():
    for cell in (TINY, dataclasses.replace(TINY, topology="4-out", unit="none", budget=None)):
        result = run(dataclasses.replace(cell, sync_every=0))
        size, scalar = result["shared_parameters"], cell.unit != "none"
        assert result["bytes_per_round"] == timing.bytes_of_round(
            size, cell.topology, cell.nodes, scalar=scalar
        )
