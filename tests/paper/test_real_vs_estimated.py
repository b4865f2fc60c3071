"""The table of real against estimated sensitivity."""

import pytest

from dpps.paper import published


@pytest.mark.parametrize(
    ("models", "said"), [(("mlp",), "mlp"), (("resnet18",), "resnet18"), (("mlp", "resnet18"), "all")]
)
def test_real_vs_estimated_table_gives_the_decrease_the_text_claims(models, said):
    total = {"real": 0.0, "paper": 0.0}
    for (noise, _, model), row in published.REAL_VS_ESTIMATED.items():
        total[noise] += sum(row) if model in models else 0
    assert 100 * (1 - total["paper"] / total["real"]) == pytest.approx(
        published.CLAIMED_DECREASE[said], abs=0.02
    )
