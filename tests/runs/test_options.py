"""The options of a run: what they mean, which are refused, and how they are kept in files."""

import dataclasses
import json
from pathlib import Path

import pytest
from torch import nn

import dpps
from dpps.cli import parse_options
from dpps.errors import UsageError
from dpps.learning import as_unit
from dpps.runs import Options, Run, planned, refuse_ignored, shape, suggestion

# An option on the command line that would be ignored is refused; one that a configuration file holds is not


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
    "--noise-multiplier 1 --unit contribution",
    "--budget 1",
    "--unit node-swap --mechanism gaussian",
    "--absentees 1",
    "--epsilon 1 --unit none",
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


# The defaults of the command line and those of the library agree


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({"unit": "contribution", "epsilon": 8.0}, dpps.Contribution(epsilon=8)),
        (
            {"unit": "contribution", "epsilon": 8.0, "mechanism": "gaussian"},
            dpps.Contribution(epsilon=8, mechanism="gaussian"),
        ),
        ({"unit": "record", "epsilon": 8.0}, dpps.Record(epsilon=8)),
        ({"unit": "record", "noise_multiplier": 1.0}, dpps.Record(noise_multiplier=1)),
        ({"unit": "node-swap"}, dpps.NodeSwap()),
        ({"unit": "node-swap", "epsilon": 8.0}, dpps.NodeSwap(epsilon=8)),
        ({"unit": "node-swap", "budget": 2.0}, dpps.NodeSwap(budget=2)),
        ({"unit": "record"}, as_unit("record")),
        ({"unit": "contribution"}, as_unit("contribution")),
        ({"unit": "node-swap"}, as_unit("node-swap")),
    ],
)
def test_units(options, unit):
    told = Options(**options).resolve().privacy()
    names = [f.name for f in dataclasses.fields(unit) if f.name not in ("sensitivity", "trust")]
    assert [getattr(told, name) for name in names] == [getattr(unit, name) for name in names]
    for name in ("sensitivity", "trust"):
        assert repr(getattr(told, name, None)) == repr(getattr(unit, name, None))


@pytest.mark.parametrize("unit", ["contribution", "node-swap", "none"])
def test_algorithms_and_runs(unit):
    """The learning rates of the unit record are the exception: there the command line takes 1, for clipped gradients."""
    told = Options(unit=unit).resolve()
    library = {f.name: f.default for f in dataclasses.fields(dpps.PartPSP)}
    # without them the algorithm chooses, and its plan says what
    open_ = ("lr_shared", "lr_local", "batch_size")
    rates = told.rates()
    assert {n: v for n, v in rates.items() if n not in open_} == {
        n: library[n] for n in rates if n not in open_
    }
    model = nn.Linear(2, 2)
    plans = [dpps.PartPSP(model, "all", **given).plan([1000] * 3, 2) for given in (rates, {})]
    assert plans[0] == plans[1]
    options = Run.__init__.__kwdefaults__
    for name in (
        "sync_every",
        "mixes",
        "secure_noise",
        "spare_rounds",
        "checkpoint_every",
        "track_real",
        "overwrite",
    ):
        assert getattr(told, name) == options[name]


# Options in files: TOML by the names of the options, JSON as a run keeps them


def test_what_is_written_is_read(tmp_path: Path) -> None:
    config = Options(nodes=7, data_dir=Path("x"), epsilon=2.0, quiet=True, norm="group", batch_size="1/8")
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    assert Options.from_toml(file) == config
    assert Options.from_json(config.to_json(), "run", "other") == config


def test_a_configuration_of_own_data_does_not_name_another(tmp_path):
    config = Options(node_data=Path("d/node-{rank}"), classes=2)
    assert 'data = "own data"\n' in config.to_toml()
    file = tmp_path / "run.toml"
    file.write_text(config.to_toml())
    Options.from_toml(file).check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodse = 3", "run.toml.*'nodse'.*'nodes'"),
        ("nodes = 'three'", "run.toml.*nodes.*'three'"),
        ("secure-noise = 'yes'", "secure-noise.*'yes'.*true.*false"),
        ("nodes = true", "nodes.*True"),
        ("norm = 'layer'", "norm.*'layer'.*'batch' or 'group'"),
        ("weights = 3", "weights.*3.*path"),
        ("nodes = ", "run.toml.*TOML"),
    ],
)
def test_what_is_no_option_or_no_value_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        Options.from_toml(file)


