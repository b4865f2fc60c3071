"""The run object: own model, own loop, folder, resume, and what happens when something fails."""

import pickle
from unittest import mock

import pytest
import torch
from torch import nn

import dpps
from dpps.errors import RunError, UsageError
from dpps.noise import SecureNoise
from dpps.privacy import LedgerFile
from dpps.runs import RunFolder
from tests.support.learning import tiny, toy_data
from tests.support.runs import left, make

UNIT = dpps.Record(epsilon=2.0)


def test_rounds_give_a_log_each_and_a_run_can_be_finished_after_a_break(tmp_path):
    run = left(make(tmp_path / "run", UNIT, test=toy_data(1, seed=9)[0]), 5, epochs=3)
    run.finish()
    assert [log.round for log in run.log] == list(range(6))
    assert run.log[3].accuracy is not None
    assert run.log[4].accuracy is None
    assert 0 < run.privacy.epsilon_spent < run.privacy.epsilon == 2.0
    assert len(run.models()) == 3
    assert run.accuracy is not None
    summary = RunFolder(tmp_path / "run").read_summary()
    assert summary["rounds"] == 6
    assert summary["privacy"]["epsilon"] == run.privacy.epsilon
    assert LedgerFile.read(RunFolder(tmp_path / "run").ledger).messages == 6


def test_a_callback_that_answers_true_ends_the_run_finished():
    run = make(callbacks=[lambda run, log: log.round == 2]).fit(epochs=5)
    assert len(run.log) == 3
    assert not run.stopped
    assert len(run.models()) == 3


def test_a_round_that_a_callback_chose_to_end_with_is_named_in_the_statement():
    unit = dpps.Contribution(clip=1.0, round_epsilon=0.5)
    chosen = make(unit=unit, callbacks=[lambda run, log: log.loss < 99]).fit(epochs=2)
    whole = make(unit=unit).fit(epochs=2)
    assert chosen.privacy.epsilon == pytest.approx(whole.privacy.epsilon)
    assert chosen.privacy.statement != whole.privacy.statement


def test_a_pause_that_a_callback_chose_is_named_when_the_run_has_gone_on(tmp_path):
    make(tmp_path / "run", UNIT, callbacks=[lambda run, log: log.round == 2]).fit(epochs=2)
    again = make(tmp_path / "run", UNIT, opened=True).fit(epochs=2)
    assert len(again.log) == 8
    whole = make(unit=UNIT).fit(epochs=2)
    assert again.privacy.statement.startswith(whole.privacy.statement)
    assert again.privacy.statement != whole.privacy.statement


def test_data_that_grew_between_stop_and_resume_changes_nothing_that_was_promised(tmp_path):
    """Rounds, sampling rates and noise are those of the first start: they are not found again from what nodes hold now."""
    run = left(make(tmp_path / "run", UNIT), 2)
    grown = [toy_data(3)[0], *toy_data(2, n=4000)]
    again = make(tmp_path / "run", UNIT, opened=True, data=grown).fit(epochs=2)
    assert (again.plan, again.contract) == (run.plan, run.contract)
    assert again.nodes.updates.sampler.rates == (0.25, 0.25, 0.25)
    assert again.protocol.mechanism == run.protocol.mechanism
    assert len(again.log) == 8
    assert again.privacy.epsilon <= 2.0


def test_a_run_that_was_left_early_goes_on_where_it_was(tmp_path):
    whole = make(unit=UNIT).fit(epochs=2)
    run = left(make(tmp_path / "run", UNIT), 2)
    with pytest.raises(UsageError, match="finished"):
        run.step()
    again = make(tmp_path / "run", UNIT, opened=True).fit(epochs=2)
    assert [log.round for log in again.log] == list(range(8))
    assert torch.equal(again.shared, whole.shared)
    assert torch.equal(again.local, whole.local)
    assert again.privacy.epsilon == whole.privacy.epsilon


def test_another_model_or_unit_is_refused_when_a_run_is_opened(tmp_path):
    make(tmp_path / "run", UNIT).fit(epochs=1)
    other = dpps.PartPSP(tiny(sizes=(6, 5, 3)), ["layer1"], batch_size=10)
    with pytest.raises(UsageError, match="model"):
        make(tmp_path / "run", UNIT, opened=True, algorithm=other).start(epochs=1)
    with pytest.raises(UsageError, match=r"\(epsilon\)"):
        make(tmp_path / "run", dpps.Record(epsilon=3.0), opened=True).start(epochs=1)


