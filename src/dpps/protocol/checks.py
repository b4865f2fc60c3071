"""Checks before round 0: requests that cannot work or would not be private."""

from typing import TYPE_CHECKING

from torch import Tensor

from dpps.errors import UsageError
from dpps.noise import NoNoise
from dpps.sensitivity import Sensitivity

if TYPE_CHECKING:
    from dpps.protocol.dpps import DPPS


def check_request(protocol: "DPPS") -> None:
    """Refuse what cannot work, or would not be private, before there is a state."""
    topology, fabric, mechanism = protocol.topology, protocol.fabric, protocol.mechanism
    sensitivity, mixes = protocol.sensitivity, protocol.mixes
    hides_start = sensitivity is not None and sensitivity.start_is_private
    if protocol.sync_every < 0:
        raise UsageError(f"sync_every is {protocol.sync_every}: it must be 0 (never) or a number of rounds")
    if mixes < 1:
        raise UsageError(f"mixes is {mixes}: it must be 1 or more gossip steps per message")
    if not fabric.meets and (protocol.sync_every or protocol.hides_rows or hides_start):
        raise UsageError(
            "members come and go: use the unit record or contribution (or none) with a public start, and sync_every=0; node-swap and "
            "synchronisation need everybody in every round"
        )
    if mixes > 1 and protocol.hides_rows:
        raise UsageError(
            f"mixes is {mixes}: the unit node-swap hides rows, and more steps would send them without noise; use 1, or the unit "
            "record or contribution"
        )
    if fabric.nodes != topology.nodes:
        raise UsageError(
            f"the fabric has {fabric.nodes} nodes and the topology {topology.nodes}: make them equal"
        )
    if sensitivity is None and not isinstance(mechanism, NoNoise):
        raise UsageError(
            f"{mechanism} needs a sensitivity: give one, for example Certified() or Paper(c_prime=0.8, decay=0.6)"
        )
    mechanism.event(1.0)  # noise that states no cost is refused now, not booked as something else
    if protocol.recorder.watched and not fabric.simulation:
        raise UsageError(
            "watch evaluates sensitivities on norms and rows that nodes would have to send without noise: it works in simulation only"
        )
    for each in [*([sensitivity] if sensitivity else []), *protocol.recorder.watched.values()]:
        _check_sensitivity(protocol, each)


def _check_sensitivity(protocol: "DPPS", sensitivity: Sensitivity) -> None:
    topology, norm = protocol.topology, protocol.mechanism.norm
    # the real distance may be watched whatever the weights
    is_bound = sensitivity is protocol.sensitivity or not sensitivity.simulation_only
    if is_bound and not sensitivity.base_is_public and not topology.doubly_stochastic:
        raise UsageError(
            f"{sensitivity} needs doubly stochastic weights and {topology} has columns only: "
            "balance the weights, or use a unit other than node-swap"
        )
    if sensitivity.norm not in (None, norm):
        raise UsageError(
            f"{protocol.mechanism} needs a sensitivity in the L{norm} norm and {sensitivity} bounds "
            f"the L{sensitivity.norm} norm: use Laplace noise with it, or the unit contribution or record"
        )
    if sensitivity.simulation_only and not protocol.fabric.simulation:
        raise UsageError(
            f"{sensitivity} looks at everybody's rows: it works in simulation only; use Certified()"
        )


def check_start(protocol: "DPPS", values: Tensor) -> None:
    """Start values are finite floating numbers, one row per node held here."""
    rows = len(protocol.fabric.rows)
    if values.ndim != 2 or values.shape[0] != rows:
        raise UsageError(
            f"start values have shape {tuple(values.shape)}: expected ({rows}, d), one row per node"
        )
    if not values.is_floating_point():
        raise UsageError(f"start values are {values.dtype}: use a floating type, for example values.float()")


def starts_in_common(protocol: "DPPS", values: Tensor, said: bool | None) -> bool:
    """Whether all nodes start from the same public row: as said, or found out in a simulation."""
    private = protocol.sensitivity is not None and protocol.sensitivity.start_is_private
    if private and said:
        raise UsageError(
            f"common_start says that the start is public and {protocol.sensitivity} that it is private: leave common_start out, "
            "or set start_distance to 0"
        )
    equal = bool((values == values[0]).all())
    if said and not equal:
        raise UsageError(
            "common_start says that all nodes start from the same row, and rows held here differ: they would be sent without noise; "
            "leave common_start out, and say how far two rows can be apart (start_distance)"
        )
    if private or said is not None:
        return bool(said)
    if not protocol.fabric.simulation:
        raise UsageError(
            "say whether all nodes start from the same row: start(values, common_start=True or False)"
        )
    return equal
