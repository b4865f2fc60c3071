"""scripts/: every setting is one that `dpps train` takes, and variants do what they are called."""

import argparse
import os
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paper import solve_nothing
from tests.support.scripts import FOLDER, load_script

GIVEN = argparse.Namespace(data=None, epsilon=[3.0], seeds=1)
NEED_DATA = {"opacus"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("accuracy")


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.py")))
def test_every_script_can_be_imported(name: str) -> None:
    load_script(name)


def test_hospitals_are_trained_by_the_rule_and_around_it(tmp_path: Path) -> None:
    hospitals = load_script("hospitals")
    rule = hospitals.write(hospitals.wine(tmp_path), "wine", tmp_path).but(epsilon=3.0)
    found = hospitals.train(rule.but(seed=1))["found"]
    assert set(found) == {"accuracy", "log-loss"} | {
        f"{m}, mean over hospitals" for m in ("accuracy", "log-loss")
    }
    assert found["accuracy"] > 0.8
    clips = [cell.config().clip / rule.config().clip for cell in hospitals.around(rule).values()]
    assert sorted(clips) == pytest.approx([0.5] * 3 + [1.0] * 2 + [2.0] * 3, rel=1e-2)


def test_every_setting_is_a_valid_configuration(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    solve_nothing(monkeypatch)
    for name, settings in script.GROUPS.items():
        if name in NEED_DATA and not os.environ.get("DPPS_DATA"):
            continue
        found = list(settings(GIVEN))
        assert len({(setting, epsilon) for setting, epsilon, _ in found}) == len(found)
        if name == "grid":  # for each table the rule, and what it is compared with
            assert len(found) == len(script.TABLES) * (1 + 24)
        elif name != "opacus":  # options that follow from each other, all alike
            changes = (
                {"features": "none"} if name == "public" else {}
            )  # its network comes with the extra backbone
            assert all(cell.but(**changes).config().nodes == cell["nodes"] for *_, cell in found)


def test_the_grid_is_measured_on_the_shipped_code(script: ModuleType) -> None:
    """On a complete network: all rows are the mean."""
    *_, rule = next(script.grid(GIVEN))  # the others need much noise solved for
    result = script.train(rule)
    assert result["rounds"] == rule["epochs"] * (45 // rule["batch_size"])
    assert result["accuracy"] > 85


def test_unannounced_absences_leave_noise_in_the_mean(script: ModuleType) -> None:
    cells = {name: cell for name, _, cell in script.absences(GIVEN)}
    announced, unannounced = (
        script.train(cells[f"pairs, {kind}, away 0.3"].but(epochs=3))["accuracy"]
        for kind in ("announced", "unannounced")
    )
    assert announced > unannounced


def test_options_of_train_change_every_setting(script: ModuleType) -> None:
    assert script._changes(["--momentum", "0", "--batch-size", "1/32"]) == {
        "momentum": 0.0,
        "batch_size": "1/32",
    }
