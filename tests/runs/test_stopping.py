"""A request to stop takes effect after the same round at all processes."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from dpps.runs import Run


@dataclass
class Control:
    """As a fabric's control: everybody has heard after two more rounds, if there are as many."""

    stop_after: int | None = None
    coming: list[object] = field(default_factory=list)

    def rounds_until_heard(self, weights) -> int | None:
        self.coming = list(weights)
        return 2 if len(self.coming) >= 2 else None

    def ask_to_stop(self, round_: int) -> None:
        self.stop_after = round_


def _run(round_: int, count: int, control: Control) -> SimpleNamespace:
    return SimpleNamespace(
        state=SimpleNamespace(round=round_, shared=SimpleNamespace(clock=round_, rate=1.0)),
        plan=SimpleNamespace(count=count),
        rounds_per_epoch=4,
        algorithm=SimpleNamespace(
            partition=SimpleNamespace(shared=["w"]), rate=lambda epoch: 1.0 if epoch < 2 else 0.1
        ),
        protocol=SimpleNamespace(fabric=SimpleNamespace(control=control), weights=lambda clock: clock),
    )


def stops(run: SimpleNamespace, *, asked: bool) -> bool:
    run._stop_asked, run._coming = asked, lambda: Run._coming(run)
    return Run._stops_here(run)


def test_nobody_asks_nobody_stops() -> None:
    assert not stops(_run(3, 8, Control()), asked=False)


def test_who_asks_stops_when_all_have_heard_and_clocks_restart_with_the_rates() -> None:
    control = Control()
    assert not stops(_run(3, 8, control), asked=True)
    assert control.stop_after == 4
    assert control.coming == [3, 0, 1, 2, 3]  # epoch 2 has another rate
    assert not stops(_run(4, 8, control), asked=True)
    assert stops(_run(5, 8, control), asked=True)


def test_a_run_that_ends_before_all_could_hear_goes_to_its_end() -> None:
    control = Control()
    assert not stops(_run(7, 8, control), asked=True)
    assert control.stop_after is None
