"""Metrics against scikit-learn and by hand, their standard errors, and how often the intervals cover the truth."""

import json
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn import metrics as sk
from sklearn.linear_model import LogisticRegression

from dpps.errors import UsageError
from dpps.tasks import METRICS, Classification, Estimates, Regression, Survival, Task, compare, measure
from dpps.tasks.estimates import LEAST, Estimate, mean, of_nodes, share

TASKS = {
    "classes": Classification(("a", "b")),
    "numbers": Regression(-3, 3),
    "times": Survival((1.0, 2.0, 4.0)),
}


def draw(about: str, size: int, shift: float, rng: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """The outputs of two models, and targets."""
    x = rng.normal(size=size) + shift
    if about == "classes":
        y = rng.random(size) < 1 / (1 + np.exp(-1.3 * x))
        first, second = 0.9 * x + 0.4 * rng.normal(size=size), 1.1 * x - 0.2 + 0.4 * rng.normal(size=size)
        models = [np.stack([np.zeros(size), z], 1) for z in (first, second)]
        return (*map(torch.from_numpy, models), torch.from_numpy(y.astype(np.int64)))
    if about == "numbers":
        y = x + 0.5 * rng.normal(size=size)
        models = [0.8 * x + 0.2 * rng.normal(size=size), 0.9 * x]
        return tuple(torch.from_numpy(part / 3)[:, None] for part in (*models, y))
    event, leaves = 2 * rng.exponential(size=size) * np.exp(-x), 4 * rng.exponential(size=size)
    models = [(x + s * rng.normal(size=size))[:, None] - np.ones(3) for s in (1.0, 0.4)]
    y = np.stack([np.minimum(event, leaves), event < leaves], 1)
    return (*map(torch.from_numpy, models), torch.from_numpy(y))


def two_models(about: str, sizes: tuple[int, ...], rng: np.random.Generator):
    """Of every node (outputs, targets), of one model and of another."""
    nodes = [draw(about, n, s, rng) for n, s in zip(sizes, np.linspace(-0.5, 0.5, len(sizes)), strict=True)]
    return [(a, y) for a, _, y in nodes], [(b, y) for _, b, y in nodes]


def metrics_of(task: Task) -> list[str]:
    known = [name for name in METRICS.names() if METRICS[name].about == task.about]
    return [name for name in dict.fromkeys((*task.metrics, *known)) if name != "calibration"]


ALL = [(about, name) for about, task in TASKS.items() for name in metrics_of(task)]


@pytest.mark.parametrize(("about", "name"), ALL)
def test_what_is_left_without_an_example_is_the_metric_without_it(about: str, name: str) -> None:
    task, rng = TASKS[about], np.random.default_rng(1)
    sets, _ = two_models(about, (25, 9, 1), rng)
    metric = task.metric(name)
    found = task.measured(metric, sets)
    if found.share:
        pytest.skip("it has a formula of its own")
    tolerance = 0.1 if name == "calibration-slope" else 1e-9  # one step of Newton's method
    for k, part in enumerate(found.parts):
        for e in range(len(part)):
            left = [
                tuple(p[np.arange(len(p)) != e] if j == k else p for p in one) for j, one in enumerate(sets)
            ]
            less = task.measured(metric, [one for one in left if len(one[0])])
            assert part[e] == pytest.approx(less.value, abs=tolerance)


@pytest.mark.parametrize("classes", [2, 4])
def test_metrics_of_probabilities_are_those_of_scikit_learn(classes: int) -> None:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(300, classes)), rng.integers(0, classes, 300)
    z[np.arange(300), y] += 0.5
    outputs, targets, p = torch.from_numpy(z), torch.from_numpy(y), torch.from_numpy(z).softmax(1).numpy()
    assert METRICS["log-loss"](outputs, targets) == pytest.approx(sk.log_loss(y, p))
    if classes == 2:
        assert METRICS["brier"](outputs, targets) == pytest.approx(sk.brier_score_loss(y, p[:, 1]))
        fit = LogisticRegression(C=np.inf, tol=1e-10).fit((z[:, 1] - z[:, 0])[:, None], y)
        assert METRICS["calibration-slope"](outputs, targets) == pytest.approx(fit.coef_[0, 0], rel=1e-4)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_calibration_slope_of_logits_that_are_twice_too_large_is_one_half(classes: int) -> None:
    rng = np.random.default_rng(3)
    z = rng.normal(size=(20_000, classes))
    p = torch.from_numpy(z).softmax(1).cumsum(1).numpy()
    y = (rng.random((len(z), 1)) > p).sum(1)
    found = measure(
        Classification(tuple("abc")[:classes]),
        METRICS["calibration-slope"],
        [(torch.from_numpy(2 * z), torch.from_numpy(y))],
    )
    assert found.pooled.value == pytest.approx(0.5, abs=0.03)
    assert found.pooled.standard_error is not None
    assert abs(found.pooled.value - 0.5) < 3 * found.pooled.standard_error