def test_more_epochs_or_other_declared_sizes_are_refused_when_a_run_is_opened(tmp_path):
    unit = dpps.Record(noise_multiplier=2.0)
    left(make(tmp_path / "run", unit), 2)
    for epochs, more, said in (
        (3, {}, r"rounds.*\[\[1.0, 12\]\].*\[\[1.0, 8\]\]"),
        (2, {"declared_sizes": [40, 41, 40]}, "node 1 .*41.*40"),
    ):
        with pytest.raises(UsageError, match=said):
            make(tmp_path / "run", unit, opened=True, **more).start(epochs)


def test_a_model_built_again_with_other_start_weights_goes_on_from_the_checkpoint(tmp_path):
    run = left(make(tmp_path / "run", UNIT), 2)
    again = dpps.PartPSP(tiny(seed=99), ["layer1"], batch_size=10)
    opened = make(tmp_path / "run", UNIT, opened=True, algorithm=again).start(epochs=2)
    assert torch.equal(opened.state.shared.s, run.state.shared.s)
    opened.close()


@pytest.mark.parametrize("noise", [SecureNoise, dpps.Seeded])
def test_where_nobody_knows_the_noise_every_charge_is_on_disk_before_its_message(tmp_path, noise):
    """A guarantee is stated for it, so nothing of it may be forgotten, however the source was given."""
    run = make(tmp_path / "run", UNIT, noise=noise()).start(epochs=1)
    run.step()
    found = LedgerFile.read(tmp_path / "run" / "ledger.jsonl")
    assert found.messages == (1 if run.protocol.noise.private else 0)
    assert found.header["durable"] == run.protocol.noise.private
    run.close()


def test_a_finished_run_is_not_run_again(tmp_path):
    unit = dpps.Record(noise_multiplier=1.0)
    make(tmp_path / "run", unit).fit(epochs=1)
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    with pytest.raises(UsageError, match="4 of 4"):
        make(tmp_path / "run", unit, opened=True).fit(epochs=1)
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize("ask", ["accuracy", "privacy", "shared", "models", "summary"])
def test_results_of_a_run_that_has_not_started_are_refused_by_name(ask):
    run = make()
    with pytest.raises(UsageError, match=r"start\(epochs\)"):
        run.models() if ask == "models" else getattr(run, ask)


def test_epochs_are_looked_at_before_anything_is_sent():
    with pytest.raises(UsageError, match=r"epochs.*1\.5"):
        make().fit(epochs=1.5)


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_run_that_ends_by_an_exception_goes_on_where_it_was(tmp_path, failure):
    """A target epsilon was spread over all rounds: none of them could be paid for again."""

    def fail(_, log):
        if log.round == 5:
            raise failure

    with pytest.raises(failure) as raised:
        make(tmp_path / "run", UNIT, secure_noise=True, callbacks=[fail]).fit(epochs=2)
    assert any("Run.open" in note for note in raised.value.__notes__)  # how to go on
    again = make(tmp_path / "run", UNIT, opened=True, secure_noise=True).fit(epochs=2)
    assert [round_ for round_, _ in again.ledger.history] == list(range(8))
    assert again.privacy.epsilon <= 2.0
    shown = repr(again.summary)  # what a run in Python prints: numbers, no lists by node or epoch
    assert "rounds=8" in shown
    assert "unit='record'" in shown
    assert "[" not in shown


def test_a_folder_with_a_run_is_not_overwritten_unless_asked(tmp_path):
    make(tmp_path / "run").fit(epochs=1)
    with pytest.raises(UsageError, match=r"run\.json.*--resume.*--overwrite"):
        make(tmp_path / "run").fit(epochs=1)
    make(tmp_path / "run", overwrite=True).fit(epochs=1)


