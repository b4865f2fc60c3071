"""What a protocol refuses: requests that cannot work or would not be private, and rows that are no numbers."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.noise.mechanisms import NoNoise
from dpps.sensitivity import Sensitivity
from dpps.transport import Fabric

if TYPE_CHECKING:
    from dpps.protocol.algorithm import DPPS


def check_request(protocol: "DPPS") -> None:
    """What cannot work, or would not be private, is refused before there is a state."""
    if protocol.sync_every < 0:
        raise UsageError(f"sync_every is {protocol.sync_every}: it must be 0 (never) or a number of rounds")
    _check_coming_and_going(protocol)
    _check_mixes(protocol)
    if protocol.fabric.nodes != protocol.topology.nodes:
        raise UsageError(
            f"the fabric has {protocol.fabric.nodes} nodes and the topology {protocol.topology.nodes}: make them equal"
        )
    if protocol.sensitivity is None and not isinstance(protocol.mechanism, NoNoise):
        raise UsageError(
            f"{protocol.mechanism} needs a sensitivity: give one, for example Certified() or Paper(c_prime=0.8, decay=0.6)"
        )
    protocol.mechanism.event(1.0)  # noise that states no cost is refused now, not booked as something else
    for sensitivity in sensitivities_of(protocol):
        if sensitivity.needs_double_stochasticity and not protocol.topology.doubly_stochastic:
            raise UsageError(
                f"{sensitivity} needs doubly stochastic weights and {protocol.topology} has columns only: "
                "balance the weights, or use a unit other than node-swap"
            )
        if sensitivity.norm not in (None, protocol.mechanism.norm):
            raise UsageError(
                f"{protocol.mechanism} needs a sensitivity in the L{protocol.mechanism.norm} norm and {sensitivity} bounds "
                f"the L{sensitivity.norm} norm: use Laplace noise with it, or the unit contribution or record"
            )
        if sensitivity.simulation_only and not protocol.fabric.simulation:
            raise UsageError(
                f"{sensitivity} looks at everybody's rows: it works in simulation only; use Certified()"
            )
    if protocol.watch and not protocol.fabric.simulation:
        raise UsageError(
            "watch evaluates sensitivities on norms that nodes would have to send without noise: it works in simulation only"
        )
    if protocol.track_real and not protocol.fabric.simulation:
        raise UsageError("track_real looks at everybody's rows: it works in simulation only")


def check_start(protocol: "DPPS", values: Tensor) -> None:
    """Start values are finite floating numbers, one row per node held here."""
    rows = len(protocol.fabric.rows)
    if values.ndim != 2 or values.shape[0] != rows:
        raise UsageError(
            f"start values have shape {tuple(values.shape)}: expected ({rows}, d), one row per node"
        )
    if not values.is_floating_point():
        raise UsageError(f"start values are {values.dtype}: use a floating type, for example values.float()")
    refuse_non_finite(values.abs().sum(1, dtype=torch.float64), protocol.fabric, 0, "start value")


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


def _check_coming_and_going(protocol: "DPPS") -> None:
    """What needs everybody in every round."""
    hidden = protocol.sensitivity is not None and not protocol.sensitivity.base_is_public
    if not protocol.fabric.meets and (protocol.sync_every or protocol.mixes > 1 or hidden):
        raise UsageError(
            "members come and go: use the unit record or contribution (or none), sync_every=0 and mixes=1; node-swap and "
            "synchronisation need everybody in every round, and further gossip steps would have to wait for everybody"
        )


def _check_mixes(protocol: "DPPS") -> None:
    if protocol.mixes < 1:
        raise UsageError(f"mixes is {protocol.mixes}: it must be 1 or more gossip steps per message")
    if protocol.mixes > 1 and protocol.sensitivity is not None and not protocol.sensitivity.base_is_public:
        raise UsageError(
            f"mixes is {protocol.mixes}: the unit node-swap hides rows, and more steps would send them "
            "without noise; use 1, or the "
            "unit record or contribution"
        )


def sensitivities_of(protocol: "DPPS") -> list[Sensitivity]:
    """The one that noise is calibrated to, and those that are watched."""
    return [*([protocol.sensitivity] if protocol.sensitivity else []), *protocol.watch.values()]


def row_norms(rows: Tensor, norm: int, dtype: torch.dtype | None) -> Tensor:
    """The L1 or L2 norm of every row, summed in this precision."""
    if norm != 1:
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
        return norms
    width = max(1, (1 << 17) // len(rows))  # pieces whose absolute values stay in the cache
    parts = [piece.abs().sum(1, dtype=dtype) for piece in torch.split(rows, width, dim=1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def refuse_non_finite(norms: Tensor, fabric: Fabric, round_: int, what: str) -> None:
    """Stop before anything is sent where a row is NaN or infinite, and say whose."""
    bad = [k for k, norm in enumerate(norms.tolist()) if not math.isfinite(norm)]
    if bad:
        names = ", ".join(str(fabric.rows[k]) for k in bad[:8])
        raise UsageError(
            f"the {what} of node {names} in round {round_} is NaN or infinite: nothing was sent; lower the "
            "learning rate or clip it"
        )