def test_metrics_of_numbers_are_those_of_scikit_learn_in_the_units_of_the_target() -> None:
    task, rng = Regression(0, 10), np.random.default_rng(0)
    y, predicted = rng.uniform(0, 10, 60), rng.uniform(0, 10, 60)
    sets = [(task.targets([predicted]), task.targets([y]))]
    assert task.measured(METRICS["rmse"], sets).value == pytest.approx(
        sk.mean_squared_error(y, predicted) ** 0.5, rel=1e-5
    )
    assert task.measured(METRICS["mae"], sets).value == pytest.approx(
        sk.mean_absolute_error(y, predicted), rel=1e-5
    )
    assert task.measured(METRICS["r2"], sets).value == pytest.approx(sk.r2_score(y, predicted), rel=1e-5)


def test_the_c_index_counts_pairs_within_nodes() -> None:
    rng = np.random.default_rng(5)
    nodes = []
    for n in (30, 11):
        risk, time = rng.integers(0, 6, n).astype(float), rng.integers(1, 8, n).astype(float)
        nodes.append((risk, time, rng.random(n) < 0.5))
    right = pairs = 0.0
    for risk, time, event in nodes:
        for i in range(len(risk)):
            for j in range(len(risk)):
                if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                    pairs += 1
                    right += (risk[i] > risk[j]) + 0.5 * (risk[i] == risk[j])
    sets = [(torch.from_numpy(r)[:, None], torch.from_numpy(np.stack([t, e], 1))) for r, t, e in nodes]
    assert METRICS["c-index"].measured(sets).value == pytest.approx(right / pairs)


def test_without_a_comparable_pair_there_is_no_c_index() -> None:
    alive = torch.zeros(5, 1), torch.stack([torch.arange(5.0), torch.zeros(5)], 1)
    with pytest.raises(UsageError):
        METRICS["c-index"](*alive)
    task, rng = TASKS["times"], np.random.default_rng(0)
    sets, _ = two_models("times", (20, 20), rng)
    found = measure(task, METRICS["c-index"], [*sets, alive])
    assert found.by_node[2] is None
    assert found.mean.value == pytest.approx(np.mean([each.value for each in found.by_node[:2] if each]))


# Standard errors


def test_the_change_of_a_share_has_the_variance_of_the_formula() -> None:
    task = TASKS["classes"]
    rng = np.random.default_rng(4)
    before, after = two_models("classes", (50, 12, 3), rng)
    found = compare(task, METRICS["accuracy"], before, after)
    d, v, n = [], [], []
    for (a, y), (b, _) in zip(before, after, strict=True):
        one, two = (a.argmax(1) == y).int(), (b.argmax(1) == y).int()
        gained, lost, size = int((two > one).sum()), int((two < one).sum()), len(y)
        d.append((gained - lost) / size)
        v.append(((gained + lost + 1) / (size + 2) - ((gained - lost) / (size + 2)) ** 2) / (size + 2))
        n.append(size)
    w = np.array(n) / sum(n)
    assert found.pooled.value == pytest.approx(np.dot(w, d))
    assert found.pooled.standard_error == pytest.approx(math.sqrt(np.dot(w**2, v)))
    assert found.pooled.margin == pytest.approx(1.96 * math.sqrt(np.dot(w**2, v)), rel=1e-4)
    assert found.mean.value == pytest.approx(np.mean(d))
    assert found.mean.margin == pytest.approx(1.96 * math.sqrt(sum(v)) / 3, rel=1e-4)


