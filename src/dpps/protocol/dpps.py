"""DPPS, Algorithm 1 of the paper: perturb, estimate the sensitivity, add noise, send, average, correct."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.frozen import Frozen
from dpps.noise import Mechanism, NoiseLevel, NoiseSource, NoNoise, Outgoing, SecureNoise, calibrate, sampled
from dpps.privacy import Ledger, Release, Total
from dpps.privacy.ledger import Rows
from dpps.sensitivity import Memory, ProtocolConfig, Released, RoundView, Sensitivity
from dpps.topology import Topology, Weights
from dpps.transport import Arrived, Exchange, Fabric, Link, Stacked


@dataclass
class State:
    """The rows in this process, and everything that a run needs to continue. Only `DPPS` changes it, when a
    round is complete."""

    s: Tensor
    """(rows, d): the shared vectors s_i."""
    a: Tensor
    """(rows,): the normalising scalars a_i, float64."""
    config: ProtocolConfig
    round: int = 0
    clock: int = 0
    """Counter of topology and synchronisation; `DPPS.restart_clock` sets it to 0."""
    rate: float = 1.0
    """Factor on the noise rate (node-swap) or on the clip (other units)."""
    memory: Memory = field(default_factory=dict)  # of the sensitivity
    watched: dict[str, Memory] = field(default_factory=dict)  # of the watched sensitivities, by name
    link: Link = field(default_factory=dict)  # of the fabric

    @property
    def y(self) -> Tensor:
        """The corrected vectors y_i = s_i / a_i. With doubly stochastic weights a is 1 and y is s itself."""
        a = self.a.to(self.s.dtype)
        return self.s if bool((a == 1).all()) else self.s / a.to(self.s.device)[:, None]


@dataclass(frozen=True)
class Message:
    """What the rows held here release in a round: charged and noised, so it may leave.

    The next release reuses the memory of `rows`.
    """

    rows: Tensor
    view: RoundView
    estimated: float | None
    """The sensitivity; None without one."""
    level: NoiseLevel
    noise_norms: Tensor
    watched: Mapping[str, float]
    gain: float = 1.0
    """How many times longer than the released update its effect on the rows can be; infinite if unknown."""


@dataclass(frozen=True)
class RoundRecord:
    """What a round did. `epsilon` is the pure epsilon of this round's message (infinite where there is none)."""

    round: int
    clock: int
    estimated: float | None
    used: float | None
    """What the noise was calibrated to: the estimate, and what rounding to a grid adds."""
    scale: float
    epsilon: float
    synchronised: bool
    perturbation: float
    """Mean norm of the perturbations of the rows here. Not noised: it must stay at the node."""
    watched: Mapping[str, float] = field(default_factory=dict)
    """Estimates of the watched sensitivities, by name."""

    @property
    def real(self) -> float | None:
        """The real distance of the rows, if it was watched (`watch={"real": Oracle()}`)."""
        return self.watched.get("real")


