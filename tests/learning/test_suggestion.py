"""The rule says what its derivation says."""

import math

import pytest
import torch

from dpps.errors import UsageError
from dpps.learning import LONGEST, USUAL_LONGEST, suggest, suggested_batch
from dpps.models import linear
from dpps.tasks import TASKS, parse_target
from tests.support.tasks import made_up


def logit_noise(found, sizes, inputs):
    rounds = found.epochs * (sum(sizes) // (len(sizes) * found.batch_size))
    return found.step * found.noise_multiplier * math.sqrt(rounds * inputs / len(sizes)) / found.batch_size


@pytest.mark.parametrize(
    ("sizes", "inputs", "sigma", "allowed"),
    [([6000] * 10, 3969, 5.3, 6.0), ([45] * 10, 30, 15.0, 2.5), ([143] * 10, 64, 3.33, 4.0)],
)
def test_the_noise_of_the_run_moves_a_logit_by_what_is_allowed(sizes, inputs, sigma, allowed):
    found = suggest(sizes, inputs, noise_multiplier=sigma)
    assert found.step < LONGEST
    assert logit_noise(found, sizes, inputs) == pytest.approx(allowed, rel=0.05)


def test_more_privacy_means_shorter_steps():
    more, less = (suggest([6000] * 10, 3969, epsilon=e) for e in (1, 3))
    assert more.step < less.step
    assert more.noise_multiplier > less.noise_multiplier


def test_little_noise_means_the_longest_step():
    assert suggest([6000] * 10, 3969, noise_multiplier=1e-3).step == pytest.approx(LONGEST)


def test_less_noise_in_the_mean_allows_longer_steps_by_the_square_root():
    alone, paired = (suggest([6000] * 10, 3969, noise_multiplier=5.3, mean_noise=m) for m in (1.0, 0.25))
    assert paired.step == pytest.approx(2 * alone.step, rel=0.01)


def test_what_is_given_is_kept():
    found = suggest([6000] * 10, 3969, noise_multiplier=4.0, batch_size=500, epochs=6, clip=0.5)
    assert (found.batch_size, found.epochs, found.clip) == (500, 6, 0.5)
    assert len(found.reasons) == 2
    other = suggest([6000] * 10, 3969, noise_multiplier=4.0, batch_size=500, epochs=6, clip=0.05)
    assert found.step == pytest.approx(other.step, rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ([6000] * 3, 750),
        ([45, 45], 22),
        ([1, 1], 1),
        ([45, 90], 0.5),
        ([300], 64),
        ([200, 600], 0.16),
        ([900, 6000], 0.125),
        ([143], 64),
    ],
)
def test_batches(sizes, batch):
    assert suggested_batch(sizes) == batch


def test_bad_requests_are_refused():
    with pytest.raises(UsageError, match=r"epsilon.*noise multiplier"):
        suggest([100], 5)
    with pytest.raises(UsageError, match=r"0 examples.*1"):
        suggested_batch([0, 10])


@pytest.mark.parametrize(("sizes", "epochs"), [([6000] * 10, 15), ([45] * 10, 60), ([35, 180], 60)])
def test_small_tables_have_as_many_rounds_as_large_ones(sizes, epochs):
    assert suggest(sizes, 30, noise_multiplier=4.0).epochs == epochs


@pytest.mark.parametrize(("local", "allowed"), [(False, 0.1), (True, 0.05)])
def test_of_other_models_the_noise_of_the_run_moves_a_parameter_by_what_is_allowed(local, allowed):
    sizes = [1000] * 10
    found = suggest(sizes, None, noise_multiplier=4.0, local=local)
    assert (found.batch_size, found.epochs, found.clip, found.momentum) == (100, 12, 1.0, 0.0)
    assert logit_noise(found, sizes, 1) == pytest.approx(allowed, rel=0.01)
    moved = suggest(sizes, None, noise_multiplier=4.0, local=local, momentum=0.9, clip=0.5)
    assert moved.step == pytest.approx(found.step, rel=0.01)


def test_of_other_models_little_noise_means_the_longest_step():
    assert suggest([1000] * 10, None, noise_multiplier=1e-3).step == USUAL_LONGEST


@pytest.mark.parametrize(
    ("sizes", "batch"), [([6000] * 3, 100), ([45, 45], 22), ([1, 1], 1), ([45, 90], 0.5), ([900, 1100], 0.1)]
)
def test_batches_of_other_models(sizes, batch):
    assert suggested_batch(sizes, softmax=False) == batch


@pytest.mark.parametrize("name", TASKS.names())
def test_a_table_without_noise_settles(name):
    """Two numbers and two categories of two values, evenly spread: the longest step that the rule takes does not swing."""
    task = parse_target({"kind": TASKS[name].kind, **TASKS[name].example}, "schema.toml")
    ((_, targets),) = made_up(task, [200])
    draw = torch.Generator().manual_seed(0)
    x = torch.cat([2 * torch.rand(200, 2, generator=draw) - 1, torch.rand(200, 2, generator=draw).round()], 1)
    length = math.sqrt(1 + 2 / 3 + 2 / 2)
    rule = {"length": length, "output_noise": task.output_noise, "steepest": task.steepest}
    found = suggest([200, 200], 4, noise_multiplier=1e-6, **rule)
    assert found.rate == pytest.approx(task.steepest / length**2, rel=0.01)
    model = task.head(linear(4, task.outputs))
    optimizer, losses = torch.optim.SGD(model.parameters(), found.rate), []
    for _ in range(400):
        optimizer.zero_grad()
        loss = task.loss(model(x), targets).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] == pytest.approx(min(losses), rel=1e-4)
    assert losses[-1] == pytest.approx(losses[-2], rel=1e-4)


def test_features_of_a_public_network_are_allowed_less_noise():
    sizes = [5000] * 10
    found = suggest(sizes, 1280, noise_multiplier=5.3, pretrained=True)
    assert logit_noise(found, sizes, 1280) == pytest.approx(2.0, rel=0.01)
    assert found.step < suggest(sizes, 1280, noise_multiplier=5.3).step


def test_the_clip_of_a_table_grows_where_noise_allows_it():
    """Never below 0.35 R, never above R; in between the noise of the largest rate is the allowed one."""
    clips, sizes = [], [400] * 4
    for noise in (1e-6, 0.03, 0.06, 0.1, 30.0):
        found = suggest(sizes, 10, noise_multiplier=noise, length=2.0, output_noise=0.01, steepest=4.0)
        moved = logit_noise(found, sizes, 2.0**2)
        assert moved <= 0.01 * 1.01
        if 0.7 < found.clip < 2.0:
            assert (found.rate, moved) == (pytest.approx(1.0, rel=0.01), pytest.approx(0.01, rel=0.01))
        clips.append(found.clip)
    assert (clips[0], clips[-1]) == (2.0, 0.7)
    assert clips == sorted(clips, reverse=True)
    assert len(set(clips)) > 2