def test_a_file_that_is_not_there_and_options_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--config.*no\.toml"):
        Options.from_toml(tmp_path / "no.toml")
    for found in ({}, {"algorithm": "partpsp"}):
        with pytest.raises(UsageError, match="otherwise"):
            Options.from_json(found, "somewhere", "otherwise")
    with pytest.raises(UsageError, match=r"somewhere.*colour"):
        Options.from_json({"data": "mnist", "colour": "red"}, "somewhere", "otherwise")


def test_an_option_of_an_earlier_version_is_dropped_from_a_folder_and_refused_in_a_file(tmp_path):
    """A run that was started with --threads can be opened; a file to write settings in says what to do instead."""
    kept = Options(seed=3).to_json() | {"threads": 2, "join-timeout": 900.0}
    assert Options.from_json(kept, "run", "not options") == Options(seed=3)
    (tmp_path / "old.toml").write_text("threads = 2\n")
    with pytest.raises(UsageError, match="OMP_NUM_THREADS"):
        Options.from_toml(tmp_path / "old.toml")


OF_0_2 = {"schedule": "constant", "averaging": 0.0, "join-timeout": 300.0}


def test_options_of_0_2_are_read_without_what_is_gone_at_its_default(tmp_path):
    assert Options.from_json(Options(seed=3).to_json() | OF_0_2, "run", "not options") == Options(seed=3)
    (tmp_path / "old.toml").write_text(
        "".join(f"{name} = {json.dumps(value)}\n" for name, value in OF_0_2.items()) + "seed = 3\n"
    )
    assert Options.from_toml(tmp_path / "old.toml") == Options(seed=3)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [("schedule", "cosine", "--lr-step"), ("averaging", 0.5, "averaging="), ("join-timeout", 900.0, "300")],
)
def test_options_of_0_2_that_asked_for_something_are_refused(name, value, instead, tmp_path):
    (tmp_path / "old.toml").write_text(f"{name} = {json.dumps(value)}\n")
    with pytest.raises(UsageError, match=rf"{name}.*{instead}"):
        Options.from_toml(tmp_path / "old.toml")
    if name != "join-timeout":  # a run that waited longer at its start computes nothing else
        with pytest.raises(UsageError, match=rf"somewhere.*{name}"):
            Options.from_json(Options().to_json() | {name: value}, "somewhere", "not options")


# What `dpps train` does when rates are left open


LINEAR = {"data": "mnist", "features": "scattering", "model": "linear", "shared": "all"}


def test_softmax_regression_on_features_has_the_rule():
    found = Options(**LINEAR, noise_multiplier=5.3).resolve()
    assert (found.batch_size, found.epochs, found.clip, found.momentum) == (750, 15, 0.1, 0.8)
    rule = suggestion(Options(**LINEAR, noise_multiplier=5.3))
    assert found.lr_shared == found.lr_local == rule.rate


def test_partners_allow_longer_steps():
    alone, paired = (
        Options(**LINEAR, noise_multiplier=5.3, trust=trust, **more).resolve()
        for trust, more in (("nobody", {}), ("pairs", {"colluders": 0, "mean_variance": 1.6}))
    )
    # 0.4 of the deviation is left
    assert paired.lr_shared == pytest.approx(alone.lr_shared / 0.16**0.25, rel=0.01)


@pytest.mark.parametrize(
    ("options", "norm"),
    [
        ({}, "group"),  # batch normalisation mixes examples
        ({"unit": "contribution"}, "batch"),
        ({"unit": "contribution", "norm": "group"}, "group"),
        ({"unit": "none"}, "batch"),
    ],
)
def test_a_model_is_normalised_as_its_unit_allows(options, norm):
    assert Options(model="resnet18", **options).resolve().norm == norm


