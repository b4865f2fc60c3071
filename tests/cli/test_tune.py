"""`dpps tune`: what is refused, and what is said at the end."""

import pytest

from dpps.cli import main
from dpps.runs import Trial, Tuning


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trials", "0"], "--trials is 0"),
        (["--mixes", "0"], "--mixes is 0"),
        (["--trials", "x"], "--trials is 'x'"),
        (["--epsilon", "0"], "epsilon is 0"),
    ],
)
def test_bad_requests_are_refused_in_one_line(tmp_path, capsys, arguments, says):
    assert main(["tune", *arguments, "--out", str(tmp_path / "x")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    assert main(["tune", "--out", str(tmp_path / "full")]) == 2


def test_the_best_setting_is_said_as_options_with_what_the_search_cost(tmp_path, capsys, monkeypatch):
    best = Trial({"lr_shared": 2.0, "batch_size": 100}, 91.5, None, tmp_path)

    def found(config, trials, out, charge, tell):
        tell(best)
        return Tuning((best,), 1.0 if charge else None, 1e-5)

    monkeypatch.setattr("dpps.runs.tuning.tune", found)
    for options, charged in (([], False), (["--charge"], True)):
        assert main(["tune", *options, "--out", str(tmp_path / "x")]) == 0
        said = capsys.readouterr().out
        assert " 91.50 %  --lr-shared 2.0 --batch-size 100" in said
        assert ("epsilon 1, delta 1e-05" in said) == charged
