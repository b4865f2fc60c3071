"""An option on the command line that would be ignored is refused; one that a configuration file holds is not."""

import pytest

from dpps.cli import parse_options
from dpps.errors import UsageError
from dpps.runs import Options, refuse_ignored

IDLE = [
    "--unit record --mechanism laplace",
    "--mechanism=laplace",
    "--unit none --mechanism laplace",
    "--sensitivity paper",
    "--unit contribution --c-prime 0.9",
    "--unit node-swap --decay 0.5",
    "--noise-rate 1",
    "--unit contribution --records-per-user 2",
    "--unit node-swap --algorithm pedfl --sync-every 3",
    "--algorithm sgpdp --shared 1",
    "--algorithm sgp --records-per-user 2",
    "--unit none --delta 1e-6",
    "--algorithm sgp --secure-noise",
    "--norm group",
    "--node-data d --classes 2 --split iid",
    "--node-data d --classes 2 --data mnist",
    "--data-dir d",
]
FINE = [
    "",
    "--mechanism gaussian",
    "--unit contribution --mechanism laplace",
    "--unit node-swap --sensitivity paper --decay 0.5 --c-prime 1 --noise-rate 1 --mechanism laplace",
    "--records-per-user 2",
    "--delta 1e-6 --secure-noise",
    "--model resnet18 --norm group",
    "--algorithm sgpdp --shared all",
    "--node-data d --classes 2",
    "--data mnist --data-dir d",
]


def check(line: str) -> None:
    refuse_ignored(line.split(), parse_options(Options, line.split(), "dpps train"))


@pytest.mark.parametrize("line", IDLE)
def test_ignored_options_are_refused_by_name(line):
    with pytest.raises(UsageError) as refused:
        check(line)
    assert str(refused.value).split()[0] in line


@pytest.mark.parametrize("line", FINE)
def test_options_that_mean_something_are_not(line):
    check(line)
