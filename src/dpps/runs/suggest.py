"""Chooses batch size, epochs, clip and rate where the options leave them open, by the rule if there is one."""

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from dpps import models
from dpps.callables import is_own
from dpps.data import DATA_SETS
from dpps.data.schema import read_schema
from dpps.errors import UsageError
from dpps.features import output_shape
from dpps.learning.algorithm import ALGORITHMS
from dpps.learning.nodes import check_record
from dpps.learning.preflight import refuse_mixing
from dpps.learning.sampling import parse_batch
from dpps.learning.suggestion import MOMENTUM, Suggestion, suggest, suggested_clip
from dpps.privacy.units import Plan, PrivacyOptions
from dpps.tasks import Classification, Task

if TYPE_CHECKING:
    from dpps.runs.options import Options


def sizes(options: "Options") -> tuple[int, ...] | None:
    """What every node holds, as far as options and published facts say: declared sizes, or equal shares of a named data set.
    None: not known before the files are read."""
    declared = options.sizes()
    if declared is not None or options.node_data is not None:
        return declared
    examples = DATA_SETS[options.data].examples
    if examples is None:
        return None
    held = options.hold_out if options.hold_out is not None else 0.0 if options.split == "iid" else 0.1
    return (int(examples / options.nodes * (1 - held)),) * options.nodes


def shape(options: "Options") -> tuple[int, ...] | None:
    """Of what a model reads of one example of a named data set or by a schema; None: not known before the files are read."""
    if options.node_data is not None:
        if options.schema is None:
            return None
        stored: tuple[int, ...] | None = read_schema(options.schema).shape
        read = stored
    else:
        stored, read = DATA_SETS[options.data].shape, DATA_SETS[options.data].input_shape
    if stored is None:
        return None
    if options.features == "none":
        return read
    return output_shape(options.features, stored)


def length(options: "Options") -> float | None:
    """How long the inputs of tables are by their schema; None: not known."""
    if options.node_data is None or options.schema is None or options.features != "none":
        return None
    return read_schema(options.schema).length


def planned_task(options: "Options") -> Task:
    """What a run with these options predicts."""
    if options.schema is not None:
        return weighted(options, read_schema(options.schema).task)
    classes = DATA_SETS[options.data].classes if options.node_data is None else options.classes
    return weighted(options, Classification(tuple(map(str, range(classes or 0)))))


def check_task(options: "Options") -> None:
    """Refuse metrics and weights of classes that do not suit what is predicted."""
    if options.measures() or options.class_weights is not None:
        task = planned_task(options)
        for name in options.measures():
            task.metric(name)


def weighted(options: "Options", task: Task) -> Task:
    """The task with the weights of classes that the options say."""
    if options.class_weights is None:
        return task
    if not isinstance(task, Classification):
        raise UsageError(f"--class-weights: {task.name} has no classes: leave it out")
    try:
        weights = tuple(float(part) for part in options.class_weights.split(","))
    except ValueError as error:
        raise UsageError(
            f"--class-weights is {options.class_weights!r}: give one number for each of {len(task.classes)} classes, such as 1,6"
        ) from error
    return replace(task, weights=weights)


