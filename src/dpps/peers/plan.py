"""From the options of `dpps train` to the plan in a federation file, and back to the options of one member."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dpps.data.schema import read_schema
from dpps.errors import UsageError, unknown
from dpps.learning.algorithm import ALGORITHMS
from dpps.peers.federation import Federation
from dpps.privacy.units import UNITS
from dpps.runs.options import Options

_HERE = Path("data")
"""Stands for the member's own folder while the plan is checked."""


def read_plan(path: Path, members: int) -> tuple[dict[str, Any], str]:
    """The plan and the schema of a new federation, from what `dpps train --print-config` wrote.

    Args:
        path: a TOML file; a schema that it names is read and becomes part of the contract.
        members: how many there are.

    Raises:
        UsageError: it asks for something that members who come and go cannot do.
    """
    config = Options.from_toml(path)
    _check_algorithm(config)
    _refuse(config, members)
    schema = ""
    if config.schema is not None:
        found = config.schema if config.schema.is_absolute() else path.parent / config.schema
        schema = read_schema(found).to_toml()
        config = replace(config, schema=found)
    own = config.schema is not None or config.classes is not None
    config = replace(config, node_data=_HERE if own else None, secure_noise=True).resolve()
    config.network()
    config.privacy()
    return {name: value for name, value in config.common().items() if value is not None}, schema


def config_for(federation: Federation, schema: Path | None = None, **circumstances: Any) -> Options:
    """The options with which one member carries out the contract.

    Args:
        federation: the contract.
        schema: where its schema was written to at home, where it has one.
        circumstances: paths and other options that do not change what is computed.

    Raises:
        UsageError: the plan is none that `read_plan` makes, whoever signed it.
    """
    config = Options.from_json(
        federation.plan, "the plan in the federation file is of another version of dpps"
    )
    _check_algorithm(config)
    _refuse(config, len(federation.members))
    wrong = sorted(
        set(federation.plan) - {name for name, value in config.common().items() if value is not None}
    )
    if wrong:
        raise UsageError(
            f"the plan in the federation file sets {', '.join(wrong)}: that is each member's own to choose"
        )
    if not config.secure_noise:
        raise UsageError(
            "the plan in the federation file has no secure-noise: it is not one of dpps federation create"
        )
    return replace(config, schema=schema, **circumstances)


def _check_algorithm(config: Options) -> None:
    if config.algorithm not in ALGORITHMS:
        raise unknown("algorithm", config.algorithm, ALGORITHMS.names())


def _refuse(config: Options, members: int) -> None:
    """What a run needs that has no barrier and no centre."""
    if config.nodes != members:
        raise UsageError(
            f"the plan has nodes = {config.nodes} and there are {members} requests: make it with dpps train --nodes {members} "
            "--print-config, or give all requests"
        )
    if config.declared_sizes is None:
        raise UsageError(
            "the plan has no declared-sizes: the number of rounds follows from them, and nobody is asked again at the start; add "
            "--declared-sizes N (or one per member, in their order)"
        )
    no_peers = "" if config.unit == "none" else UNITS[config.unit].no_peers
    for option, wrong, why in (
        (f"--unit {config.unit}", bool(no_peers), no_peers),
        ("--sync-every", config.sync_every > 0, "it needs all members at once"),
        ("--mixes", config.mixes > 1, "a message is given on once a round"),
        (
            f"--algorithm {config.algorithm}",
            not ALGORITHMS[config.algorithm].sends_updates,
            "it sends more than an update of its parameters, which a member that was away cannot make up for",
        ),
        ("--trust pairs", config.trust != "nobody", "partners that stay away leave their noise behind"),
        ("--dropouts", config.dropouts > 0, "it simulates what really happens here"),
        ("--track-real", config.track_real, "it looks at all members' rows"),
        ("--weights", config.weights is not None, "the file cannot be part of the contract"),
        ("--seeded-noise", config.seeded_noise, "noise that all know protects nobody"),
    ):
        if wrong:
            raise UsageError(f"{option} in a run between organisations: {why}; leave it out of the plan")