def test_the_jackknife_of_a_mean_is_its_usual_standard_error() -> None:
    values = np.random.default_rng(0).normal(size=40)
    found = mean([values]).estimate()
    assert found.value == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(40))
    assert found.margin == pytest.approx(2.0227 * values.std(ddof=1) / math.sqrt(40), rel=1e-4)


def test_two_models_that_agree_everywhere_show_nothing() -> None:
    right = share([np.ones(6), np.zeros(2)])
    same = (right - right).estimate()
    assert same.value == 0
    assert same.standard_error is not None
    assert same.standard_error > 0
    assert not same.shown


def test_one_example_has_no_standard_error() -> None:
    assert mean([np.array([3.0])]).estimate() == Estimate(3.0, None, None, 1)


def test_a_node_with_few_examples_has_no_interval_of_its_own() -> None:
    few, enough = (np.random.default_rng(0).random(size) for size in (LEAST - 1, LEAST))
    found = of_nodes(mean([few, enough]), [mean([few]), mean([enough])])
    assert [node.margin is None for node in found.by_node] == [True, False]
    assert all(node.standard_error > 0 for node in found.by_node)
    assert found.mean.margin is not None
    assert (
        share([few.round()]).estimate() == of_nodes(share([few.round()]), [share([few.round()])]).by_node[0]
    )


def test_models_on_one_common_set_do_not_count_its_examples_twice() -> None:
    task, rng = TASKS["classes"], np.random.default_rng(0)
    sets, other = two_models("classes", (60,), rng)
    once = measure(task, METRICS["log-loss"], sets * 4, common=True)
    assert once.pooled.standard_error == pytest.approx(
        measure(task, METRICS["log-loss"], sets).pooled.standard_error
    )
    assert once.by_node == ()
    assert compare(task, METRICS["accuracy"], sets * 2, other * 2, common=True).pooled == (
        compare(task, METRICS["accuracy"], sets, other).pooled
    )


def test_estimates_survive_json() -> None:
    task, rng = TASKS["times"], np.random.default_rng(0)
    sets, _ = two_models("times", (20, 8, 1), rng)
    found = measure(task, METRICS["c-index"], sets)
    assert Estimates.from_json(found.to_json()) == found


def test_a_metric_that_no_node_defines_is_written_and_read_as_not_defined() -> None:
    """As the calibration slope of nodes with few examples each, which their models separate without error."""
    pooled = mean([np.arange(6.0)])
    found = of_nodes(pooled, [None, None])
    assert math.isnan(found.mean.value)
    text = json.dumps(found.to_json(), allow_nan=False)
    again = Estimates.from_json(json.loads(text))
    assert again.pooled == found.pooled
    assert math.isnan(again.mean.value)
    assert METRICS["log-loss"].interval(again.mean) == METRICS["accuracy"].interval(again.mean)


# Shares of right answers

DRAWS = 2_000


def answers(
    random: np.random.Generator, size: int, gained: float, lost: float
) -> tuple[np.ndarray, np.ndarray]:
    """Of every example whether each of two models is right."""
    chance = random.random(size)
    first = (chance >= gained) & (chance < gained + lost)
    return first.astype(np.float64), (chance < gained).astype(np.float64)


def change_of(drawn: list[tuple[np.ndarray, np.ndarray]]) -> Estimates:
    before, after = zip(*drawn, strict=True)
    nodes = [share([b]) - share([a]) for a, b in drawn]
    return of_nodes(share(after) - share(before), nodes)


@pytest.mark.parametrize(
    ("sizes", "gained", "lost"),
    [
        ((8, 72, 262), 0.15, 0.10),
        ((1000, 40, 12, 8), 0.15, 0.10),
        ((1000, 40, 12, 8), 0.25, 0.05),
        ((30, 60, 100, 200), 0.08, 0.06),
        ((30, 60, 100, 200), 0.30, 0.30),
        ((20,) * 6, 0.15, 0.10),
        ((50,) * 10, 0.25, 0.05),
    ],
)
def test_intervals_of_changed_accuracies_cover_the_truth(
    sizes: tuple[int, ...], gained: float, lost: float
) -> None:
    """Nodes of very different sizes and gains; 93 to 98 % for the mean, for the pool and for the largest node."""
    random = np.random.default_rng(0)
    chances = [(gained * f, lost * (2 - f)) for f in np.linspace(0.5, 1.5, len(sizes))]
    truth, weights = np.array([b - c for b, c in chances]), np.array(sizes) / sum(sizes)
    largest = int(np.argmax(sizes))
    covered = np.zeros(3)
    for _ in range(DRAWS):
        drawn = [answers(random, size, *chance) for size, chance in zip(sizes, chances, strict=True)]
        found = change_of(drawn)
        estimates = (
            (found.mean, truth.mean()),
            (found.pooled, weights @ truth),
            (found.by_node[largest], truth[largest]),
        )
        covered += [abs(each.value - true) <= each.margin for each, true in estimates]
    slack = (0.95 * 0.05 / DRAWS) ** 0.5  # of the simulation itself
    assert np.all(covered / DRAWS > 0.93 - slack), covered / DRAWS
    assert np.all(covered / DRAWS < 0.98 + slack), covered / DRAWS


