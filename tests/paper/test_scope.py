"""How much of a table is asked for."""

import pytest

from dpps.errors import UsageError
from dpps.paper import Cell, Scope

CELLS = [Cell(), Cell(model="resnet18", data="fashion-mnist"), Cell(model="vit", data="cifar-10", tests=0)]


def test_the_full_size_is_the_papers() -> None:
    assert Scope().fit(CELLS) == CELLS


@pytest.mark.parametrize("size", ["quick", "smallest"])
def test_other_sizes_take_the_embedded_data_and_cost_less(size: str) -> None:
    fitted = Scope(size).fit(CELLS)
    assert {cell.data for cell in fitted} == {"mnist-mini"}
    assert [cell.model for cell in fitted] == [cell.model for cell in CELLS]
    assert all(small.cost < full.cost for small, full in zip(fitted, CELLS, strict=True))


def test_a_quick_run_of_the_mlp_has_as_many_rounds_as_two_epochs_of_the_full_one() -> None:
    (quick,) = Scope("quick").fit(CELLS[:1])
    assert quick.epochs * 10_000 == 2 * 60_000


def test_a_cell_that_is_not_tested_stays_so() -> None:
    assert Scope("quick").fit(CELLS)[2].tests == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"models": ("mpl",)}, "'mpl'.*'mlp'"),
        ({"seeds": ()}, "--seeds is 0"),
        ({"bandwidth": 0.0}, "--bandwidth is 0"),
        ({"bandwidth": float("inf")}, "--bandwidth is inf"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Scope(**options)  # type: ignore[arg-type]
