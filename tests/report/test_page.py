"""The page and the card: what is on them, for whom, and that nothing can break them."""

import re
import shutil
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from jinja2 import UndefinedError
from torch import nn
from torch.utils.data import TensorDataset

import dpps
from dpps import report
from dpps.errors import UsageError
from dpps.report import fill, meaning, model_card, read_run, render
from dpps.report.page import _environment
from dpps.runs import RoundLog
from dpps.runs.baselines import gains
from tests.support.learning import batch_norm_model, tiny, toy_data
from tests.support.report import changed, with_privacy


def page_of(*folders, out):
    return report.write(folders, out).read_text(encoding="utf-8")


def text_of(html):
    """The words without their tags, with single spaces."""
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def section(page, name):
    """The part of a page with this id."""
    return page.split(f'id="{name}"')[1].split("</section>", maxsplit=1)[0].split("</figure>", maxsplit=1)[0]


def rows_of(html):
    return [text_of(row) for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL)]


def unprinted(html):
    """What the style sheet keeps off paper."""
    return " ".join(
        re.findall(r'class="[^"]*unprinted[^"]*".*?(?=<section|<figure|</dl>|$)', html, re.DOTALL)
    )


# What is on a page


def test_page_needs_nothing_else_and_runs_nothing(pages):
    for path in pages.values():
        page = path.read_text()
        assert re.findall(r"https?://[^\"' ]+", page) == []
        assert not re.search(r"<(script|link|img|iframe)|\ssrc=|\shref=|\son\w+=|@import|url\((?!#)", page)
        assert "default-src 'none'" in page
        assert len(page.encode()) < 100_000


def test_headline_numbers_and_the_statement_word_for_word(runs, pages):
    for name, run in runs.items():
        page = pages[name].read_text()
        assert f"<strong>{run.summary.test_accuracy:.1f} %</strong>" in page
        assert f"<strong>{run.summary.rounds}</strong>" in page
        said = "".join(text_of(section(page, "privacy")).split())
        assert "".join(run.summary.privacy.statement.split()) in said
        assert "".join(meaning(run).split()) in said


def test_badges_stand_next_to_epsilon(runs):
    badge = '<em class="badge">simulation'
    card = render([runs["record"]]).split("<dt>Privacy spent</dt>")[1].split("</div>")[0]
    assert badge in card
    assert badge not in render([with_privacy(runs["record"], simulated=False)])
    assert render([*runs.values()]).count(badge) == 2


def test_a_long_run_stays_small(runs):
    random = np.random.default_rng(0).lognormal(size=(30_000, 5))
    log = [
        RoundLog(t, *map(float, row), 1.0, watched={"paper": float(row[0])}) for t, row in enumerate(random)
    ]
    long = replace(runs["node-swap"], log=log)
    page = render([long, replace(long, name="other"), replace(long, name="third")])
    assert len(page.encode()) < 2_000_000
    assert len(render([long]).encode()) < 500_000


def test_report_of_a_run_in_memory(tmp_path):
    torch.manual_seed(0)
    x, target = torch.randn(60, 4), torch.randint(3, (60,))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    run = dpps.Run(
        dpps.PartPSP(model, shared=["0"], batch_size=5),
        [TensorDataset(x[k::3], target[k::3]) for k in range(3)],
        topology=dpps.Ring(3),
        privacy=dpps.NodeSwap(budget=5),
        test=TensorDataset(x, target),
        seed=1,
        watch={"by the paper": dpps.Paper(0.8, 0.5)},
        track_real=True,
    ).fit(epochs=2)
    page = report.from_run(run, tmp_path / "run.html").read_text(encoding="utf-8")
    legend = section(page, "sensitivity").split('class="legend"')[1].split("</div>")[0]
    assert all(name in legend for name in ("certified", "real", "by the paper"))
    assert run.privacy.epsilon is not None
    assert f"{run.privacy.epsilon:,.0f}" in section(page, "epsilon")
    assert "dpps train" not in page


# For a board: what joining gained, by name, with its uncertainty


def test_every_member_has_a_row_with_its_name_and_its_interval(hospitals):
    rows = rows_of(section(render([hospitals]), "joining"))[1:]
    assert hospitals.summary.node_names is not None
    assert [row.startswith(name) for row, name in zip(rows, hospitals.summary.node_names, strict=False)] == [
        True
    ] * 5
    assert "+20.0 ± 3.9" in rows[0]
    assert "70.0 %" in rows[0]
    assert "90.0 %" in rows[0]
    unclear = text_of(section(render([hospitals]), "joining")).count("either way")
    assert unclear == 4  # the four whose interval contains 0
    assert len(rows) == 7  # and the mean over nodes, and all examples pooled
    assert "+4.9 ± 3.3" in rows[5]
    assert "+4.8 ± 3.1" in rows[6]


