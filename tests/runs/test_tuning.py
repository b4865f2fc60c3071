"""`dpps tune`: what is tried, what it costs, and that private data is not tuned on for nothing."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dpps.errors import RunError, UsageError
from dpps.privacy import LedgerFile
from dpps.runs import Options, RunFolder, data_ledger, together, tune, tuning
from dpps.runs.tuning import _noised, _right

LINEAR = {
    "data": "mnist",
    "features": "scattering",
    "model": "linear",
    "shared": "all",
    "noise_multiplier": 5.3,
}


def candidates(options, trials):
    return tuning.candidates(options, options.resolve(), trials)


def own_data(folder, nodes=3, rows=24):
    rng = np.random.default_rng(0)
    for node in range(nodes):
        (folder / f"node-{node}").mkdir(parents=True)
        for name, count in (("train", rows), ("test", 10)):
            x = rng.normal(size=(count, 2))
            labels = (x[:, 0] > 0).astype(int)
            lines = [f"{a:.3f},{b:.3f},{c}" for (a, b), c in zip(x, labels, strict=True)]
            (folder / f"node-{node}" / f"{name}.csv").write_text("\n".join(["a,b,label", *lines]) + "\n")
    return folder / "node-{rank}"


def test_the_first_trial_is_what_train_would_do_and_none_is_repeated():
    config = Options(**LINEAR)
    found = candidates(config, 20)
    usual = config.resolve()
    assert found[0] == {n: getattr(usual, n) for n in ("lr_shared", "batch_size", "epochs", "clip")}
    assert len({tuple(each.values()) for each in found}) == len(found) == 20
    assert candidates(config, 20) == found  # the seed orders them


def test_the_clip_is_changed_at_the_same_product_of_rate_and_clip():
    found = candidates(Options(**LINEAR, batch_size=750, epochs=15), 9)
    products = sorted({round(each["lr_shared"] * each["clip"], 2) for each in found})
    assert len(found) == 9
    assert products == pytest.approx([products[1] / 3, products[1], products[1] * 3], rel=0.02)


def test_what_is_given_is_kept():
    (found,) = candidates(Options(**LINEAR, lr_shared=4.0, batch_size=300, epochs=9), 1)
    assert set(found) == {"clip"}
    with pytest.raises(UsageError, match="--lr-shared, --batch-size, --epochs, --clip"):
        candidates(Options(**LINEAR, lr_shared=4.0, batch_size=300, epochs=9, clip=0.1), 3)


def test_private_data_is_refused_unless_the_search_is_paid_for(tmp_path):
    config = Options(node_data=own_data(tmp_path), classes=2, nodes=3, model="linear", shared="all")
    with pytest.raises(UsageError, match="--charge"):
        tune(config, 2, tmp_path / "out")


def test_a_charged_search_stays_within_its_epsilon_and_delta(tmp_path):
    config = Options(
        node_data=own_data(tmp_path),
        classes=2,
        nodes=3,
        model="linear",
        shared="all",
        epsilon=4.0,
        lr_shared=1.0,
    )
    found = tune(config, 2, tmp_path / "out", charge=True)
    kept = json.loads((tmp_path / "out" / "tuning.json").read_text())
    assert (found.epsilon, found.delta) == (kept["epsilon"], kept["delta"]) == (4.0, 1e-5)
    assert 3.9 < sum(trial.epsilon for trial in found.trials) <= 4.0
    for trial in found.trials:
        summary = json.loads((trial.folder / "summary.json").read_text())
        assert summary["privacy"]["delta"] == pytest.approx(5e-6)
        assert (trial.folder / "ledger.jsonl").exists()
    assert found.best.accuracy == max(trial.accuracy for trial in found.trials)


@pytest.mark.parametrize("given", [{"unit": "contribution"}, {"records_per_user": 2}])
def test_a_charged_search_promises_something_for_one_example_only(tmp_path, given):
    config = Options(node_data=own_data(tmp_path), classes=2, nodes=3, model="linear", epsilon=4.0, **given)
    with pytest.raises(UsageError, match=r"--charge.*--unit.*--records-per-user"):
        tune(config, 2, tmp_path / "out", charge=True)
    assert not (tmp_path / "out").exists()


def test_public_data_is_not_charged_for(tmp_path):
    with pytest.raises(UsageError, match=r"--charge.*--node-data.*--data"):
        tune(Options(data="mnist-mini"), 2, tmp_path / "out", charge=True)


def test_trials_of_private_data_have_noise_that_nobody_knows_and_a_part_held_out(tmp_path):
    where = own_data(tmp_path)
    for node in range(3):
        (tmp_path / f"node-{node}" / "test.csv").unlink()
    options = {"model": "linear", "shared": "all", "epsilon": 4.0, "lr_shared": 1.0, "hold_out": 0.25}
    found = tune(Options(node_data=where, classes=2, nodes=3, **options), 1, tmp_path / "out", charge=True)
    folder = RunFolder(found.best.folder)
    assert LedgerFile.read_header(folder.ledger)["durable"] is True  # only where noise is secure
    assert folder.read_summary()["own_accuracy"] is not None  # there is no test file: a part was held out


def test_counts_are_exact_or_noised():
    labels = torch.zeros(50, dtype=torch.long)
    held_out = [(None, labels), (None, labels[:30])]
    assert _right(SimpleNamespace(held_out=held_out, own_accuracy_by_node=[80.0, 50.0])) == 55
    assert _noised(55, None) == 55
    noised = np.array([_noised(55, 0.5) for _ in range(300)])
    # discrete Laplace noise of scale 2 has deviation 2.8; the test must fail without noise and with twice as much
    assert 2.0 < noised.std() < 3.8
    assert abs(noised.mean() - 55) < 1


def charged_search(tmp_path, monkeypatch, trials=2, epsilon=1.0):
    monkeypatch.setenv(data_ledger.STATE, str(tmp_path / "state"))
    options = {"model": "linear", "shared": "all", "lr_shared": 1.0, "epsilon": epsilon}
    config = Options(node_data=own_data(tmp_path / "data"), classes=2, nodes=3, **options)
    return tune(config, trials, tmp_path / "out", charge=True)


def noted(tmp_path, node, delta):
    """What `dpps ledger` says of a node's data."""
    runs = data_ledger.spent(data_ledger.notes_of(tmp_path / "data" / f"node-{node}"), LedgerFile.read)
    return together(runs, "record", delta).epsilon


