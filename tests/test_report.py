"""The report page: what it says, what it refuses, and how it behaves in a browser."""

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import webbrowser
from collections.abc import Callable, Iterator
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from browser import Browser, browser, programs
from dpps import cli, report
from dpps.config import TrainConfig, parse_arguments
from dpps.errors import RunError, UsageError
from dpps.learning import RoundLog
from dpps.privacy.accountant import Charge, total
from dpps.report import spending
from dpps.report.charts import KEPT_POINTS, charts, thinned
from dpps.report.networks import SHOWN_EDGES, network
from dpps.report.page import render
from dpps.report.story import Story, command, read_folder
from dpps.simulation import prepare

PICTURES = Path(__file__).parent.parent / "out" / "report"
SMALL = {"nodes": 5, "batch_size": 250, "quiet": True}
DOWN, RIGHT, LEFT, END = "\ue015", "\ue014", "\ue012", "\ue010"


def train(out: Path, **options: Any) -> Path:
    prepare(TrainConfig(out=out, **SMALL, **options)).run()
    return out


@pytest.fixture(scope="module", autouse=True)
def few_questions() -> Iterator[None]:
    """The accountant is slow: ask it at few points."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spending, "POINTS", 4)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small run in each of three units."""
    base = tmp_path_factory.mktemp("runs")
    swap = {"unit": "node-swap", "sync_every": 3, "track_real": True, "topology": "exp"}
    return {
        "record": train(base / "record", epochs=2, split="dirichlet:1"),
        "node-swap": train(base / "node-swap", epochs=2, **swap),
        "none": train(base / "none", epochs=1, unit="none", topology="ring", dropouts=0.2),
    }


@pytest.fixture(scope="module")
def stories(runs: dict[str, Path]) -> dict[str, Story]:
    return {name: read_folder(folder, name) for name, folder in runs.items()}