def test_all_examples_together_come_before_the_mean_over_nodes(hospitals):
    _, (pooled, mean) = gains(hospitals.summary)
    assert pooled.both.value == pytest.approx(0.049)
    assert mean.both.value == pytest.approx(0.048)
    assert mean.private.value == pytest.approx(0.748)
    assert mean.alone.value == pytest.approx(0.7)


def test_names_instead_of_numbers_everywhere(hospitals):
    for text in (render([hospitals]), model_card(hospitals)):
        assert not re.search(r"\bnode \d", text_of(text))
        assert "Westmead, St-Mary, Royal-General, Charité, Hôtel-Dieu" in text
    nodes = text_of(section(render([hospitals]), "nodes"))
    assert all(name in nodes for name in hospitals.summary.node_names or ())
    assert "Westmead" in section(render([hospitals]), "labels")


def test_members_of_a_federation_are_named_and_own_one_row(hospitals):
    one = changed(
        hospitals,
        members=hospitals.summary.node_names,
        node_names=["Charité"],
        accuracy_by_node=[71.0],
        own_accuracy_by_node=[],
        baselines=None,
        comparisons=None,
        scores=None,
        split=None,
    )
    page = render([replace(one, command=None)])
    assert "Westmead, St-Mary, Royal-General, Charité, Hôtel-Dieu" in page
    assert rows_of(section(page, "nodes"))[1:] == ["Charité 71.0 %"]
    for text in (page, model_card(replace(one, command=None))):
        assert "dpps federation create" in text


def test_many_nodes_are_not_all_listed(hospitals):
    many = changed(
        hospitals,
        comparisons=None,
        scores=None,
        node_names=None,
        accuracy_by_node=[50.0] * 900,
        own_accuracy_by_node=[],
    )
    rows = rows_of(section(render([many]), "nodes"))
    assert len(rows) == 42
    assert "900" in rows[-1]


def test_without_baselines_nothing_is_said_about_joining(runs):
    assert 'id="joining"' not in render([runs["record"]])


# What may leave: on paper, and on the card


def test_what_a_board_asks_for_is_printed_and_what_nobody_asked_for_is_not(hospitals):
    page = render([hospitals])
    away = unprinted(page)
    for name in ("joining", "privacy", "accuracy", "epsilon"):
        assert f'id="{name}"' not in away
    for name in ("loss", "nodes", "labels"):
        assert f'id="{name}"' in away


@pytest.mark.parametrize(
    ("model", "shared", "passed_on"),
    [(tiny(), "all", True), (tiny(), ["layer1"], False), (batch_norm_model(), "all", False)],
)
def test_accuracy_with_parts_that_were_not_noised_is_not_passed_on(model, shared, passed_on):
    """Unit contribution: the statement says that accuracies computed with local parameters must not be published."""
    run = dpps.Run(
        dpps.PartPSP(model, shared, batch_size=10),
        toy_data(3),
        topology="ring",
        privacy=dpps.Contribution(epsilon=8.0, clip=1.0),
        test=toy_data(1, seed=9)[0],
        seed=0,
    ).fit(epochs=2)
    found = read_run(run, "run")
    assert (f"{found.summary.test_accuracy:.1f} % " in model_card(found)) == passed_on
    page = render([found])
    assert ('<div class="card unprinted"><dt>Accuracy' in page) != passed_on
    assert ('<figure class="chart" id="accuracy">' in page) == passed_on
    assert run.summary.own_statistics == isinstance(model, nn.Sequential)


def test_gains_of_models_that_were_not_noised_are_not_printed(hospitals):
    hidden = with_privacy(changed(hospitals, local_parameters=5), unit="contribution")
    assert '<section class="wide unprinted" id="joining">' in render([hidden])
    assert '<section class="wide" id="joining">' in render([hospitals])
    compared = render([hidden, replace(hidden, name="other")])
    assert compared.count('<span class="unprinted">74.8 %') == 0
    assert compared.count(f'<span class="unprinted">{hospitals.summary.test_accuracy:.1f} %') == 2


def test_card_has_the_statement_word_for_word_and_what_epsilon_means(runs):
    for run in runs.values():
        text = " ".join(model_card(run).replace("**", "").split())
        assert " ".join(run.summary.privacy.statement.split()) in text
        assert meaning(run) in text


