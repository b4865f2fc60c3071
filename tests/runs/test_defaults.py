"""What `dpps train` does when rates are left open."""

import pytest

from dpps.errors import UsageError
from dpps.runs import Options, planned, shape, suggestion

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
        ({"schedule": "plateau"}, "schedule.*'plateau'"),
        ({"averaging": 2.0}, "averaging.*2"),
        ({"batch_size": 700, "declared_sizes": "600", **LINEAR}, "700.*600"),
    ],
)
def test_bad_requests_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        Options(**options).resolve()
