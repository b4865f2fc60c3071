"""The page and the card."""

import dataclasses
import json
import re
import shutil
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jinja2 import UndefinedError
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps import report
from dpps.report import Accuracy, RunRecord, badges, fill, model_card, read_run, render, small, statement
from dpps.report.page import _environment
from dpps.runs import RoundLog
from tests.support.learning import batch_norm_model, tiny, toy_data

# What the page says


def page_of(*folders: Path, out: Path) -> str:
    return report.write(folders, out).read_text(encoding="utf-8")


def readings(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return {chart["key"]: chart for chart in json.loads(found[1])}


def test_page_needs_nothing_else(pages: dict[str, Path]) -> None:
    page = pages["node-swap"].read_text()
    assert re.findall(r"https?://[^\"' ]+", page) == []
    assert not re.search(r"<(link|img|iframe)|\ssrc=|\shref=|@import|url\((?!#)", page)
    assert "default-src 'none'" in page
    assert len(page.encode()) < 100_000


def test_headline_numbers(runs: dict[str, Path], pages: dict[str, Path]) -> None:
    for name in ("record", "node-swap"):
        summary = json.loads((runs[name] / "summary.json").read_text())
        page = pages[name].read_text()
        assert f"<strong>{summary['test_accuracy']:.1f} %</strong>" in page
        assert f"<strong>{summary['rounds']}</strong>" in page
        assert ("meaningful" in page.split("<dt>Privacy")[1].split("</div>")[0]) == (
            summary["privacy"]["epsilon"] > 20
        )
        words = re.sub(r"<.*?>", "", page.split('id="privacy">')[1].split("</h2>")[1].split("</section>")[0])
        said = summary["privacy"]["statement"]
        assert "".join(unescape(words).split()) == "".join(said.split())


def test_the_epsilon_card_says_that_a_simulation_protects_nobody(records: dict[str, RunRecord]) -> None:
    badge = '<em class="badge">simulation: messages not private</em>'
    card = render([records["record"]]).split("<dt>Privacy spent</dt>")[1].split("</div>")[0]
    assert badge in card
    assert badge not in render([dataclasses.replace(records["record"], private_noise=True)])
    assert badges(records["none"]) == ["no protection"]
    assert render([*records.values()]).count(badge) == 2


def test_own_data_are_named_in_the_title(records: dict[str, RunRecord]) -> None:
    page = render([dataclasses.replace(records["none"], data="hospitals")])
    assert "<h1>hospitals, mlp, partpsp " in page


def test_what_is_for_the_nodes_own_eyes_is_marked(records: dict[str, RunRecord]) -> None:
    page = render([records["record"]])
    mark = "own eyes"
    for part in ('id="loss"', 'id="nodes"', "own test data", 'id="labels"'):
        assert mark in unescape(page.split(part)[1].split("</p>")[0].split("</dd>")[0]), part
    assert mark not in unescape(page.split('id="epsilon"')[1].split("</p>")[0])


def test_baselines_are_rows(records: dict[str, RunRecord]) -> None:
    baselines = {"no privacy": Accuracy(91.5), "alone": Accuracy(40.0, by_node=[30.0, 50.0])}
    page = render([dataclasses.replace(records["record"], baselines=baselines)])
    table = page.split('id="joining"')[1].split("</section>")[0]
    mean = records["record"].accuracy.mean
    assert mean is not None
    assert f"{mean - 91.5:+.1f} points" in table
    assert "30.0 % to 50.0 %" in table
    assert "guarantee" in table
    compared = render([dataclasses.replace(records["record"], baselines=baselines), records["none"]])
    assert '<td data-head="no privacy" class="unprinted">91.5 %</td>' in compared
    assert '<td data-head="no privacy" class="unprinted nothing">-</td>' in compared
    assert 'id="joining"' not in render([records["record"]])


def test_a_long_run_stays_small(records: dict[str, RunRecord]) -> None:
    random = np.random.default_rng(0).lognormal(size=(30_000, 5))
    rounds = [
        RoundLog(t, *map(float, row), 1.0, watched={"paper": float(row[0])}) for t, row in enumerate(random)
    ]
    long = dataclasses.replace(records["node-swap"], rounds=rounds)
    page = render([long, dataclasses.replace(long, name="other"), dataclasses.replace(long, name="third")])
    assert len(page.encode()) < 2_000_000
    assert len(render([long]).encode()) < 500_000


def test_statement_is_cut_into_paragraphs() -> None:
    text = "Protected: you. Guarantee: epsilon 1. This run was a simulation. Not covered: me. Also not covered: him."
    parts = statement(text)
    assert [opening for opening, _ in parts] == [
        "Protected:",
        "Guarantee:",
        "",
        "Not covered:",
        "Also not covered:",
    ]
    assert " ".join(a + b for a, b in parts) == text


def test_comparison(runs: dict[str, Path], pages: dict[str, Path]) -> None:
    page = pages["comparison"].read_text()
    accuracy = readings(page)["accuracy"]
    assert [series["name"] for series in accuracy["series"]] == list(runs)
    assert accuracy["series"][2]["y"][1] == ""  # one epoch less
    differ = page.split('id="differences"')[1].split("<details>")[0]
    assert ">unit<" in differ
    assert ">data<" not in differ
    assert page.count("<span>dpps train") == 3


def test_the_same_statement_is_written_once(records: dict[str, RunRecord]) -> None:
    one = records["record"]
    privacy = dataclasses.replace(
        one.privacy, statement=one.privacy.statement.replace("epsilon 3", "epsilon 4")
    )
    runs = [one, dataclasses.replace(one, name="four", privacy=privacy), records["none"]]
    words = render(runs).split('id="privacy">')[1].split("</section>")[0]
    assert words.count("<b>Protected:</b>") == 1
    assert "<h3>record, four</h3>" in words
    assert "<dt>four</dt><dd> epsilon 4" in words


def test_runs_of_the_same_name_are_told_apart(runs: dict[str, Path], tmp_path: Path) -> None:
    for place in ("a", "b"):
        shutil.copytree(runs["none"], tmp_path / place / "run")
    page = page_of(tmp_path / "a" / "run", tmp_path / "b" / "run", out=tmp_path / "page.html")
    assert [series["name"] for series in readings(page)["loss"]["series"]] == ["a/run", "b/run"]
    assert "<table" not in page.split('id="differences"')[1].split("<details>")[0]


def test_names_cannot_break_the_page(runs: dict[str, Path], tmp_path: Path) -> None:
    evil = tmp_path / "<b onload=x>&'\""
    shutil.copytree(runs["none"], evil)
    page = page_of(evil, runs["node-swap"], out=tmp_path / "page.html")
    assert "<b onload" not in page
    assert readings(page)["loss"]["series"][0]["name"] == evil.name


def test_report_of_a_run_in_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(60, 4), torch.randint(3, (60,))
    nodes = [TensorDataset(x[k::3], target[k::3]) for k in range(3)]
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    run = dpps.Run(
        dpps.PartPSP(model, shared=["0"], batch_size=5),
        nodes,
        topology=dpps.Ring(3),
        privacy=dpps.NodeSwap(budget=5),
        test=TensorDataset(x, target),
        seed=1,
        watch={"by the paper": dpps.Paper(0.8, 0.5)},
        track_real=True,
    ).fit(epochs=2)
    path = report.from_run(run, tmp_path / "run.html")
    page = path.read_text(encoding="utf-8")
    drawn = readings(page)
    assert [s["name"] for s in drawn["sensitivity"]["series"]] == ["certified", "real", "by the paper"]
    assert run.privacy.epsilon is not None
    assert drawn["epsilon"]["series"][0]["y"][-1] == f"{run.privacy.epsilon:,.0f}"
    assert "dpps train" not in page


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


# The model card


def test_card_has_the_statement_word_for_word(records: dict[str, RunRecord]) -> None:
    for record in records.values():
        text = model_card(record).replace("**", "")
        assert " ".join(record.privacy.statement.split()) in " ".join(text.split())


def test_card_says_what_the_epsilon_is_worth(records: dict[str, RunRecord]) -> None:
    card = model_card(records["record"])
    assert "**epsilon 3, delta 1e-5**" in card
    assert "**Simulation:" in card
    assert "**No meaningful protection.**" in model_card(records["node-swap"])
    assert "**No protection.**" in model_card(records["none"])
    secure = dataclasses.replace(records["record"], private_noise=True)
    assert "Simulation" not in model_card(secure).split("Protected")[0]
    assert "unfinished" in model_card(dataclasses.replace(secure, finished=False))


def test_card_leaves_out_what_was_not_noised(records: dict[str, RunRecord]) -> None:
    record = records["record"]
    assert record.accuracy.own is not None
    card = model_card(record)
    assert f"{record.accuracy.mean:.1f} %" in card
    marked = dataclasses.replace(record, accuracy=dataclasses.replace(record.accuracy, own=12.34567))
    assert "12.3" not in model_card(marked)
    assert "loss" not in card.split("## Privacy")[0]


@pytest.mark.parametrize(
    ("model", "shared", "told"),
    [(tiny(), "all", True), (tiny(), ["layer1"], False), (batch_norm_model(), "all", False)],
)
def test_accuracy_with_parts_that_were_not_noised_is_not_passed_on(model, shared, told: bool) -> None:
    """Unit contribution: the statement says that accuracies computed with local parameters must not be published."""
    run = dpps.Run(
        dpps.PartPSP(model, shared, batch_size=10),
        toy_data(3),
        topology="ring",
        privacy=dpps.Contribution(epsilon=8.0, clip=1.0),
        test=toy_data(1, seed=9)[0],
        seed=0,
    ).fit(epochs=2)
    record = read_run(run, "run")
    card = model_card(record)
    assert (f"{record.accuracy.mean:.1f} % " in card) == told
    page = render([record])
    assert ('<div class="card unprinted"><dt>Accuracy' in page) != told
    assert ('<figure class="chart printed" id="accuracy">' in page) == told
    assert run.summary.own_statistics == isinstance(model, nn.Sequential)


def test_baselines_are_not_passed_on(records: dict[str, RunRecord]) -> None:
    card = model_card(dataclasses.replace(records["record"], baselines={"no privacy": Accuracy(91.5)}))
    assert card == model_card(records["record"])


def test_card_of_a_folder(runs: dict[str, Path], tmp_path: Path) -> None:
    written = report.write_card(runs["none"], tmp_path / "card.md")
    assert written.read_text(encoding="utf-8").startswith("# Model card: mnist-mini, mlp, partpsp")
    assert written.stat().st_mode & 0o077 == 0
    with pytest.raises(Exception, match=r"run\.json"):
        report.write_card(tmp_path, tmp_path / "card.md")


# The one writer of pages: everything is escaped, nothing is loaded, values read well


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [
        ("{{ x | number }}", None, "-"),
        ("{{ x | percent }}", 97.26, "97.3 %"),
        ("{{ x | size }}", 2_500_000, "2.5 MB"),
        ("{{ x | size }}", 12, "12 B"),
        ("{{ x | duration }}", 90.0, "90.0 s"),
        ("{{ x | duration }}", 7800.0, "2 h 10 min"),
        ("{{ x | setting }}", True, "yes"),
        ("{{ x | setting }}", 1e-5, "1e-5"),
        ("{{ x | options | join('|') }}", "dpps train --seed 3 --quiet", "dpps train|--seed 3|--quiet"),
    ],
)
def test_values_for_people(template: str, value: object, text: str) -> None:
    assert _environment().from_string(template).render(x=value) == text


def test_pages_are_escaped_and_a_missing_fact_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        fill("run.html")
    assert _environment().autoescape("page.html")
    assert not _environment().autoescape("card.md")
    assert small(2.5e-4) == "0.00025"