@pytest.mark.parametrize(("trials", "epsilon"), [(1, 0.5), (3, 1.0)])
def test_the_ledger_of_the_data_is_never_below_what_a_search_says_it_cost(
    tmp_path, monkeypatch, trials, epsilon
):
    found = charged_search(tmp_path, monkeypatch, trials, epsilon)
    assert found.epsilon == epsilon
    for node in range(3):
        for delta in (found.delta, 1e-3, 1e-9):
            assert noted(tmp_path, node, delta) >= found.epsilon


def test_scores_are_on_disk_as_charged_before_they_are_drawn(tmp_path, monkeypatch):
    seen = []

    def drawn(count, epsilon):
        seen.append([noted(tmp_path, node, 1e-5) for node in range(3)])
        return count

    monkeypatch.setattr(tuning, "_noised", drawn)
    charged_search(tmp_path, monkeypatch)
    assert len(seen) == 3  # how many were held out, and two scores
    assert min(min(each) for each in seen) >= 1.0


def test_a_search_whose_charge_cannot_be_written_draws_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise RunError("the disk is full")

    drawn = []
    monkeypatch.setattr(tuning, "note_ledger", full)
    monkeypatch.setattr(tuning, "_noised", lambda count, epsilon: drawn.append(count) or count)
    with pytest.raises(RunError):
        charged_search(tmp_path, monkeypatch)
    assert not drawn