def test_what_is_given_stays():
    found = Options(**LINEAR, noise_multiplier=5.3, batch_size=100, momentum=0.0, lr_shared=2.0).resolve()
    assert (found.batch_size, found.momentum, found.lr_shared, found.lr_local) == (100, 0.0, 2.0, 2.0)
    assert found.epochs == 15


@pytest.mark.parametrize("options", [{}, {"model": "linear", "unit": "none"}, {"model": "cnn"}])
def test_others_have_the_plain_defaults(options):
    found = Options(**options).resolve()
    assert (found.batch_size, found.epochs, found.momentum) == (100, 12, 0.0)


@pytest.mark.parametrize("model", ["mlp", "cnn", "my_models:make"])
def test_the_rate_of_other_models_follows_the_noise(model):
    more, less = (Options(model=model, shared="all", noise_multiplier=s).resolve() for s in (5.0, 20.0))
    assert more.clip == less.clip == 1.0
    assert more.lr_shared == more.lr_local == pytest.approx(4 * less.lr_shared, rel=0.01)
    part = Options(model=model, shared="1", noise_multiplier=5.0).resolve()
    assert part.lr_shared == pytest.approx(more.lr_shared / 2, rel=0.01)


def test_other_models_of_small_nodes_have_batches_within_them():
    found = Options(noise_multiplier=5.0, declared_sizes="60").resolve()
    assert (found.batch_size, found.epochs) == (30, 60)


@pytest.mark.parametrize("options", [{}, {"unit": "contribution"}, {"unit": "none"}])
def test_the_local_rate_is_that_of_the_shared_part(options):
    given = {"batch_size": 50, "epochs": 2, "momentum": 0.0, "lr_shared": 0.5}
    assert Options(**options, **given).resolve().lr_local == 0.5
    assert Options(**options, **given, lr_local=0.2).resolve().lr_local == 0.2


def test_resolved_twice_is_resolved_once():
    once = Options(**LINEAR, noise_multiplier=5.3).resolve()
    assert once.resolve() == once


@pytest.mark.parametrize(
    ("data", "features", "found"),
    [
        ("mnist", "scattering", (81, 7, 7)),
        ("fashion-mnist", "scattering", (81, 7, 7)),
        ("cifar-10", "scattering", (243, 8, 8)),
        ("mnist", "none", (1, 28, 28)),
        ("fashion-mnist", "none", (3, 28, 28)),
    ],
)
def test_what_a_model_reads_of_named_data(data, features, found):
    assert shape(Options(data=data, features=features)) == found


def test_the_plan_is_that_of_the_run():
    plan, parameters = planned(Options(data="mnist").resolve())
    assert (plan.count, plan.declared_sizes, plan.sampling) == (720, (6000,) * 10, (100 / 6000,) * 10)
    assert parameters == 7850
    plan, parameters = planned(Options(**LINEAR, noise_multiplier=5.3).resolve())
    assert (plan.count, parameters) == (120, 39_700)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"momentum": 1.0}, r"momentum.*1\.0.*\[0, 1\)"),
        ({"momentum": -0.5}, r"momentum.*-0\.5"),
        ({"mixes": 0}, "--mixes.*0"),
        ({"batch_size": 700, "declared_sizes": "600", **LINEAR}, "700.*600"),
    ],
)
def test_bad_requests_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        Options(**options).resolve()


@pytest.mark.parametrize(
    "given", [{"epsilon": 3}, {"clip": 1, "lr_shared": 1}, {"epsilon": 3.0, "hold_out": 0}]
)
def test_a_run_is_found_again_by_numbers_as_they_were_written(given: dict[str, float]) -> None:
    """Python's 3 and 3.0 are the same option, but not the same text in run.json."""
    options = Options(**given)
    again = Options.from_json(json.loads(json.dumps(options.to_json())), "run.json", "no run")
    assert again.fingerprint() == options.fingerprint()