@pytest.mark.parametrize("examples", [12, 20, 40, 60, 100, 300])
def test_the_interval_of_one_accuracy_covers_the_truth(examples: int) -> None:
    """Summed over all outcomes, not simulated: 93 % at the worst true share, 95 % on average."""
    right = np.arange(examples + 1)
    margins = [share([np.arange(examples) < k]).estimate().margin for k in right]
    truths = np.linspace(0.5, 0.95, 91)[:, None]
    covered = np.abs(right / examples - truths) <= np.array(margins)
    coverage = (binom.pmf(right, examples, truths) * covered).sum(1)
    assert coverage.min() > 0.929
    assert coverage.mean() > 0.95


def test_nodes_that_differ_in_size_are_no_pool() -> None:
    """The mean over nodes is as uncertain as its smallest node makes it: the pooled error does not describe it."""
    random = np.random.default_rng(1)
    found = change_of([answers(random, size, 0.2, 0.1) for size in (8, 72, 262)])
    assert found.mean.standard_error > 1.5 * found.pooled.standard_error


def test_the_error_is_that_of_paired_differences() -> None:
    """For many examples: the standard deviation of the differences over the root of their number."""
    before, after = answers(np.random.default_rng(3), 100_000, 0.2, 0.1)
    found = change_of([(before, after)]).pooled
    assert found.standard_error == pytest.approx((after - before).std() / len(before) ** 0.5, rel=1e-3)


# Coverage


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(60,) * 5, (400, 40, 20, 12)], ids=["equal", "unequal"])
@pytest.mark.parametrize(("about", "name"), ALL)
def test_an_interval_covers_the_truth_as_often_as_it_says(
    about: str, name: str, sizes: tuple[int, ...]
) -> None:
    """Of a metric and of the difference of two models, pooled, over the nodes, and of every node that has an interval: 93 to 98 %, and
    half a percent for chance."""
    task, metric = TASKS[about], TASKS[about].metric(name)
    rng, draws, many = np.random.default_rng(0), 8000, 10

    def everything(sets, other) -> list[Estimate | None]:
        single, change = measure(task, metric, sets), compare(task, metric, sets, other)
        return [e for found in (single, change) for e in (found.pooled, found.mean, *found.by_node)]

    large = [everything(*two_models(about, tuple(many * n for n in sizes), rng)) for _ in range(60)]
    truth = [np.mean([draw[k].value for draw in large]) for k in range(len(large[0]))]
    covered, counted = np.zeros(len(truth)), np.zeros(len(truth))
    for _ in range(draws):
        try:
            found = everything(*two_models(about, sizes, rng))
        except UsageError:  # nobody can say, and nothing is printed
            continue
        for k, each in enumerate(found):
            if each is not None and each.margin is not None and each.examples >= LEAST:
                counted[k] += 1
                covered[k] += abs(each.value - truth[k]) <= each.margin
    shares = 100 * covered[counted > 0] / counted[counted > 0]
    assert (counted[:2] > 0.9 * draws).all()
    assert ((shares >= 92.5) & (shares <= 98.5)).all(), shares


@pytest.mark.parametrize(
    ("value", "margin", "shown"), [(1234.5, 120.0, "+1234 ± 120"), (-0.01234, 0.002, "-0.0123 ± 0.002")]
)
def test_numbers_are_written_without_exponents(value: float, margin: float, shown: str) -> None:
    assert METRICS["rmse"].change(value, margin) == shown
