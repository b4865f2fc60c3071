"""The pages in Chromium: drawn, readable, within the window, in words for everybody; and printed for a board."""

import math
from dataclasses import replace

import pytest

from dpps.report import render
from dpps.runs import RoundLog


def open_page(window, page, width=1280, *, dark=False):
    """Load the page at its full height."""
    window.size(width, 900, dark=dark)
    window.open(page)
    window.size(width, window.run("return document.documentElement.scrollHeight"), dark=dark)
    window.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


EVERY = ("record", "node-swap", "none", "hospitals", "comparison")


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True), (1280, True), (360, False)])
def test_every_page_is_drawn_and_readable(chromium, pages, tmp_path, name, width, dark):
    open_page(chromium, pages[name], width, dark=dark)
    empty = chromium.run(
        """return [...document.querySelectorAll("figure.chart")].filter(figure =>
             ![...figure.querySelectorAll("path.line")].some(path => path.getBoundingClientRect().width > 100) && !figure.querySelector("path.dots"))
             .map(figure => figure.id)"""
    )
    assert empty == []
    assert chromium.run("return document.querySelectorAll('figure.chart').length") >= 1
    assert "NaN" not in chromium.run("return document.body.outerHTML")
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    assert chromium.too_wide() == []
    assert chromium.poor_contrast() == []
    assert chromium.console() == []


def test_contrast_and_width_are_really_checked(chromium, pages):
    open_page(chromium, pages["record"], 360)
    chromium.run(
        """document.querySelector("h1").style.color = "#aaa";
           document.querySelector("h2").style.cssText = "width:800px;display:block" """
    )
    assert [line.split()[1] for line in chromium.poor_contrast()] == ["H1."]
    assert any(line.startswith("H2.") for line in chromium.too_wide())


def test_nothing_is_written_outside_its_drawing(chromium, pages):
    for width in (1280, 360):
        open_page(chromium, pages["node-swap"], width)
        outside = chromium.run(
            """return [...document.querySelectorAll(".area span")].filter(text => {
                 const box = text.getBoundingClientRect(), around = text.closest("figure").getBoundingClientRect();
                 return box.left < around.left || box.right > around.right;
               }).map(text => text.textContent)"""
        )
        assert outside == []


def test_names_of_ten_runs_are_not_cut(chromium, runs, tmp_path):
    name = "a-rather-long-name-of-a-run-about-hospitals"
    many = [replace(runs[unit], name=f"{name}-{unit}-{k}") for k in range(5) for unit in ("record", "none")]
    page = tmp_path / "ten.html"
    page.write_text(render(many), encoding="utf-8")
    for width in (1280, 360):
        open_page(chromium, page, width)
        cut = chromium.run(
            """return [...document.querySelectorAll(".runs tbody th, .legend span")].filter(e =>
                 e.scrollWidth > e.clientWidth + 1 || getComputedStyle(e).textOverflow === "ellipsis").map(e => e.textContent)"""
        )
        assert cut == []
        assert chromium.too_wide() == []
    assert chromium.console() == []


# On paper


@pytest.mark.parametrize("paper", [(8.27, 11.69), (8.5, 11.0)], ids=["A4", "letter"])
@pytest.mark.parametrize("name", ["record", "node-swap", "none", "hospitals"])
def test_a_run_is_printed_on_two_sheets(chromium, pages, name, paper):
    open_page(chromium, pages[name], dark=True)
    assert chromium.pdf(*paper).count(b"/Type /Page\n") <= 2


def test_a_board_finds_on_paper_what_it_asks_for(chromium, pages, hospitals):
    """Gains by member, the odds, who is protected, what is not covered; nothing of it behind a click."""
    open_page(chromium, pages["hospitals"])
    printed = " ".join(chromium.printed_text().split())
    summary = hospitals.summary
    for name in summary.node_names or ():
        assert name in printed
    for words in (
        "+20.0 ± 3.9",
        "+1.0 ± 7.8",
        "-1.5 ± 1.0",
        "+4.8 ± 3.1",
        "20.1 of 100",
        "1e-5",
        "Protected:",
        "Not covered:",
    ):
        assert words in printed, words
    assert "".join(summary.privacy.statement.split()) in "".join(printed.split())
    chromium.size(1280, 900)


def test_losses_and_counts_are_not_printed(chromium, pages, hospitals):
    for name in ("hospitals", "comparison"):
        open_page(chromium, pages[name])
        assert chromium.run("return document.querySelector('#loss').checkVisibility()")
        printed = " ".join(chromium.printed_text().split())
        visible = "return [...document.querySelectorAll('#loss, #labels, #nodes, details')].filter(e => e.checkVisibility()).length"
        assert chromium.run(visible) == 0
        assert printed.count("own eyes") == printed.count("for the node's own eyes.")  # the statement's
        chromium.size(1280, 900)


def test_paper_is_white_and_ink_is_dark(chromium, pages):
    open_page(chromium, pages["hospitals"], dark=True)
    chromium.printed_text()
    assert chromium.poor_contrast() == []
    assert chromium.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    chromium.size(1280, 900)


# For everybody


def test_the_theme_follows_the_system(chromium, pages):
    background = "return getComputedStyle(document.body).backgroundColor"
    open_page(chromium, pages["record"])
    light = chromium.run(background)
    open_page(chromium, pages["record"], dark=True)
    assert chromium.run(background) != light


def test_everything_has_a_name(chromium, pages):
    for name in ("hospitals", "comparison"):
        open_page(chromium, pages[name])
        nameless = chromium.run(
            """return [...document.querySelectorAll("summary, [role=img], [role=group]")]
                 .filter(e => !(e.getAttribute("aria-label") || e.textContent.trim()))
                 .map(e => e.outerHTML.slice(0, 80))"""
        )
        assert nameless == []
        assert chromium.run('return document.querySelectorAll("h1").length') == 1


def test_long_runs_are_drawn(chromium, runs, tmp_path):
    wave = [2 + math.sin(t / 50) for t in range(12_000)]
    log = [
        RoundLog(t, None, wave[t], wave[t], 1e-9, math.inf, math.nan if t == 7 else 1e-12 * t)
        for t in range(12_000)
    ]
    page = tmp_path / "long.html"
    page.write_text(render([replace(runs["node-swap"], log=log)]), encoding="utf-8")
    open_page(chromium, page)
    assert "NaN" not in chromium.run("return document.querySelector('#loss').outerHTML")
    assert chromium.console() == []
