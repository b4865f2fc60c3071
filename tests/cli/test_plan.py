"""`dpps plan`."""

import json

import pytest

from dpps.cli import main


def test_plan_answers_both_ways(capsys):
    assert main(["plan", "--epsilon", "3", "--json"]) == 0
    forward = json.loads(capsys.readouterr().out)
    assert main(["plan", "--noise-multiplier", str(forward["noise_multiplier"]), "--json"]) == 0
    back = json.loads(capsys.readouterr().out)
    assert back["epsilon"] == pytest.approx(3, rel=2e-3)
    assert main(["plan", "--unit", "node-swap", "--budget", "5", "--parameters", "7850"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1.897" in shown  # 0.55 (1 + 2 x 0.78 x 0.001 x 7850 / 5)
    assert "no meaningful protection" in shown
    assert "sum of rounds, no guarantee" in shown
    assert "total" not in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--local-steps", "2"], "one step per round"),
        (["--algorithm", "pedfl"], "the unit record has no bound"),
        (["--model", "resnet18"], "BatchNorm mixes examples"),
        (["--unit", "node-swap", "--mixes", "2"], "hides rows"),
    ],
)
def test_what_cannot_be_trained_is_not_planned(capsys, options, says):
    assert main(["plan", *options]) == 2
    assert says in capsys.readouterr().err


def test_every_model_has_a_suggestion_with_reasons(capsys):
    assert main(["plan", "--model", "cnn", "--shared", "all", "--noise-multiplier", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["suggested"]
    assert (found["batch_size"], found["epochs"], found["clip"]) == (100, 12, 1.0)
    assert "moves a parameter by about 0.1" in found["reasons"][-1]


def test_plan_states_what_it_computes_and_no_accuracy_measured_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An accuracy measured at another commit is no answer about this one; the signal-to-noise ratio of the run is."""
    options = ["--data", "mnist", "--features", "scattering", "--model", "linear", "--shared", "all"]
    assert main(["plan", *options, "--noise-multiplier", "5.3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "expected_accuracy" not in found
    assert found["signal_to_noise_of_run"] == pytest.approx(
        found["signal_to_noise_averaged"] * found["rounds"] ** 0.5
    )