class DPPS(Frozen):
    r"""Differentially private perturbed push-sum over a topology.

    A round, for each node i, with the perturbation $\varepsilon_i$ and the noise $n_i$, whose scale follows the sensitivity:

    $s_i^{(t+1/2)} = s_i^{(t)} + \varepsilon_i^{(t)}$, then $s_i^{(t+1/2)} + n_i^{(t)}$ is sent,
    $s_i^{(t+1)} = \sum_j W_{ij}^{(t)} (s_j^{(t+1/2)} + n_j^{(t)})$, $a_i^{(t+1)} = \sum_j W_{ij}^{(t)} a_j^{(t)}$, and
    $y_i^{(t+1)} = s_i^{(t+1)} / a_i^{(t+1)}$.

    Args:
        topology: who sends to whom in each round.
        mechanism: the noise; `NoNoise()` is plain push-sum.
        sensitivity: what the noise is calibrated to; needed unless there is no noise.
        sync_every: P: in every round t with (t+1) mod P = 0 all nodes average with everybody (0 = never).
        noise: the source of noise; by default `SecureNoise()`, which is secret. `Seeded(7)` is repeatable
            and faster, for simulations.
        fabric: where the rows are; by default all in this process.
        ledger: records the cost of every message before it is sent; by default in memory.
        sampling: the probability that a record takes part in a round (Poisson sampling): one number, or one
            per row in this process.
        watch: further sensitivities to evaluate in every round without using them, by names you choose
            (simulation only). `{"real": Oracle()}` records the real distance of the rows, which costs O(N^2 d).
        mixes: M, gossip steps per released message. Steps after the first only pass on released messages,
            so they cost nothing where rows are public. node-swap hides the rows themselves and allows one
            step.

    Examples:
        >>> import torch, dpps
        >>> protocol = dpps.DPPS(dpps.Exponential(8), dpps.NoNoise())
        >>> state = protocol.start(torch.arange(8.0)[:, None])
        >>> for _ in range(3):
        ...     record = protocol.step(state)
        >>> state.y.flatten().unique()
        tensor([3.5000])
    """

    fixed = frozenset(
        {"topology", "mechanism", "sensitivity", "sync_every", "fabric", "noise", "mixes"}
        | {"ledger", "watch", "_rows_by_rate"}
    )

    def __init__(
        self,
        topology: Topology,
        mechanism: Mechanism | None = None,
        sensitivity: Sensitivity | None = None,
        *,
        sync_every: int = 0,
        noise: NoiseSource | None = None,
        fabric: Fabric | None = None,
        ledger: Ledger | None = None,
        sampling: float | Sequence[float] = 1.0,
        watch: Mapping[str, Sensitivity] | None = None,
        mixes: int = 1,
    ) -> None:
        self.topology, self.mechanism, self.sensitivity = topology, mechanism or NoNoise(), sensitivity
        self.sync_every, self.mixes = sync_every, mixes
        self.noise = noise or SecureNoise()
        self.fabric = fabric or Stacked(topology.nodes)
        self.watch = MappingProxyType(dict(watch or {}))
        if ledger is not None:
            self.ledger = ledger
        self._rows_by_rate = _rows_by_rate(sampling, self.fabric.rows)
        self._dimension = 0
        self._rows = torch.empty(0)
        _check_request(self)

    @cached_property
    def ledger(self) -> Ledger:
        """Charged with every message before it leaves. In memory, unless another is set before this is first read."""
        return Ledger(self.fabric.rows)

    # Algorithm 1

    def start(self, values: Tensor, *, common_start: bool | None = None) -> State:
        """The state before round 0: s_i = y_i = values_i, a_i = 1.

        Args:
            values: (rows, d), one row per node in this process; copied.
            common_start: whether all nodes start from the same public row. A simulation checks this itself;
                otherwise it must be given. It is never true if the sensitivity says that start values are
                private.
        """
        rows, shape = len(self.fabric.rows), tuple(values.shape)
        _refuse(
            len(shape) != 2 or shape[0] != rows,
            f"start values have shape {shape}: expected ({rows}, d), one row per node",
        )
        _refuse(
            not values.is_floating_point(),
            f"start values are {values.dtype}: use a floating type, for example values.float()",
        )
        self._refuse_non_finite(values.abs().sum(1, dtype=torch.float64), 0, "start value")
        common = _starts_in_common(self, values, common_start)
        self._dimension = values.shape[1]
        config = ProtocolConfig(
            self.fabric, self.topology, self.mechanism, self.sync_every, self._dimension, common
        )
        s = values.detach().clone(memory_format=torch.contiguous_format)
        return State(
            s=s,
            a=torch.ones(rows, dtype=torch.float64),
            config=config,
            memory=self.sensitivity.start(config, s) if self.sensitivity else {},
            watched={name: each.start(config, s) for name, each in self.watch.items()},
            link=self.fabric.start(s, common),
        )

    def step(self, state: State, perturbation: Tensor | None = None) -> RoundRecord:
        """Run one round. It completes and updates `state`, or raises and changes nothing."""
        return self.exchange(state, self.release(state, perturbation))

    def release(self, state: State, perturbation: Tensor | None = None) -> Message:
        """Lines 3 to 5: perturb, estimate the sensitivity, charge the ledger, add noise.

        Nothing is sent yet, and `state` is unchanged.
        """
        eps, norms = self._admit(state, perturbation)
        half = torch.add(state.s, eps, out=self._memory(state.s))  # line 3: s^(t+1/2) = s^(t) + eps^(t)
        view = RoundView(state.config, state.round, state.clock, state.rate, norms, half)
        estimated, level = self._noise_level(state, view)  # line 4: S; node-swap broadcasts one scalar
        watched = {name: each.estimate(state.watched[name], view) for name, each in self.watch.items()}
        self._charge(state.round, level)  # before anything leaves
        noise_norms = self._add_noise(state, eps, half, level)  # line 5: half is the message from here on
        return Message(half, view, estimated, level, noise_norms, watched)

    def exchange(self, state: State, message: Message) -> RoundRecord:
        """Lines 6 to 8: send, average, correct (`State.y`). `state` changes when the round is complete."""
        _refuse(
            message.view.round != state.round,
            f"a message of round {message.view.round} in round {state.round}: release it anew, it was charged for its own round",
        )
        steps = self._gossip(state, message)
        rows = self.fabric.scaled(state.s, message.rows, state.a)
        arrived = self.fabric.gossip(steps, rows, state.a, state.link)  # lines 6 and 7
        return self._complete(state, message, steps[0], arrived)  # line 8: y = s / a

    def post_process(self, state: State, message: Message, change: Tensor, gain: float = math.inf) -> Message:
        """Change the message so that it moves every row by `change` instead of by the released update
        (`message.rows - state.s`).

        For momentum and similar optimizers. `change` must be computed from released updates alone, so it
        costs nothing where rows are public. Elsewhere it is refused.

        Args:
            state: before the round.
            message: of this round.
            change: of every row.
            gain: the most by which `change` can be longer than the updates, over all rounds. Infinite if
                unknown.
        """
        _refuse(
            self.hides_rows or self._hides_start(state),
            "an optimizer of released updates needs rows that are public: use the unit record or contribution and a common start",
        )
        return replace(message, rows=state.s + change, gain=gain)

    # The parts of a round

    def _admit(self, state: State, perturbation: Tensor | None) -> tuple[Tensor, Tensor]:
        """The perturbation and its row norms: zero for absent nodes, clipped where the bound relies on it."""
        eps = torch.zeros_like(state.s) if perturbation is None else perturbation.detach()
        given, expected = tuple(eps.shape), tuple(state.s.shape)
        _refuse(given != expected, f"perturbation has shape {given}: expected {expected}, one row per node")
        # a bound on sums holds before they are rounded to fewer digits: float64 stays as it is until there is noise
        keep = self.hides_updates and eps.dtype == torch.float64
        eps = eps.to(state.s.device, eps.dtype if keep else state.s.dtype).contiguous()
        if (present := self.present(state)) is not None:
            away = torch.from_numpy(~present[list(self.fabric.rows)]).to(eps.device)
            eps = eps.masked_fill(away[:, None], 0.0)
        exact = torch.float64 if self.hides_updates else None  # a clip relies on it
        norms = _row_norms(eps, self.mechanism.norm, exact).to("cpu", torch.float64)
        if self.hides_failures:
            bad = ~torch.isfinite(norms)
            eps, norms = eps.masked_fill(bad.to(eps.device)[:, None], 0.0), norms.masked_fill(bad, 0.0)
        self._refuse_non_finite(norms, state.round, "perturbation")
        return self.sensitivity.admit(eps, norms, state.rate) if self.sensitivity else (eps, norms)

    def _refuse_non_finite(self, norms: Tensor, round_: int, what: str) -> None:
        bad = [self.fabric.rows[k] for k, norm in enumerate(norms.tolist()) if not math.isfinite(norm)]
        _refuse(
            bad,
            f"the {what} of node {', '.join(map(str, bad[:8]))} in round {round_} is NaN or infinite: nothing was sent; "
            "lower the learning rate or clip it",
        )

    def _memory(self, like: Tensor) -> Tensor:
        """Memory for the messages, reused in every round: fresh pages would cost as much as the addition."""
        held = self._rows
        if (held.shape, held.dtype, held.device) != (like.shape, like.dtype, like.device):
            self._rows = torch.empty_like(like)
        return self._rows

    def _noise_level(self, state: State, view: RoundView) -> tuple[float | None, NoiseLevel]:
        """The estimated sensitivity, and the noise calibrated to it."""
        sensitivity, d, norm = self.sensitivity, state.config.dimension, self.mechanism.norm
        if sensitivity is None:
            return None, NoiseLevel(0.0, 0.0, 0.0)
        estimated = sensitivity.estimate(state.memory, view)

        def rounding(step: float) -> float:
            own = sensitivity.rounding(d, step, norm)
            # a private start row is rounded, too, in addition to its perturbation: that costs what it costs in node-swap
            return own + Sensitivity.rounding(sensitivity, d, step, norm) if self._hides_start(state) else own

        rate = state.rate if sensitivity.noise_decays else 1.0
        level = calibrate(self.mechanism, self.noise, estimated, rounding, rate=rate)
        if not level.scale <= torch.finfo(state.s.dtype).max:  # or it is not a number
            growth, why = sensitivity.growth(self.mechanism, d), ""
            if growth is not None:
                why = f"; the estimate grows by decay(1 + 2 c_prime noise_rate d / budget) = {growth:.4g} a round"
            raise RunError(
                f"the sensitivity is {level.sensitivity} in round {state.round}{why}: synchronise more often (sync_every), "
                "share fewer parameters, or add less noise (larger budget or smaller noise rate)"
            )
        return estimated, level

    def _charge(self, round_: int, level: NoiseLevel) -> None:
        """Charge the ledger for this round's messages. A sensitivity of 0 reveals nothing new."""
        used = level.sensitivity if self.sensitivity else math.inf
        if used == 0:
            return
        cost = self.mechanism.cost(used, level.scale)
        # private start values are in the first message whoever is drawn
        with_start = round_ == 0 and self._start_is_private
        for rate, rows in self._rows_by_rate:
            event = sampled(1.0 if with_start else rate, cost)
            self.ledger.charge(Release(round_, event, self.mechanism.name, used, level.scale, rows))

    def _add_noise(self, state: State, eps: Tensor, half: Tensor, level: NoiseLevel) -> Tensor:
        """Turn the rows in `half` into messages. Returns the norms of the noise, if a sensitivity needs them."""
        asked = any(each.needs_noise_norms for each in self._sensitivities)
        with_start = self._hides_start(state)
        rows = _private_rows(state.s, eps, level.step) if with_start else half
        public = self.hides_updates and not with_start
        out = Outgoing(state.s, eps, rows, self.fabric.rows, state.round, public, asked, level.step)
        if (present := self.present(state)) is None:
            norms = self.noise.release(self.mechanism, level.scale, out)
            if with_start:
                half.copy_(rows)
            return norms
        # an absent node sends nothing: its row stays as it is
        here = torch.from_numpy(present[list(self.fabric.rows)])
        nodes, chosen = [r for r in self.fabric.rows if present[r]], here.to(half.device)
        part = replace(
            out, s=state.s[chosen], perturbation=eps[chosen], half=rows[chosen], nodes=nodes, present=present
        )
        norms = torch.zeros(len(here), dtype=torch.float64)
        norms[here] = self.noise.release(self.mechanism, level.scale, part)
        half[chosen] = part.half.to(half)
        return norms

    def _gossip(self, state: State, message: Message) -> list[Exchange]:
        """The gossip steps of the next round. Only the first moves rows by an update and noise."""
        clock, present = state.clock, self.present(state)
        weights = [None] if self.synchronises(clock) else self.gossip_weights(clock)
        ahead: list[Weights | None] = [*weights[1:], None]  # a fabric can prepare for the step after each
        if not self.fabric.simulation and self.sync_every != 1:
            next_mixing = clock + (2 if self.synchronises(clock + 1) else 1)
            ahead[-1] = self.topology.weights(next_mixing * self.mixes)
        both = zip(weights, ahead, strict=True)
        steps = [Exchange(state.round, now, present, then, 0.0, 0.0) for now, then in both]
        step, deviation = self._reach(state, message.level.scale)
        return [replace(steps[0], step=step, deviation=deviation).lengthened(message.gain), *steps[1:]]

    def _complete(self, state: State, message: Message, exchange: Exchange, arrived: Arrived) -> RoundRecord:
        """What has arrived becomes the new state."""
        present, level, view = exchange.present, message.level, message.view
        synchronised = exchange.weights is None and (present is None or bool(present.all()))
        released = Released(
            message.estimated or 0.0, level.scale, message.noise_norms, synchronised, level.step
        )
        memory = self.sensitivity.advance(state.memory, view, released) if self.sensitivity else {}
        watched = {
            name: each.advance(state.watched[name], view, replace(released, estimate=message.watched[name]))
            for name, each in self.watch.items()
        }
        used = level.sensitivity if self.sensitivity else None
        record = RoundRecord(
            round=state.round,
            clock=state.clock,
            estimated=message.estimated,
            used=used,
            scale=level.scale,
            epsilon=math.inf if used is None else self.mechanism.epsilon(used, level.scale),
            synchronised=synchronised,
            perturbation=float(view.perturbation_norms.mean()),
            watched=message.watched,
        )
        state.s, state.a, state.link = arrived.s, arrived.a, arrived.link
        state.memory, state.watched = memory, watched
        state.round, state.clock = state.round + 1, state.clock + 1
        return record

    # Rounds, as everybody knows them beforehand

    def restart_clock(self, state: State, rate: float = 1.0) -> None:
        """Restart the counters of topology and synchronisation and set the factor on the rates (the paper's rate decay)."""
        state.clock, state.rate = 0, rate

    def synchronises(self, clock: int) -> bool:
        """Whether all who are present average in the round of this clock."""
        return self.sync_every > 0 and (clock + 1) % self.sync_every == 0

    def present(self, state: State) -> np.ndarray | None:
        """The nodes that take part in the next round. None: all."""
        return self.topology.present(state.clock * self.mixes)

    def gossip_weights(self, clock: int) -> list[Weights]:
        """The weights of every gossip step of a round that does not synchronise."""
        return [self.topology.weights(clock * self.mixes + k) for k in range(self.mixes)]

    def weights(self, clock: int) -> Weights | None:
        """The weights of a round, all its gossip steps together. None: all who are present average."""
        if self.synchronises(clock):
            return None
        return reduce(lambda before, step: Weights(step.matrix @ before.matrix), self.gossip_weights(clock))

    def growth(self, state: State, rate: float) -> tuple[float, float]:
        """What a round with this factor on the rates adds to an honest node's row: the most that its perturbation moves it
        (L2), and the standard deviation of the noise on each coordinate. Infinite where that is unknown beforehand."""
        return self._reach(replace(state, rate=rate), self.level(state, rate).scale)

    def level(self, state: State, rate: float) -> NoiseLevel:
        """The noise of a round with this factor on the rates, if it does not depend on data."""
        norms = torch.zeros(len(state.s), dtype=torch.float64)
        view = RoundView(state.config, state.round, state.clock, rate, norms, state.s)
        return self._noise_level(replace(state, rate=rate), view)[1]

    def _reach(self, state: State, scale: float) -> tuple[float, float]:
        largest = self.sensitivity.largest_perturbation(state.rate) if self.sensitivity else math.inf
        return largest, self.noise.standard_deviation(self.mechanism, scale, self.present(state))

    # What it cost, and what it hides

    def privacy(self, delta: float, group: int = 1) -> Total:
        """The cost of all messages so far at this delta, from the ledger, for the node that spent the most.

        If the sensitivity depends on the data (node-swap), so does the noise. Then only the sum over rounds
        is known, which is no guarantee for the whole run, and delta is the probability that the sensitivity
        fails. A total over seeded noise is marked as `simulated`, because the messages themselves are not
        protected.

        Args:
            delta: the total delta.
            group: how many records one person may own.
        """
        simulated, rounds = not self.noise.private, self.ledger.messages
        if self.hides_rows:
            if not self.mechanism.pure and rounds:  # rounds without a pure epsilon have no such sum
                return Total(math.inf, delta, "none", None, {}, simulated)
            delta = getattr(self.sensitivity, "delta", 0.0)
            return replace(self.ledger.total(0.0, group), delta=delta, simulated=simulated)
        distance = self.noise.distance(self.mechanism, self._dimension, rounds) if rounds else 0.0
        return replace(self.ledger.total(delta, group, distance=distance), simulated=simulated)

    @property
    def hides_rows(self) -> bool:
        """Whether noise hides whole rows (node-swap)."""
        return self.sensitivity is not None and not self.sensitivity.base_is_public

    @property
    def hides_updates(self) -> bool:
        """Whether noise hides perturbations only: rows follow from earlier messages."""
        return self.sensitivity is not None and self.sensitivity.base_is_public

    @property
    def hides_failures(self) -> bool:
        """Whether a perturbation that is not finite counts as zero, and its noise is sent. Stopping because of one's data is a
        message without noise, so this holds where messages really leave, or where a guarantee is stated (secret noise)."""
        return self.hides_updates and (self.noise.private or not self.fabric.simulation)

    def _hides_start(self, state: State) -> bool:
        """Whether this round's noise hides private start values as well: in round 0 no message has revealed them."""
        return self.hides_updates and state.round == 0 and not state.config.common_start

    @property
    def _start_is_private(self) -> bool:
        return self.sensitivity is not None and self.sensitivity.start_is_private

    @property
    def _sensitivities(self) -> list[Sensitivity]:
        return [*([self.sensitivity] if self.sensitivity else []), *self.watch.values()]