def test_card_says_what_the_epsilon_is_worth(runs):
    card = model_card(runs["record"])
    assert "**epsilon 3, delta 1e-5**" in card
    assert "**Simulation:" in card
    assert "**No meaningful protection.**" in model_card(runs["node-swap"])
    assert "**No protection.**" in model_card(runs["none"])
    secure = with_privacy(runs["record"], simulated=False)
    assert "Simulation" not in model_card(secure).split("Protected")[0]
    assert "unfinished" in model_card(replace(secure, finished=False))


def test_card_leaves_out_what_was_not_noised(runs, hospitals):
    card = model_card(runs["record"])
    assert f"{runs['record'].summary.test_accuracy:.1f} %" in card
    assert "loss" not in card.split("## Privacy")[0]
    for number in ("74.8", "76.3", "70.0", "20.0"):  # own accuracy, baselines, gains
        assert number not in model_card(hospitals)


def test_card_of_a_folder(folders, tmp_path):
    written = report.write_card(folders["none"], tmp_path / "card.md")
    assert written.read_text(encoding="utf-8").startswith("# Model card: mnist-mini, mlp, partpsp")
    assert written.stat().st_mode & 0o077 == 0
    with pytest.raises(UsageError, match=r"run\.json"):
        report.write_card(tmp_path, tmp_path / "card.md")


# Several runs


def test_comparison(runs, pages, hospitals):
    page = pages["comparison"].read_text()
    rows = rows_of(page.split('class="cards runs"')[1].split("</table>")[0])[1:]
    assert [row.split()[0] for row in rows] == list(runs)
    differ = section(page, "differences").split("<details>")[0]
    assert ">unit<" in differ
    assert ">data<" not in differ
    assert page.count("<span>dpps train") == 3
    own = changed(hospitals, "own", test_accuracy=None, accuracy_by_epoch=[])
    rows = rows_of(render([own, runs["none"]]).split("</table>")[0])[1:]
    assert "74.8 %" in rows[0]
    assert "76.3 % 70.0 %" in rows[0]  # no privacy, alone
    assert "- -" in rows[1]


def test_the_same_statement_is_written_once(runs):
    one = runs["record"]
    other = one.summary.privacy.statement.replace("epsilon 3", "epsilon 4")
    found = render([one, with_privacy(one, "four", statement=other, epsilon=4.0), runs["none"]])
    privacy = section(found, "privacy")
    assert privacy.count("<b>Protected:</b>") == 1
    assert "<h3>record, four</h3>" in privacy
    assert "<dt>four</dt><dd>epsilon 4" in privacy
    assert privacy.count(meaning(one)) == 1


def test_runs_of_the_same_name_are_told_apart(folders, tmp_path):
    for place in ("a", "b"):
        shutil.copytree(folders["none"], tmp_path / place / "run")
    page = page_of(tmp_path / "a" / "run", tmp_path / "b" / "run", out=tmp_path / "page.html")
    assert "a/run: " in text_of(section(page, "loss"))
    assert "b/run: " in text_of(section(page, "loss"))
    assert "<table" not in section(page, "differences").split("<details>")[0]


def test_names_cannot_break_the_page(folders, hospitals, tmp_path):
    evil = tmp_path / "<b onload=x>&'\""
    shutil.copytree(folders["none"], evil)
    page = page_of(evil, folders["node-swap"], out=tmp_path / "page.html")
    assert "<b onload" not in page
    assert evil.name in unescape(section(page, "loss"))
    assert "<b onload" not in render([changed(hospitals, node_names=[evil.name, "b", "c", "d", "e"])])


# Colours, and values that read well


def palette(theme):
    """The colours of the light (0) or dark (1) theme, from the style sheet."""
    style = (Path(report.__file__).parent / "style.css").read_text()
    return {
        name: pair[theme] for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w+), (#\w+)\)", style)
    }


def luminance(colour):
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dim, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", [0, 1])
def test_lines_and_words_can_be_seen(theme):
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    colours = palette(theme)
    written = ["ink", "soft", "warn", *(f"t{k}" for k in range(6))]
    pairs = [(name, back) for name in written for back in ("panel", "page")]
    pairs += [("warn", "warn-back"), ("ink", "warn-back")]
    ratios = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}


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
        ("{{ words.small(x) }}", 2.5e-4, "0.00025"),
        ("{{ x | options | join('|') }}", "dpps train --seed 3 --quiet", "dpps train|--seed 3|--quiet"),
    ],
)
def test_values_for_people(template, value, text):
    assert _environment().from_string(template).render(x=value) == text


def test_pages_are_escaped_and_a_missing_fact_is_an_error():
    with pytest.raises(UndefinedError):
        fill("run.html")
    assert _environment().autoescape("page.html")
    assert not _environment().autoescape("card.md")
