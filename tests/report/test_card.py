"""The model card."""

import dataclasses
from pathlib import Path

import pytest
from torch import nn

import dpps
from dpps import report
from dpps.report import Accuracy, RunRecord, model_card, read_run, render
from tests.support.learning import batch_norm_model, tiny, toy_data


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
