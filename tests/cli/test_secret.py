"""`dpps secret`."""

import pytest

from dpps.cli import main


def test_every_secret_is_another_one_and_long_enough(capsys: pytest.CaptureFixture[str]) -> None:
    found = set()
    for _ in range(3):
        assert main(["secret"]) == 0
        found.add(capsys.readouterr().out.strip())
    assert len(found) == 3
    assert min(map(len, found)) >= 43  # 256 bits


def test_it_takes_no_options_but_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secret", "--help"]) == 0
    assert "export" in capsys.readouterr().out
    assert main(["secret", "--long"]) == 2
    assert "--long" in capsys.readouterr().err
