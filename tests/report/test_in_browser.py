"""The pages in Chromium: drawn, readable, within the window, in words for everybody; and printed on one sheet."""

import dataclasses
import math
from pathlib import Path

import pytest

import dpps
from dpps.report import Accuracy, RunRecord, number, render
from dpps.runs import RoundLog
from tests.support.browser import Browser

PICTURES = Path(__file__).parents[2] / "out" / "report"
LEFT, END = "\ue012", "\ue010"


def open_page(window: Browser, page: Path, width: int = 1280, *, dark: bool = False) -> None:
    """Load the page at its full height; a failure in it shows here."""
    window.size(width, 900, dark=dark)
    window.open(page)
    window.size(width, window.run("return document.documentElement.scrollHeight"), dark=dark)
    window.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert window.run("return document.documentElement.dataset.ready") == "yes"


def assert_no_complaint(window: Browser) -> None:
    assert window.run("return document.documentElement.dataset.error ?? null") is None
    assert window.console() == []


EVERY = ("record", "node-swap", "none", "comparison")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True), (1280, True), (360, False)])
def test_every_page_is_drawn_and_readable(
    chromium: Browser, pages: dict[str, Path], tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    open_page(chromium, pages[name], width, dark=dark)
    empty = chromium.run(
        """return [...document.querySelectorAll("figure.chart")].filter(figure =>
             ![...figure.querySelectorAll("path.series")].some(path => path.getBoundingClientRect().width > 100 || path.classList.contains('dots')))
             .map(figure => figure.id)"""
    )
    assert empty == []
    assert chromium.run("return document.querySelectorAll('figure.chart').length") >= 2
    assert "NaN" not in chromium.run("return document.body.outerHTML")
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    assert chromium.too_wide() == []
    assert chromium.poor_contrast() == []
    chromium.picture(tmp_path / f"{name}-{width}{'-dark' if dark else ''}.png")
    assert_no_complaint(chromium)


def test_contrast_and_width_are_really_checked(chromium: Browser, pages: dict[str, Path]) -> None:
    open_page(chromium, pages["record"], 360)
    chromium.run(
        """document.querySelector("h1").style.color = "#aaa";
           document.querySelector("h2").style.cssText = "width:800px;display:block" """
    )
    assert [line.split()[1] for line in chromium.poor_contrast()] == ["H1."]
    assert any(line.startswith("H2.") for line in chromium.too_wide())


def test_nothing_is_written_outside_its_drawing(chromium: Browser, pages: dict[str, Path]) -> None:
    for width in (1280, 360):
        open_page(chromium, pages["node-swap"], width)
        outside = chromium.run(
            """return [...document.querySelectorAll(".area span")].filter(text => {
                 const box = text.getBoundingClientRect(), around = text.closest("figure").getBoundingClientRect();
                 return box.left < around.left || box.right > around.right;
               }).map(text => text.textContent)"""
        )
        assert outside == []


def test_names_of_ten_runs_are_not_cut(
    chromium: Browser, records: dict[str, RunRecord], tmp_path: Path
) -> None:
    name = "a-rather-long-name-of-a-run-about-hospitals"
    runs = [
        dataclasses.replace(records[unit], name=f"{name}-{unit}-{k}")
        for k in range(5)
        for unit in ("record", "none")
    ]
    page = tmp_path / "ten.html"
    page.write_text(render(runs), encoding="utf-8")
    for width in (1280, 360):
        open_page(chromium, page, width)
        cut = chromium.run(
            """return [...document.querySelectorAll(".runs tbody th, .legend span")].filter(e =>
                 e.scrollWidth > e.clientWidth + 1 || getComputedStyle(e).textOverflow === "ellipsis").map(e => e.textContent)"""
        )
        assert cut == []
        assert chromium.too_wide() == []
    assert_no_complaint(chromium)


@pytest.mark.parametrize("name", ["record", "node-swap", "none"])
def test_a_run_is_printed_on_one_sheet(
    chromium: Browser, records: dict[str, RunRecord], tmp_path: Path, name: str
) -> None:
    baselines = {"no privacy": Accuracy(91.5, [85.0, 91.5]), "alone": Accuracy(70.0, by_node=[60.0, 70.0])}
    page = tmp_path / "print.html"
    page.write_text(render([dataclasses.replace(records[name], baselines=baselines)]), encoding="utf-8")
    open_page(chromium, page, dark=True)
    printed = chromium.pdf()
    (tmp_path / f"{name}.pdf").write_bytes(printed)
    assert printed.count(b"/Type /Page\n") == 1


def test_what_carries_no_noise_is_not_printed(
    chromium: Browser, records: dict[str, RunRecord], tmp_path: Path
) -> None:
    base = {"no privacy": Accuracy(91.5, by_node=[90.0, 93.0])}
    runs = [dataclasses.replace(records["record"], name=name, baselines=base) for name in ("one", "two")]
    page = tmp_path / "print.html"
    for shown in (runs, runs[:1]):
        page.write_text(render(shown), encoding="utf-8")
        open_page(chromium, page)
        assert "91.5 %" in chromium.run("return document.body.innerText")
        printed = chromium.printed_text()
        assert "91.5 %" not in printed
        statement = records["record"].privacy.statement
        assert " ".join(printed.split()).count("own eyes") == statement.count("own eyes")
        assert not chromium.run(
            'return [...document.querySelectorAll(".strip")].some(e => e.checkVisibility())'
        )
        chromium.size(1280, 900)


def test_theme_can_be_switched(chromium: Browser, pages: dict[str, Path]) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    open_page(chromium, pages["record"])
    light = chromium.run(background)
    chromium.type("#theme", " ")
    switched = chromium.run(background)
    open_page(chromium, pages["record"], dark=True)
    assert light != switched
    assert chromium.run(background) == switched  # what the system prefers is taken at first
    chromium.type("#theme", " ")
    assert chromium.run(background) == light
    assert_no_complaint(chromium)


def test_values_by_pointer_and_by_keyboard(
    chromium: Browser, pages: dict[str, Path], records: dict[str, RunRecord]
) -> None:
    open_page(chromium, pages["node-swap"])
    record = records["node-swap"]
    tip = (
        'const tip = document.querySelector("#sensitivity .tip"); return tip.hidden ? null : tip.textContent'
    )
    assert chromium.run(tip) is None
    chromium.hover("#sensitivity .area")
    assert "certified" in chromium.run(tip)
    chromium.type("#sensitivity .area", END + LEFT)
    last = record.rounds[-2]
    assert chromium.run(tip).startswith(f"round {last.round}")
    spoken = chromium.run(
        'return document.querySelector("#sensitivity .area").getAttribute("aria-valuetext")'
    )
    assert f"certified {number(last.estimated or 0)}" in spoken
    assert f"real {number(last.real or 0)}" in spoken
    assert_no_complaint(chromium)


def test_everything_has_a_name(chromium: Browser, pages: dict[str, Path]) -> None:
    for name in ("node-swap", "comparison"):
        open_page(chromium, pages[name])
        nameless = chromium.run(
            """return [...document.querySelectorAll("button, input, summary, [role=slider], [role=button], [role=group]")]
                 .filter(e => !(e.getAttribute("aria-label") || e.labels?.length || e.textContent.trim()))
                 .map(e => e.outerHTML.slice(0, 80))"""
        )
        assert nameless == []
        assert chromium.run('return document.querySelectorAll("h1").length') == 1


def test_long_runs_are_drawn(chromium: Browser, records: dict[str, RunRecord], tmp_path: Path) -> None:
    record = records["node-swap"]
    rounds = [
        RoundLog(
            t,
            None,
            2 + math.sin(t / 50),
            2 + math.sin(t / 50),
            1e-9,
            math.inf,
            math.nan if t == 7 else 1e-12 * t,
        )
        for t in range(12_000)
    ]
    page = tmp_path / "long.html"
    page.write_text(render([dataclasses.replace(record, rounds=rounds, topology=dpps.Complete(200))]))
    open_page(chromium, page)
    assert "NaN" not in chromium.run("return document.querySelector('#loss').outerHTML")
    assert_no_complaint(chromium)