def _row_norms(rows: Tensor, norm: int, dtype: torch.dtype | None) -> Tensor:
    """The L1 or L2 norm of every row, summed in this precision."""
    if norm != 1:
        return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)  # type: ignore[no-any-return]
    width = max(1, (1 << 17) // len(rows))  # pieces whose absolute values stay in the cache
    parts = [piece.abs().sum(1, dtype=dtype) for piece in torch.split(rows, width, dim=1)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _private_rows(s: Tensor, eps: Tensor, step: float) -> Tensor:
    """Start rows plus perturbations in float64, each a whole number of grid steps.

    In float32 the sum would be rounded before it gets onto the grid, which can move two rows further apart than was charged
    for. Steps are powers of two, so dividing by one is exact; rounding a perturbation toward zero lengthens nothing.
    """
    s, eps = s.double(), eps.double()
    return s + eps if step == 0 else (torch.round(s / step) + torch.trunc(eps / step)) * step


def _rows_by_rate(sampling: float | Sequence[float], rows: Sequence[int]) -> list[tuple[float, Rows]]:
    """The rows of each sampling rate; "all" where they have one rate in common."""
    rates = [sampling] * len(rows) if isinstance(sampling, (int, float)) else sampling
    _refuse(
        len(rates) != len(rows),
        f"{len(rates)} sampling rates for {len(rows)} rows: give one per row, or one number",
    )
    groups: dict[float, list[int]] = {}
    for rate, row in zip(rates, rows, strict=True):
        groups.setdefault(float(rate), []).append(row)
    return [(rate, "all" if len(groups) == 1 else tuple(members)) for rate, members in groups.items()]


# Before round 0: requests that cannot work or would not be private


def _refuse(when: object, message: str) -> None:
    if when:
        raise UsageError(message)


def _check_request(protocol: DPPS) -> None:
    topology, fabric, mechanism = protocol.topology, protocol.fabric, protocol.mechanism
    sensitivity, mixes, sync_every = protocol.sensitivity, protocol.mixes, protocol.sync_every
    _refuse(sync_every < 0, f"sync_every is {sync_every}: it must be 0 (never) or a number of rounds")
    _refuse(mixes < 1, f"mixes is {mixes}: it must be 1 or more gossip steps per message")
    _refuse(
        not fabric.meets and (sync_every or protocol.hides_rows or protocol._start_is_private),
        "members come and go: use the unit record or contribution (or none) with a public start, and sync_every=0; node-swap and "
        "synchronisation need everybody in every round",
    )
    _refuse(
        mixes > 1 and protocol.hides_rows,
        f"mixes is {mixes}: the unit node-swap hides rows, and more steps would send them without noise; use 1, or the unit "
        "record or contribution",
    )
    _refuse(
        fabric.nodes != topology.nodes,
        f"the fabric has {fabric.nodes} nodes and the topology {topology.nodes}: make them equal",
    )
    _refuse(
        sensitivity is None and not isinstance(mechanism, NoNoise),
        f"{mechanism} needs a sensitivity: give one, for example Certified() or Paper(c_prime=0.8, decay=0.6)",
    )
    mechanism.event(1.0)  # noise that states no cost is refused now, not booked as something else
    _refuse(
        protocol.watch and not fabric.simulation,
        "watch evaluates sensitivities on norms and rows that nodes would have to send without noise: it works in simulation only",
    )
    norm = mechanism.norm
    for each in protocol._sensitivities:
        # the real distance may be watched whatever the weights
        is_bound = each is sensitivity or not each.simulation_only
        _refuse(
            is_bound and not each.base_is_public and not topology.doubly_stochastic,
            f"{each} needs doubly stochastic weights and {topology} has columns only: balance the weights, or use a unit "
            "other than node-swap",
        )
        _refuse(
            each.norm not in (None, norm),
            f"{mechanism} needs a sensitivity in the L{norm} norm and {each} bounds the L{each.norm} norm: use Laplace noise "
            "with it, or the unit contribution or record",
        )
        _refuse(
            each.simulation_only and not fabric.simulation,
            f"{each} looks at everybody's rows: it works in simulation only; use Certified()",
        )


def _starts_in_common(protocol: DPPS, values: Tensor, said: bool | None) -> bool:
    """Whether all nodes start from the same public row: as said, or found out in a simulation."""
    private, equal = protocol._start_is_private, bool((values == values[0]).all())
    _refuse(
        private and said,
        f"common_start says that the start is public and {protocol.sensitivity} that it is private: leave common_start out, "
        "or set start_distance to 0",
    )
    _refuse(
        said and not equal,
        "common_start says that all nodes start from the same row, and rows held here differ: they would be sent without noise; "
        "leave common_start out, and say how far two rows can be apart (start_distance)",
    )
    if private or said is not None:
        return bool(said)
    _refuse(
        not protocol.fabric.simulation,
        "say whether all nodes start from the same row: start(values, common_start=True or False)",
    )
    return equal
