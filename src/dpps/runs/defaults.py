"""Which batch, epochs, clip and rate a run has whose options leave them open: those of the rule, where there is one."""

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from dpps import models
from dpps.data import DATA_SETS
from dpps.data.schema import read_schema
from dpps.errors import UsageError
from dpps.features import FEATURES
from dpps.learning.algorithm import ALGORITHMS
from dpps.learning.nodes import check_record
from dpps.learning.preflight import refuse_mixing
from dpps.learning.sampling import parse_batch
from dpps.learning.suggestion import CLIP, MOMENTUM, USUAL_CLIP, Suggestion, suggest
from dpps.privacy.units import Plan, PrivacyOptions

if TYPE_CHECKING:
    from dpps.runs.config import TrainConfig


def sizes(config: "TrainConfig") -> tuple[int, ...] | None:
    """What every node holds, as far as options and published facts say: declared sizes, or equal shares of a named data set.
    None: not known before the files are read."""
    declared = config.sizes()
    if declared is not None or config.node_data is not None:
        return declared
    examples = DATA_SETS[config.data].examples
    if examples is None:
        return None
    held = config.hold_out if config.hold_out is not None else 0.0 if config.split == "iid" else 0.1
    return (int(examples / config.nodes * (1 - held)),) * config.nodes


def shape(config: "TrainConfig") -> tuple[int, ...] | None:
    """Of what a model reads of one example of a named data set or by a schema; None: not known before the files are read."""
    if config.node_data is not None:
        if config.schema is None:
            return None
        stored: tuple[int, ...] | None = read_schema(config.schema).shape
        read = stored
    else:
        stored, read = DATA_SETS[config.data].shape, DATA_SETS[config.data].input_shape
    if stored is None:
        return None
    if config.features == "none":
        return read
    with torch.no_grad():
        features: torch.Tensor = FEATURES[config.features](stored)(torch.zeros(1, *stored))
    return tuple(features.shape[1:])


def planned(config: "TrainConfig") -> tuple[Plan, int]:
    """The plan of a run with these options, and how many parameters it shares, before any data is read.

    Args:
        config: resolved.
    """
    held, read = sizes(config), shape(config)
    if config.node_data is None and read is None:
        raise UsageError(
            f"--data {config.data}: its recipe does not say what it holds, so there is nothing to plan with; give the recipe "
            "examples=N and shape=(channels, height, width)"
        )
    if read is None:
        raise UsageError(
            f"--classes {config.classes} does not say how many columns the files have, and a plan reads none of them: give "
            "--schema FILE instead (dpps data describe writes one)"
        )
    if held is None:
        raise UsageError(
            "--declared-sizes is missing: a plan reads no files, so say how many examples each node holds, such as "
            "--declared-sizes 35,90,180"
        )
    assert config.epochs is not None
    algorithm = ALGORITHMS[config.algorithm]
    names = config.model, algorithm.shares(config.shared)
    schema = None if config.schema is None else read_schema(config.schema)
    classes = DATA_SETS[config.data].classes if schema is None else len(schema.classes)
    model, prefixes = models.build(*names, read, classes, norm=config.norm, dropout=0.0)
    made = algorithm(model, prefixes, **config.rates())
    unit = made.unit(config.privacy())
    if unit is not None and config.mixes > 1 and not unit.has_total:
        raise UsageError(
            f"--mixes is {config.mixes}: the unit {unit.name} hides rows, and more steps would send them without noise; use 1, "
            "or the unit record or contribution"
        )
    if unit is not None and unit.per_example:
        check_record(made)
        refuse_mixing(model)
    plan = made.plan(held, config.epochs, config.spare_rounds, unit)
    return plan, made.partition.shared_size


def by_rule(config: "TrainConfig") -> dict[str, Any]:
    """What the rule fills in for options left open. Of data that nobody has described, epochs, batch and rates stay open: the run
    chooses them when it has read its files and all nodes have announced their sizes.

    Args:
        config: with an epsilon or a noise multiplier.
    """
    found = suggestion(config)
    if found is not None:
        part = isinstance(found.batch_size, float)
        chosen = {
            "batch_size": f"{found.batch_size:g}" if part else found.batch_size,
            "epochs": found.epochs,
            "clip": found.clip,
            "momentum": found.momentum,
        }
        return chosen | {"lr_shared": found.rate, "lr_local": found.rate}
    if not _has_rule(config):
        return {}
    rates = {} if config.lr_shared is not None else {"batch_size": None, "lr_shared": None, "lr_local": None}
    clip, momentum = (CLIP, MOMENTUM) if _softmax(config) else (USUAL_CLIP, 0.0)
    return {"epochs": None, "clip": clip, "momentum": momentum, **rates}


def _has_rule(config: "TrainConfig") -> bool:
    left_open = None in (config.batch_size, config.epochs, config.clip, config.momentum, config.lr_shared)
    return config.per_example and config.noisy and left_open


def _softmax(config: "TrainConfig") -> bool:
    """Whether the model is a softmax regression, for which the rule is finer."""
    return config.model in models.MODELS and models.MODELS[config.model].softmax_regression


def mean_noise(config: "TrainConfig") -> float:
    """Deviation of the noise in the network's mean over that of independent noise:
    below 1 where partners share noise that cancels."""
    partners = PrivacyOptions.of(config).trusted().partners(config.nodes)
    return 1.0 if partners is None else partners.shares().independent


def suggestion(config: "TrainConfig") -> Suggestion | None:
    """What the rule says; None where it says nothing: for other units, data nobody has described, or when all is given.

    Args:
        config: with an epsilon or a noise multiplier.
    """
    if not _has_rule(config):
        return None
    held, read = sizes(config), shape(config) if _softmax(config) else ()
    if held is None or read is None:
        return None
    return suggest(
        held,
        prod(read) if _softmax(config) else None,
        epsilon=config.epsilon,
        delta=config.delta,
        noise_multiplier=config.noise_multiplier,
        records_per_user=config.records_per_user,
        spare_rounds=config.spare_rounds,
        mean_noise=mean_noise(config),
        batch_size=None if config.batch_size is None else parse_batch(config.batch_size),
        epochs=config.epochs,
        clip=config.clip,
        momentum=config.momentum,
        local=not _softmax(config) and ALGORITHMS[config.algorithm].shares(config.shared) != "all",
    )