@pytest.fixture(scope="module")
def pages(stories: dict[str, Story], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each run and of their comparison."""
    base = tmp_path_factory.mktemp("pages")
    texts = {
        **{name: render([story]) for name, story in stories.items()},
        "comparison": render([*stories.values()]),
    }
    for name, text in texts.items():
        (base / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: base / f"{name}.html" for name in texts}


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a run that a test may damage."""
    return lambda name: Path(shutil.copytree(runs[name], tmp_path / name))


def page_of(*folders: Path, out: Path) -> str:
    return report.write(folders, out).read_text(encoding="utf-8")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


# What the page says


def test_page_needs_nothing_else(pages: dict[str, Path]) -> None:
    page = pages["node-swap"].read_text()
    assert re.findall(r"https?://[^\"' ]+", page) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert not re.search(r"<(link|img|iframe)|\ssrc=|\shref=|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    assert len(page.encode()) < 200_000


def test_headline_numbers(runs: dict[str, Path], pages: dict[str, Path]) -> None:
    for name in ("record", "node-swap"):
        summary = json.loads((runs[name] / "summary.json").read_text())
        page = pages[name].read_text()
        assert f"<strong>{summary['test_accuracy']:.1f} %</strong>" in page
        assert f"<strong>{summary['rounds']}</strong>" in page
        assert ("no meaningful protection</em>" in page) == (summary["privacy"]["epsilon"] > 20)
        words = re.sub(r"<.*?>", "", page.split("What the privacy means")[1].split("</section>")[0])
        said = summary["privacy"]["statement"]
        assert unescape(words).replace(" ", "") == said.replace(" ", "")


def test_all_charts_that_have_values(pages: dict[str, Path]) -> None:
    every = ["accuracy", "nodes", "epsilon", "loss", "sensitivity", "scale"]
    for name, expected in {
        "record": every,
        "node-swap": every,
        "none": ["accuracy", "nodes", "loss"],
    }.items():
        page = pages[name].read_text()
        assert [chart["key"] for chart in data_of(page)["charts"]] == expected
    assert "no protection" in page


def test_values_are_those_of_the_run(stories: dict[str, Story]) -> None:
    story = stories["node-swap"]
    by_key = {chart.key: chart for chart in charts([story])}
    sensitivity = {series.name: series.y for series in by_key["sensitivity"].series}
    assert list(sensitivity) == ["certified", "real"]
    for name, column in (("certified", "estimated"), ("real", "real")):
        expected = [getattr(log, column) for log in story.rounds]
        np.testing.assert_allclose(np.array(sensitivity[name]), expected, rtol=1e-5)
    np.testing.assert_allclose(by_key["nodes"].series[0].y, story.accuracy_by_node, rtol=1e-5)


def test_own_accuracy_is_a_second_series(stories: dict[str, Story]) -> None:
    chart = next(c for c in charts([stories["record"]]) if c.key == "nodes")
    assert [series.name for series in chart.series] == ["test set", "own data"]


def test_epsilon_by_round_adds_up_in_node_swap(stories: dict[str, Story]) -> None:
    story = stories["node-swap"]
    sums = np.cumsum([log.epsilon for log in story.rounds])
    np.testing.assert_allclose([epsilon for _, epsilon in story.spent], sums, rtol=1e-12)
    assert story.spent[-1][1] == story.privacy.epsilon


def test_epsilon_by_round_is_the_accountants_in_the_unit_record(
    runs: dict[str, Path], stories: dict[str, Story]
) -> None:
    story = stories["record"]
    lines = [json.loads(line) for line in (runs["record"] / "ledger.jsonl").read_text().splitlines()[1:]]
    at, epsilon = story.spent[len(story.spent) // 2]
    kind = Charge("gaussian", 0.0, lines[0]["noise_multiplier"], lines[0]["sampling"], at + 1)
    assert epsilon == pytest.approx(total([kind], 1e-5).epsilon, rel=1e-9)
    assert all(a[1] < b[1] for a, b in pairwise(story.spent))
    assert story.spent[-1] == (len(story.rounds) - 1, story.privacy.epsilon)


def test_rounds_charged_twice_count_twice(copied: Callable[[str], Path]) -> None:
    folder = copied("node-swap")
    ledger = folder / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([*lines, lines[1]]))
    (folder / "summary.json").unlink()
    before, after = (read_folder(f, "run") for f in (copied_of(folder, lines), folder))
    assert after.spent[0][1] == pytest.approx(2 * before.spent[0][1])
    assert after.privacy.epsilon == pytest.approx(after.spent[-1][1])


def copied_of(folder: Path, lines: list[str]) -> Path:
    plain = Path(shutil.copytree(folder, folder.with_name("plain")))
    (plain / "ledger.jsonl").write_text("".join(lines))
    return plain


@given(
    unit=st.sampled_from(["record", "contribution", "node-swap", "none"]),
    epsilon=st.sampled_from([None, 0.5, 3.0]),
    others=st.fixed_dictionaries(
        {},
        optional={
            "nodes": st.integers(2, 50),
            "topology": st.sampled_from(["ring", "4-out", "base-2"]),
            "clip": st.floats(0.1, 10),
            "mechanism": st.sampled_from(["laplace", "gaussian"]),
            "split": st.sampled_from(["dirichlet:0.5", "label:2"]),
            "shared": st.sampled_from(["2", "all", "layer1,layer 2"]),
            "track_real": st.booleans(),
            "seed": st.integers(0, 99),
            "lr_shared": st.sampled_from([0.1, 1.0, 0.03]),
            "data_dir": st.just(Path("some where")),
            "out": st.just(Path("x")),
        },
    ),
)
def test_command_repeats_the_configuration(unit: str, epsilon: float | None, others: dict[str, Any]) -> None:
    try:
        config = TrainConfig(unit=unit, epsilon=epsilon, **others).resolved()
    except UsageError:  # options that have no meaning together
        assume(False)
    words = shlex.split(command(config))
    assert words[:2] == ["dpps", "train"]
    again = parse_arguments(words[2:], "dpps train").resolved()
    assert again.fingerprint() == config.fingerprint()
    assert again.data_dir == config.data_dir


def test_command_says_only_what_matters() -> None:
    assert command(TrainConfig(out=Path("x"), overwrite=True).resolved()) == "dpps train"
    assert command(TrainConfig(epsilon=3.0, epochs=2).resolved()) == "dpps train --epochs 2"


# Long runs and large networks


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes(values: list[float]) -> None:
    points = dict(enumerate(values))
    kept = thinned(points)
    assert {0, len(values) - 1} <= set(kept)
    assert len(kept) <= KEPT_POINTS + 4
    assert {min(values), max(values)} <= {points[at] for at in kept}
    assert len(values) > KEPT_POINTS or kept == list(points)


def test_a_long_run_stays_small(stories: dict[str, Story]) -> None:
    story = stories["node-swap"]
    random = np.random.default_rng(0).lognormal(size=(30_000, 5))
    rounds = [
        RoundLog(t, *map(float, row), 1.0, watched={"paper": float(row[0])}) for t, row in enumerate(random)
    ]
    long = dataclasses.replace(story, rounds=rounds, spent=[(t, t + 1.0) for t in range(30_000)])
    page = render([long, dataclasses.replace(long, name="other"), dataclasses.replace(long, name="third")])
    assert len(page.encode()) < 2_000_000
    assert len(render([long]).encode()) < 500_000


def shown(story: Story, topology: dpps.Topology) -> dict[str, Any]:
    return network(dataclasses.replace(story, topology=topology))


def test_network_is_the_topologys(stories: dict[str, Story]) -> None:
    topology = dpps.Exponential(10)
    drawn = shown(stories["record"], topology)
    assert len(drawn["phases"]) == topology.period
    for t, phase in enumerate(drawn["phases"]):
        dense = topology.weights(t).dense()
        np.fill_diagonal(dense, 0)
        rebuilt = np.zeros_like(dense)
        for sender, receiver, weight in phase["edges"]:
            rebuilt[receiver, sender] = weight
        np.testing.assert_allclose(rebuilt, dense, rtol=1e-3)


def test_network_of_many_nodes_is_thinned_and_says_so(stories: dict[str, Story]) -> None:
    drawn = shown(stories["record"], dpps.Complete(300))
    assert 0 < len(drawn["phases"][0]["edges"]) <= SHOWN_EDGES
    assert "too many links" in drawn["note"]


def test_absent_nodes_are_marked(stories: dict[str, Story]) -> None:
    story = stories["none"]
    drawn = network(story)
    for t, phase in enumerate(drawn["phases"]):
        present = story.topology.present(t)
        assert phase["away"] == ([] if present is None else [k for k in range(5) if not present[k]])
    assert any(phase["away"] for phase in drawn["phases"])
    assert "never repeats" in drawn["note"]


# Several runs


def test_comparison(runs: dict[str, Path], pages: dict[str, Path]) -> None:
    page = pages["comparison"].read_text()
    data = data_of(page)
    accuracy = next(chart for chart in data["charts"] if chart["key"] == "accuracy")
    assert [series["name"] for series in accuracy["series"]] == list(runs)
    assert accuracy["series"][2]["y"][1] is None  # one epoch less
    assert len(data["networks"]) == 2
    differ = page.split("Where the configurations differ")[1].split("<details>")[0]
    assert ">unit<" in differ
    assert ">data<" not in differ
    assert page.count("dpps train") == 3


def test_runs_of_the_same_name_are_told_apart(runs: dict[str, Path], tmp_path: Path) -> None:
    for place in ("a", "b"):
        shutil.copytree(runs["none"], tmp_path / place / "run")
    page = page_of(tmp_path / "a" / "run", tmp_path / "b" / "run", out=tmp_path / "page.html")
    assert [series["name"] for series in data_of(page)["charts"][0]["series"]] == ["a/run", "b/run"]
    assert "All options are the same" in page


def test_names_cannot_break_the_page(runs: dict[str, Path], tmp_path: Path) -> None:
    evil = tmp_path / "<b onload=x>&'\""
    shutil.copytree(runs["none"], evil)
    page = page_of(evil, runs["node-swap"], out=tmp_path / "page.html")
    assert "<b onload" not in page
    assert data_of(page)["charts"][0]["series"][0]["name"] == evil.name


# Runs from Python


def test_report_of_a_run_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(60, 4), torch.randint(3, (60,))
    nodes = [TensorDataset(x[k::3], target[k::3]) for k in range(3)]
    learning = dpps.PartPSP(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        shared=["0"],
        topology=dpps.Ring(3),
        privacy=dpps.NodeSwap(budget=5),
        batch_size=5,
        seed=1,
        watch={"by the paper": dpps.Paper(0.8, 0.5)},
        track_real=True,
    )
    run = learning.fit(nodes, epochs=2, test=TensorDataset(x, target))
    path = report.from_run(run, tmp_path / "run.html")
    page = path.read_text(encoding="utf-8")
    drawn = {chart["key"]: chart for chart in data_of(page)["charts"]}
    assert [s["name"] for s in drawn["sensitivity"]["series"]] == ["certified", "real", "by the paper"]
    assert drawn["epsilon"]["series"][0]["y"][-1] == pytest.approx(run.privacy.epsilon)
    assert "started from Python" in page


# Distributed runs


def test_distributed_run(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Rank 0 writes the summary of all; every process has records of its own, and one has paid more."""
    out = tmp_path / "out"
    for rank in (10, 9):
        shutil.copytree(copied("node-swap"), out / f"rank-{rank}")
        shutil.rmtree(tmp_path / "node-swap")
    ledger = out / "rank-10" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([*lines, *lines[1:3]]))
    summary = json.loads((out / "rank-9" / "summary.json").read_text())
    summary |= {
        "test_accuracy": None,
        "accuracy_by_epoch": [],
        "accuracy_by_node": [],
        "bytes_sent_by_rank": [1] * 3,
    }
    (out / "summary.json").write_text(json.dumps(summary))
    story = read_folder(out, "run")
    assert story.part == "rank-9"
    assert story.fresh_noise
    assert story.spent[0][1] == pytest.approx(2 * story.rounds[0].epsilon)
    assert story.command is not None
    assert story.command.startswith("dpps launch --nproc 3 --out again --nodes 5")
    page = render([story])
    assert "Mean over the nodes of rank-9" in page
    assert "not told by the nodes" in page
    (out / "summary.json").unlink()  # as on the machine of another rank
    assert read_folder(out, "run").accuracy == read_folder(out / "rank-9", "run").accuracy is not None


# Runs that are not whole


def test_unfinished_run_is_shown_as_such(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("node-swap")
    finished = read_folder(folder, "run")
    (folder / "summary.json").unlink()
    lines = (folder / "rounds.csv").read_text().splitlines()
    (folder / "rounds.csv").write_text(
        "\n".join(lines[:5]) + "\n4,0.1,0.2,0.2,0.1,5000.0,1.5"
    )  # killed while writing
    story = read_folder(folder, "run")
    assert len(story.rounds) == 4
    assert story.privacy.epsilon == pytest.approx(
        finished.privacy.epsilon
    )  # the ledger has all that was sent
    assert "This run is unfinished" in page_of(folder, out=tmp_path / "page.html")


def test_unfinished_run_takes_accuracy_from_its_checkpoint(copied: Callable[[str], Path]) -> None:
    folder = copied("node-swap")
    (folder / "summary.json").unlink()
    kept = folder / "checkpoint" / "round-000000004"
    kept.mkdir(parents=True)
    rounds = [[0, 1.0, 2.0, 2.0, 0.1, 5.0, 1.5, 100, {"paper": 3.0}]]
    (kept / "meta.json").write_text(
        json.dumps({"accuracy_by_epoch": [12.5], "seconds": {}, "rounds": rounds})
    )
    story = read_folder(folder, "run")
    assert story.accuracy_by_epoch == [12.5]
    assert story.rounds[0].watched == {"paper": 3.0}


def test_what_is_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run: it has no run\.json"):
        report.write([tmp_path / "nothing"], tmp_path / "page.html")
    with pytest.raises(UsageError, match="no run to report"):
        report.write([], tmp_path / "page.html")
    folder = copied("none")
    with pytest.raises(UsageError, match="named twice"):
        report.write([folder, folder], tmp_path / "page.html")
    with pytest.raises(RunError, match="cannot be written"):
        report.write([folder], tmp_path / "no" / "such" / "page.html")
    (folder / "rounds.csv").write_text("round,real,estimated,used,scale,epsilon,loss\n")
    with pytest.raises(UsageError, match="no complete round yet"):
        report.write([folder], tmp_path / "page.html")
    (folder / "rounds.csv").unlink()
    with pytest.raises(UsageError, match="nothing to show yet"):
        report.write([folder], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("summary.json", '{"a":', "summary.json is damaged"),
        ("summary.json", "[]", "summary.json is damaged"),
        (
            "rounds.csv",
            "round,real,estimated,used,scale,epsilon,loss\n0,,x,,,,\n1,,,,0,0,1\n",
            "damaged at line 2",
        ),
        ("ledger.jsonl", "{}\n{}\n", "ledger.jsonl is damaged"),
    ],
)
def test_damaged_files(
    copied: Callable[[str], Path], tmp_path: Path, file: str, text: str, message: str
) -> None:
    folder = copied("node-swap")
    (folder / file).write_text(text)
    with pytest.raises(RunError, match=message):
        report.write([folder], tmp_path / "page.html")


def test_options_of_another_version(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("none")
    summary = json.loads((folder / "summary.json").read_text())
    summary["config"]["warp"] = 9
    (folder / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UsageError, match="option warp is unknown"):
        report.write([folder], tmp_path / "page.html")


# The command


def test_command_line(
    copied: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.chdir(tmp_path)
    folder, other = copied("none"), copied("node-swap")
    assert cli.main(["report", str(folder)]) == cli.DONE
    assert str(folder / "report.html") in capsys.readouterr().out
    assert (folder / "report.html").exists()
    assert opened == []
    assert cli.main(["report", str(folder), str(other), "--open"]) == cli.DONE
    assert opened == [(tmp_path / "comparison.html").as_uri()]
    assert cli.main(["report", str(folder), "--out", "mine.html"]) == cli.DONE
    assert (tmp_path / "mine.html").exists()
    assert cli.main(["report", "nowhere"]) == cli.WRONG
    assert "nowhere is not a run" in capsys.readouterr().err


# Colours


def palette(theme: int) -> dict[str, str]:
    """The colours of the light (0) or dark (1) theme, from the style sheet."""
    style = (Path(report.__file__).parent / "style.css").read_text()
    return {
        name: pair[theme] for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)
    }


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dim, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_contrast(theme: int) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    colours = palette(theme)
    written = ["ink", "soft", "warn", *(f"t{k}" for k in range(6))]
    pairs = [(name, back) for name in written for back in ("panel", "page")] + [
        ("warn", "warn-back"),
        ("ink", "warn-back"),
    ]
    poor = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in poor.items() if ratio < 4.5} == {}


# In Chromium


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if programs() is None:
        reason = "chromium and chromedriver are not installed: apt-get install chromium chromium-driver"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


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


@pytest.mark.parametrize("name", ["record", "node-swap", "none", "comparison"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_every_chart_is_drawn(
    chromium: Browser, pages: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    open_page(chromium, pages[name], width, dark=dark)
    expected = {c["key"]: len(c["series"]) for c in data_of(pages[name].read_text())["charts"]}
    drawn = chromium.run(
        """return Object.fromEntries([...document.querySelectorAll("figure.chart")].map(figure => [figure.id,
             [...figure.querySelectorAll("svg path.series")].filter(p => p.getTotalLength() > 0 ||
                p.parentNode.querySelector("circle")).length]))"""
    )
    assert drawn == expected
    points = chromium.run(
        'return document.querySelector("#loss path.series").getAttribute("d").split(/[ML]/).length - 1'
    )
    assert points >= 8
    assert "NaN" not in chromium.run(
        "return [...document.querySelectorAll('svg')].map(s => s.outerHTML).join('')"
    )
    assert chromium.run("return document.documentElement.scrollWidth") <= width
    chromium.picture(PICTURES / f"{name}-{width}{'-dark' if dark else ''}.png")
    assert_no_complaint(chromium)


def test_nothing_is_written_outside_its_drawing(chromium: Browser, pages: dict[str, Path]) -> None:
    for width in (1280, 360):
        open_page(chromium, pages["node-swap"], width)
        outside = chromium.run(
            """return [...document.querySelectorAll(".plot text")].filter(text => {
                 const box = text.getBoundingClientRect(), around = text.closest("figure").getBoundingClientRect();
                 return box.left < around.left || box.right > around.right;
               }).map(text => text.textContent)"""
        )
        assert outside == []


EDGES = 'return [...document.querySelectorAll("#network-0 .edge")].map(e => e.dataset.edge).sort()'


def test_slider_shows_the_next_phase(chromium: Browser, pages: dict[str, Path]) -> None:
    open_page(chromium, pages["node-swap"])
    topology = dpps.Exponential(5)
    for t in (0, 1, 2):
        weights = topology.weights(t)
        links = zip(weights.senders.tolist(), weights.receivers.tolist(), strict=True)
        assert chromium.run(EDGES) == sorted(f"{s}-{r}" for s, r in links if s != r)
        title = chromium.run('return document.querySelector("#network-0 output").textContent')
        assert title.startswith(f"phase {t + 1} of 3")
        chromium.type("#phase-0", RIGHT)
    assert_no_complaint(chromium)


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
    chromium: Browser, pages: dict[str, Path], stories: dict[str, Story]
) -> None:
    open_page(chromium, pages["node-swap"])
    story = stories["node-swap"]
    tip = (
        'const tip = document.querySelector("#sensitivity .tip"); return tip.hidden ? null : tip.textContent'
    )
    assert chromium.run(tip) is None
    chromium.hover("#sensitivity .plot")
    assert "certified" in chromium.run(tip)
    chromium.type("#sensitivity .plot", END + LEFT)
    last = story.rounds[-2]
    assert chromium.run(tip).startswith(f"round {last.round}")
    spoken = chromium.run(
        'return document.querySelector("#sensitivity .plot").getAttribute("aria-valuetext")'
    )
    assert f"certified {last.estimated:.4g}" in spoken
    assert f"real {last.real:.4g}" in spoken
    chromium.hover("#network-0 g[role=button]")
    assert "Node 0 sends to 1 (0.5)" in chromium.run(
        'return document.querySelector("#network-0 .reading").textContent'
    )
    chromium.type("#network-0 g[role=button]", DOWN)
    assert chromium.run('return document.activeElement.getAttribute("aria-label")').startswith(
        "Node 1 sends to 2"
    )
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


def test_long_runs_are_drawn(chromium: Browser, stories: dict[str, Story], tmp_path: Path) -> None:
    story = stories["node-swap"]
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
    page.write_text(render([dataclasses.replace(story, rounds=rounds, topology=dpps.Complete(200))]))
    open_page(chromium, page)
    assert chromium.run('return document.querySelectorAll("#network-0 .edge").length') > 100
    assert "NaN" not in chromium.run("return document.querySelector('#loss svg').outerHTML")
    assert_no_complaint(chromium)
