"""What is said about a failure is what is known, in words that a terminal only prints."""

import json

import pytest

import dpps
from dpps.transport import CLOSED, Report, all_said, cannot_reach, printable, same_facts, verdict

SILENT = "no answer for 5 s"


def _said(reports: dict[int, Report], own: int = 0, lost: tuple[int, ...] = ()) -> str:
    return str(verdict(reports, own, lost, CLOSED, lambda rank: f"{rank} (10.0.0.{rank})"))


def test_whoever_is_missed_and_says_nothing_has_failed() -> None:
    reports = {0: Report(lost=(2,), what=SILENT), 1: Report(lost=(0,), what=CLOSED)}
    said = _said(reports)
    assert said.startswith("rank 2 (10.0.0.2) ")
    assert "failed" in said
    assert SILENT in said
    assert "rank 0" not in _said(reports, own=1)


def test_a_blocked_pair_is_named_and_nobody_accused() -> None:
    """Ranks 1 and 2 do not hear each other; everybody else waited for them or found a closed connection."""
    reports = {
        0: Report(lost=(1,), what=CLOSED),
        1: Report(lost=(2,), what=SILENT, reached=False),
        2: Report(lost=(1,), what=SILENT, reached=False),
        3: Report(lost=(0,), what=SILENT),
    }
    for own in reports:
        said = _said(reports, own)
        first, second, *_ = said.split("; ")
        assert "rank 1 " in first
        assert f"rank 2 (10.0.0.2) ({SILENT})" in first
        assert "rank 2 " in second
        assert f"rank 1 (10.0.0.1) ({SILENT})" in second
        assert "failed" not in said
        assert "rank 0" not in said


def test_of_somebody_who_says_nothing_no_more_is_known_than_who_cannot_reach_it() -> None:
    """Its machine may be gone, or the way there; it is named, and nothing is made up."""
    reports = {
        0: Report(lost=(2,), what=SILENT, reached=False),
        1: Report(lost=(0,), what=CLOSED),
    }
    said = _said(reports, own=1)
    assert said.startswith("rank 0 ")
    assert f"rank 2 (10.0.0.2) ({SILENT});" in said
    killed = {0: Report(lost=(2,), what=CLOSED, reached=False)}
    assert _said(killed).startswith("rank 2 (10.0.0.2) ")
    assert CLOSED in _said(killed)


def test_who_may_still_say_something_is_waited_for() -> None:
    """An operation that runs out of time closes all connections of its process before that can say of whom it waited in vain;
    and who is waited for in vain may be waiting itself."""
    early = {0: Report(lost=(2,), what=CLOSED), 1: Report(lost=(0,), what=CLOSED)}
    assert not all_said(early, 3)
    later = early | {2: Report(lost=(1,), what=SILENT, reached=False)}
    assert all_said(later, 3)
    for own in later:
        assert _said(later, own).startswith("rank 2 ")
        assert "rank 1 (10.0.0.1)" in _said(later, own)
    assert all_said({0: Report(lost=(2,), what=CLOSED, reached=False), 1: early[1]}, 3), (
        "a killed one says nothing"
    )
    assert not all_said({0: Report(lost=(2,), what=SILENT), 1: early[1]}, 3)
    assert all_said({2: Report(why="disk full")}, 3)


def test_a_reason_comes_before_all_else() -> None:
    reports = {0: Report(lost=(1,), what=CLOSED), 1: Report(why="disk full")}
    assert _said(reports).startswith("rank 1 ")
    assert _said(reports).endswith(": disk full")
    both = {0: Report(lost=(1,), what=CLOSED), 1: Report(lost=(0,), what=CLOSED)}
    assert _said(both, lost=(1,)).startswith("rank 1 (10.0.0.1) ")
    assert CLOSED in _said(both, lost=(1,))


def test_many_pairs_are_counted() -> None:
    links = {(0, peer): SILENT for peer in range(1, 12)}
    assert cannot_reach(links).count(SILENT) == 8
    assert " 3 more" in cannot_reach(links)


def test_words_of_others_are_only_printed() -> None:
    evil = "\x1b[2J\x1b]0;gotcha\x07\r\nnew line \u202e"
    assert printable(evil) == "?[2J?]0;gotcha???new line ?"
    assert len(printable("x" * 10_000)) < 500
    text = json.dumps({"why": evil, "lost": [1], "what": evil, "reached": True})
    assert "\x1b" not in _said({1: Report.decoded(text, 4)})
    with pytest.raises(dpps.errors.UsageError) as refused:
        same_facts([{"configuration": {"a": 1}}, {"configuration": {"a": 1, evil: evil}}], 0)
    assert "\x1b" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"lost": 3}',
        '{"lost": ["x"], "why": "", "what": ""}',
        '{"lost": [1e999], "why": "", "what": ""}',
    ],
)
def test_what_is_not_a_report_is_a_stop_without_a_reason(text: str) -> None:
    assert Report.decoded(text, 4).why
    assert Report.decoded(text, 4).lost == ()


def test_nobody_misses_a_process_that_there_is_not() -> None:
    report = Report.decoded('{"lost": [-1, 2, 4, 1e30], "why": "", "what": "", "reached": true}', 4)
    assert report.lost == (2,)


def test_a_report_survives_the_way() -> None:
    report = Report("", (3, 4), SILENT, False)
    assert Report.decoded(report.encoded(), 5) == report