def planned(options: "Options") -> tuple[Plan, int]:
    """The plan of a run with these options, and how many parameters it shares, before any data is read.

    Args:
        options: resolved.
    """
    held, read = sizes(options), shape(options)
    if options.node_data is None and read is None:
        raise UsageError(
            f"--data {options.data}: its recipe does not say what it holds, so there is nothing to plan with; give the recipe "
            "examples=N and shape=(channels, height, width)"
        )
    if read is None:
        raise UsageError(
            f"--classes {options.classes} does not say how many columns the files have, and a plan reads none of them: give "
            "--schema FILE instead (dpps data describe writes one)"
        )
    if held is None:
        raise UsageError(
            "--declared-sizes is missing: a plan reads no files, so say how many examples each node holds, such as "
            "--declared-sizes 35,90,180"
        )
    assert options.epochs is not None
    algorithm = ALGORITHMS[options.algorithm]
    names = options.model, algorithm.shares(options.shared)
    task = planned_task(options)
    network, prefixes = models.build(*names, read, task.outputs, norm=options.norm, dropout=0.0)
    model, prefixes = task.head(network), task.shared(prefixes)
    facts: dict[str, Any] = {
        "task": task,
        "input_length": length(options),
        "pretrained": is_own(options.features),
    }
    made = algorithm(model, prefixes, **facts, **options.rates())
    unit = made.unit(options.privacy())
    if unit is not None and options.mixes > 1 and not unit.has_total:
        raise UsageError(
            f"--mixes is {options.mixes}: the unit {unit.name} hides rows, and more steps would send them without noise; use 1, "
            "or the unit record or contribution"
        )
    if unit is not None and unit.per_example:
        check_record(made)
        refuse_mixing(model)
    plan = made.plan(held, options.epochs, options.spare_rounds, unit)
    return plan, made.partition.shared_size


def by_rule(options: "Options") -> dict[str, Any]:
    """What the rule fills in for options left open. Of data that nobody has described, epochs, batch and rates stay open: the run
    chooses them when it has read its files and all nodes have announced their sizes.

    Args:
        options: with an epsilon or a noise multiplier.
    """
    found = suggestion(options)
    if found is not None:
        part = isinstance(found.batch_size, float)
        chosen = {
            "batch_size": f"{found.batch_size:g}" if part else found.batch_size,
            "epochs": found.epochs,
            "clip": found.clip,
            "momentum": found.momentum,
        }
        return chosen | {"lr_shared": found.rate, "lr_local": found.rate}
    if not _has_rule(options):
        return {}
    rates = {} if options.lr_shared is not None else {"batch_size": None, "lr_shared": None, "lr_local": None}
    long = length(options) if _softmax(options) else None
    clip, momentum = (
        suggested_clip(long, softmax=_softmax(options)),
        MOMENTUM if _softmax(options) and long is None else 0.0,
    )
    return {"epochs": None, "clip": clip, "momentum": momentum, **rates}


def _has_rule(options: "Options") -> bool:
    left_open = None in (
        options.batch_size,
        options.epochs,
        options.clip,
        options.momentum,
        options.lr_shared,
    )
    return options.per_example and options.noisy and left_open


def _softmax(options: "Options") -> bool:
    """Whether the model is a softmax regression, for which the rule is finer."""
    return options.model in models.MODELS and models.MODELS[options.model].softmax_regression


def mean_noise(options: "Options") -> float:
    """Deviation of the noise in the network's mean over that of independent noise:
    below 1 where partners share noise that cancels."""
    partners = PrivacyOptions.of(options).trusted().partners(options.nodes)
    return 1.0 if partners is None else partners.shares().independent


def suggestion(options: "Options") -> Suggestion | None:
    """What the rule says; None where it says nothing: for other units, data nobody has described, or when all is given.

    Args:
        options: with an epsilon or a noise multiplier.
    """
    if not _has_rule(options):
        return None
    held, read = sizes(options), shape(options) if _softmax(options) else ()
    if held is None or read is None:
        return None
    task = planned_task(options)
    return suggest(
        held,
        prod(read) if _softmax(options) else None,
        epsilon=options.epsilon,
        delta=options.delta,
        noise_multiplier=options.noise_multiplier,
        records_per_user=options.records_per_user,
        spare_rounds=options.spare_rounds,
        mean_noise=mean_noise(options),
        batch_size=None if options.batch_size is None else parse_batch(options.batch_size),
        epochs=options.epochs,
        clip=options.clip,
        momentum=options.momentum,
        length=length(options) if _softmax(options) else None,
        output_noise=task.output_noise,
        steepest=task.steepest,
        pretrained=is_own(options.features),
        local=not _softmax(options) and ALGORITHMS[options.algorithm].shares(options.shared) != "all",
    )
