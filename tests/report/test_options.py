"""Which options had an effect, what the data are called, and the command that repeats a run."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from dpps.cli import parse_options
from dpps.errors import UsageError
from dpps.report import command, data_name, options_shown
from dpps.runs import Options


@given(
    unit=st.sampled_from(["record", "contribution", "node-swap", "none"]),
    epsilon=st.sampled_from([None, 0.5, 3.0]),
    others=st.fixed_dictionaries(
        {},
        optional={
            "nodes": st.integers(2, 50),
            "topology": st.sampled_from(["ring", "4-out", "base-2"]),
            "clip": st.floats(0.1, 10),
            "mechanism": st.sampled_from(["laplace", "gaussian"]),
            "split": st.sampled_from(["dirichlet:0.5", "label:2"]),
            "shared": st.sampled_from(["2", "all", "layer1,layer 2"]),
            "track_real": st.booleans(),
            "seed": st.integers(0, 99),
            "lr_shared": st.sampled_from([0.1, 1.0, 0.03]),
            "data_dir": st.just(Path("some where")),
            "out": st.just(Path("x")),
        },
    ),
)
def test_command_repeats_the_configuration(unit: str, epsilon: float | None, others: dict[str, Any]) -> None:
    try:
        config = Options(unit=unit, epsilon=epsilon, **others).resolve()
    except UsageError:  # options that have no meaning together
        assume(False)
    words = shlex.split(command(config))
    assert words[:2] == ["dpps", "train"]
    again = parse_options(Options, words[2:], "dpps train").resolve()
    assert again.fingerprint() == config.fingerprint()
    assert again.data_dir == config.data_dir


def test_command_says_only_what_matters() -> None:
    assert command(Options(out=Path("x"), overwrite=True).resolve()) == "dpps train"
    assert command(Options(epsilon=3.0, epochs=2).resolve()) == "dpps train --epochs 2"


def test_options_of_other_units_are_not_listed() -> None:
    record = options_shown(Options().resolve(), False)
    assert not {"budget", "noise-rate", "sensitivity", "c-prime", "decay", "mechanism", "norm"} & set(record)
    assert {"epsilon", "delta", "clip", "records-per-user", "seed"} <= set(record)
    assert record["noise"] == "seeded (simulation)"
    swap = options_shown(Options(unit="node-swap", sensitivity="paper").resolve(), True)
    assert {"budget", "noise-rate", "sensitivity", "c-prime", "decay"} <= set(swap)
    assert not {"records-per-user", "epsilon"} & set(swap)
    assert swap["noise"].startswith("secure")
    none = options_shown(Options(unit="none").resolve(), False)
    assert not {"delta", "clip", "epsilon", "noise", "sync-every", "dropouts", "track-real", "out"} & set(
        none
    )
    sgp = options_shown(Options(algorithm="sgp", unit="none").resolve(), False)
    assert "shared" not in sgp


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("hospitals/node-{rank}", "hospitals"),
        ("/srv/clinic-{rank}", "clinic"),
        ("/srv/diabetes/data/{rank}", "diabetes"),
        ("node-{rank}", "own data"),
    ],
)
def test_own_data_have_their_own_name(folder: str, name: str) -> None:
    config = Options(node_data=Path(folder), classes=2).resolve()
    assert data_name(config) == options_shown(config, True)["data"] == name
    assert not {"split", "hold-out", "node-data"} & set(options_shown(config, True))
    assert data_name(Options()) == "mnist-mini"


def test_options_that_follow_from_where_a_run_is_carried_out_are_part_of_its_command(tmp_path):
    """--metrics, which is no part of the command, has changed how much is held out: the command says how much."""
    config = Options(node_data=tmp_path / "node-{rank}", classes=2, metrics="f1", nodes=3)
    assert "--hold-out 0.2" in command(config)
    assert "--metrics" not in command(config)


def test_the_command_of_a_distributed_run_is_one_that_torchrun_takes() -> None:
    config = Options(nodes=6, topology="ring", epsilon=2.0).resolve()
    words = shlex.split(command(config, processes=3))
    assert words[0] == "torchrun"
    started = get_args_parser().parse_args(words[1:])
    assert (started.nproc_per_node, started.module, started.training_script) == ("3", True, "dpps")
    assert started.training_script_args[0] == "train"
    again = parse_options(Options, started.training_script_args[1:], "dpps train").resolve()
    assert again.fingerprint() == config.fingerprint()
    assert again.out is not None