class Counting(nn.Module):
    """Batch statistics, whose buffers move in every forward pass."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.body(x))))


def test_a_failed_round_changes_nothing_not_even_buffers_and_momentum():
    algorithm = dpps.PartPSP(
        Counting(),
        ["body"],
        batch_size=10,
        local_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
    run = make(algorithm=algorithm).start(epochs=3)
    run.step()

    def everything():
        return {k: v.clone() for k, v in run.nodes.tensors(run.state).items()}

    before = everything()
    assert any(name.startswith("optimizer/") for name in before)
    assert any("running_mean" in name for name in before)
    with mock.patch.object(run.protocol, "step", side_effect=RunError("lost")), pytest.raises(RunError):
        run.step()
    after = everything()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    run.step()
    assert any(not torch.equal(before[name], v) for name, v in everything().items() if "momentum" in name)


def test_a_round_that_fails_after_its_release_leaves_the_memory_of_released_updates():
    """The velocity is made of noised updates, of both parts, and is set before anything leaves."""
    algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10, optimizer=dpps.Momentum(0.9))
    run = make(unit=dpps.Record(noise_multiplier=2.0), algorithm=algorithm).start(epochs=3)
    run.step()
    before = {name: t.clone() for name, t in run.nodes.tensors(run.state).items()}
    assert any(name.startswith("kept/") for name in before)
    assert any(name.startswith("optimizer/") for name in before)
    lost = mock.patch.object(run.protocol.fabric, "collect", side_effect=RunError("lost"))
    with lost, pytest.raises(RunError):
        run.step()
    after = run.nodes.tensors(run.state)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert run.ledger.messages == 2, "what may have left stays charged"


def test_a_ledger_put_back_together_with_its_witness_is_noticed_by_the_checkpoint(tmp_path):
    unit = dpps.Record(noise_multiplier=2.0)
    run = make(tmp_path / "run", unit, secure_noise=True).start(epochs=2)
    files = [tmp_path / "run" / name for name in ("ledger.jsonl", "ledger.jsonl.witness")]
    for log in run.rounds():
        if log.round == 0:
            early = [file.read_bytes() for file in files]
        if log.round == 3:
            break
    for file, content in zip(files, early, strict=True):
        file.write_bytes(content)
    with pytest.raises(RunError, match=r"ledger\.jsonl.* 2 lines.*round 4 .*line 5"):
        make(tmp_path / "run", unit, opened=True, secure_noise=True).start(epochs=2)


def test_momentum_is_in_the_checkpoint(tmp_path):
    def run(folder, opened=False):
        optimizer = {"local_optimizer": lambda p: torch.optim.Adam(p, lr=0.05)}
        algorithm = dpps.PartPSP(tiny(), ["layer1"], batch_size=10, **optimizer)
        return make(folder, opened=opened, algorithm=algorithm)

    whole = run(None).fit(epochs=3)
    left(run(tmp_path / "run"), 5, epochs=3)
    again = run(tmp_path / "run", opened=True).fit(epochs=3)
    assert torch.equal(again.local, whole.local)


def test_what_a_promise_rests_on_is_fixed():
    run = make(unit=UNIT)
    with pytest.raises(UsageError, match="fixed"):
        run.algorithm.lr_shared = 60.0
    with pytest.raises(UsageError, match="fixed"):
        run.algorithm = dpps.PartPSP(tiny(), ["layer1"])
    run.start(epochs=1)
    for name in ("plan", "contract", "protocol", "nodes", "unit"):
        with pytest.raises(UsageError, match="fixed"):
            setattr(run, name, None)


def test_a_run_says_why_it_cannot_be_pickled_and_models_can():
    run = make().fit(epochs=1)
    with pytest.raises(TypeError, match=r"run\.models\(\)"):
        pickle.dumps(run)
    again = pickle.loads(pickle.dumps(run.models()[1]))
    assert torch.equal(again.layer1.weight, run.models()[1].layer1.weight)


def test_an_algorithm_without_noise_refuses_a_unit():
    with pytest.raises(UsageError, match=r"SGP\b.*record"):
        make(unit=UNIT, algorithm=dpps.SGP(tiny()))


def test_steps_need_a_start_and_epochs_do_not_change():
    run = make()
    with pytest.raises(UsageError, match=r"start\(epochs\)"):
        run.step()
    run.start(epochs=2)
    with pytest.raises(UsageError, match=r"2 epochs.*\b3\b"):
        run.fit(epochs=3)


def test_the_ledger_in_memory_has_every_release():
    run = make(unit=dpps.Contribution(clip=1.0, round_epsilon=0.5)).fit(epochs=1)
    assert [round_ for round_, _ in run.ledger.history] == [0, 1, 2, 3]
    assert run.protocol.privacy(delta=0.0).epsilon == pytest.approx(2.0)
    assert run.privacy.epsilon == pytest.approx(run.protocol.privacy(delta=1e-5).epsilon)


def test_a_run_made_in_python_writes_its_page(tmp_path):
    run = make(tmp_path / "run").fit(epochs=1)
    assert run.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert run.report() == tmp_path / "run" / "report.html"
    with pytest.raises(UsageError, match=r"report\(path\)"):
        make().fit(epochs=1).report()
