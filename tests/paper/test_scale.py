"""The figure of network scale: every run has the same number of rounds, whatever N."""

from dpps.paper import Scope, scale


def test_all_runs_of_the_mlp_are_at_the_same_stage_of_training() -> None:
    rounds = {
        n: cell.epochs * (60_000 // (n * cell.batch_size))
        for model, n, _, cell in scale.points(Scope())
        if model == "mlp"
    }
    assert rounds.pop(1000) == 40
    assert set(rounds.values()) == {120}


def test_the_networks_of_the_paper_come_first_and_larger_ones_only_in_full() -> None:
    full, quick = ([n for _, n, _, _ in scale.points(Scope(size))] for size in ("full", "quick"))
    assert sorted(set(full)) == [10, 20, 30, 40, 50, 100, 300, 1000]
    assert max(quick) == 50
    assert len(set(scale.cells(Scope()))) == len(full)


def test_resnet_runs_have_ten_rounds() -> None:
    cells = [cell for model, *_, cell in scale.points(Scope()) if model == "resnet18"]
    assert {cell.examples // (cell.nodes * cell.batch_size) for cell in cells} == {scale.RESNET_ROUNDS}
