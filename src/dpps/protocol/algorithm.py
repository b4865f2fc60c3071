"""DPPS, Algorithm 1 of the paper: perturb, estimate the sensitivity, add noise, send, average, correct."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from dpps.errors import UsageError
from dpps.frozen import Frozen
from dpps.noise.events import sampled
from dpps.noise.mechanisms import Mechanism, NoNoise
from dpps.noise.secure import SecureNoise
from dpps.noise.source import NoiseSource
from dpps.privacy.accountant import Total
from dpps.privacy.ledger import Ledger, Release
from dpps.protocol.accounting import bytes_of_round, rows_by_rate
from dpps.protocol.checks import check_request, check_start, starts_in_common
from dpps.protocol.noising import Scratch, add_noise, admit, base_is_public, noise_level
from dpps.protocol.state import Message, RoundRecord, State
from dpps.sensitivity import ProtocolConfig, Released, RoundView, Sensitivity, real_sensitivity
from dpps.topology import Topology, Weights
from dpps.transport import Arrived, Exchange, Fabric, Stacked

PostProcess = Callable[[Tensor], Tensor]
"""From released updates, one row per node, to those that are sent."""


class DPPS(Frozen):
    r"""Differentially private perturbed push-sum over a topology.

    A round, for each node i, with the perturbation $\varepsilon_i$ and the noise $n_i$, whose scale follows the sensitivity:

    $s_i^{(t+1/2)} = s_i^{(t)} + \varepsilon_i^{(t)}$, then $s_i^{(t+1/2)} + n_i^{(t)}$ is sent,
    $s_i^{(t+1)} = \sum_j W_{ij}^{(t)} (s_j^{(t+1/2)} + n_j^{(t)})$, $a_i^{(t+1)} = \sum_j W_{ij}^{(t)} a_j^{(t)}$, and
    $y_i^{(t+1)} = s_i^{(t+1)} / a_i^{(t+1)}$.

    Args:
        topology: who sends to whom in which round.
        mechanism: the noise; `NoNoise()` is plain push-sum.
        sensitivity: what the noise is calibrated to; needed unless there is no noise.
        sync_every: P: in every round t with (t+1) mod P = 0 all nodes average with everybody (0 = never).
        noise: where noise comes from; by default `SecureNoise()`, which nobody can know. `Seeded(7)` repeats, and is faster: for simulation.
        fabric: where the rows live; by default all of them here.
        ledger: charged with every message before it leaves; by default one in memory.
        sampling: the chance that one record's data takes part in a round (Poisson sampling): one number, or one per row here.
        watch: further sensitivities to evaluate in every round without using them (simulation only).
        track_real: also compute the real sensitivity (costs O(N^2 d) and needs all rows here).
        mixes: M, gossip steps per released message. What is passed on after the first is made of messages, so it
            costs nothing where rows are public; node-swap hides the rows themselves and has one step.

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
        | {"ledger", "watch", "track_real", "_rows_by_rate"}
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
        track_real: bool = False,
        mixes: int = 1,
    ) -> None:
        self.topology, self.mixes = topology, mixes
        self.mechanism = mechanism or NoNoise()
        self.sensitivity = sensitivity
        self.sync_every = sync_every
        self.noise = noise or SecureNoise()
        self.fabric = fabric or Stacked(topology.nodes)
        if ledger is not None:
            self.ledger = ledger
        self._rows_by_rate = rows_by_rate(sampling, self.fabric.rows)
        self._dimension = 0
        self.watch = MappingProxyType(dict(watch or {}))
        self.track_real = track_real
        self._scratch = Scratch()
        check_request(self)

    @cached_property
    def ledger(self) -> Ledger:
        """Charged with every message before it leaves. One that is set before it is asked for stays; otherwise it is in memory."""
        return Ledger(self.fabric.rows)

    def start(self, values: Tensor, *, common_start: bool | None = None) -> State:
        """The state before round 0: s_i = y_i = values_i, a_i = 1.

        Args:
            values: (rows, d), one row per node held here; kept as a copy.
            common_start: whether all nodes start from the same public row. A simulation finds out by itself; elsewhere it must be
                given. It is never true where the sensitivity says that start values are private.
        """
        check_start(self, values)
        common = starts_in_common(self, values, common_start)
        config = ProtocolConfig(
            self.fabric, self.topology, self.mechanism, self.sync_every, values.shape[1], common
        )
        self._dimension = values.shape[1]
        s = values.detach().clone(memory_format=torch.contiguous_format)
        return State(
            s=s,
            a=torch.ones(len(s), dtype=torch.float64),
            config=config,
            memory=self.sensitivity.start(config, s) if self.sensitivity else {},
            watched={name: w.start(config, s) for name, w in self.watch.items()},
            link=self.fabric.start(s, common),
        )

    def restart_clock(self, state: State, rate: float = 1.0) -> None:
        """Restart the counters of topology and synchronisation and set the factor on the rates (the paper's rate decay)."""
        state.clock, state.rate = 0, rate

    def step(
        self,
        state: State,
        perturbation: Tensor | None = None,
        finish: PostProcess | None = None,
        gain: float = math.inf,
    ) -> RoundRecord:
        """One round of Algorithm 1. It completes, or raises and leaves `state` as it was.

        Args:
            state: changed when the round is complete.
            perturbation: the private part of every row.
            finish: turns the released updates (message minus row, noise included) into those that are sent: momentum and the
                like. It costs nothing, because rows are public; so it is refused where they are not.
            gain: how much longer than the updates what `finish` makes of them can be, over all rounds; infinite: not known.
        """
        if finish is not None and self.sensitivity is not None and not base_is_public(self, state):
            raise UsageError(
                "an optimizer of released updates needs rows that are public: use the unit record or "
                "contribution and a common start"
            )
        message = self.release(state, perturbation)
        exchange = self._exchange(state, message.level.scale)
        if finish is not None:
            message = replace(message, rows=state.s + finish(message.rows - state.s))
            exchange = exchange.lengthened(gain)
        if not self.fabric.meets:
            message = replace(message, rows=self._scaled(state, message.rows))
        arrived = Arrived(message.rows, state.a, state.link, frozenset())
        for part in self._gossip(state, exchange):
            self.fabric.push(part, arrived.s, arrived.a, arrived.link)
            arrived = self.fabric.collect()
        return self._accept(state, message, exchange, arrived)

    def _scaled(self, state: State, rows: Tensor) -> Tensor:
        """Messages whose updates are scaled by their node's own a, which depends on the network alone:
        y moves by the update as it was released. Rows are public, so this is post-processing."""
        assert self.sensitivity is None or base_is_public(self, state)
        return state.s + state.a.to(state.s)[:, None] * (rows - state.s)

    def _gossip(self, state: State, exchange: Exchange) -> Iterator[Exchange]:
        """The gossip steps of a round. Only the first one passes on something new:
        after it rows move by no perturbation or noise."""
        if exchange.weights is None or self.mixes == 1:
            yield exchange
            return
        steps = [self.topology.weights(self.time(state) + k) for k in range(self.mixes)]
        ahead = [*steps[1:], exchange.ahead] if not self.fabric.simulation else [None] * self.mixes
        yield replace(exchange, ahead=ahead[0])
        for weights, following in zip(steps[1:], ahead[1:], strict=True):
            yield replace(exchange, weights=weights, ahead=following, step=0.0, deviation=0.0)

    def release(self, state: State, perturbation: Tensor | None = None) -> Message:
        """Perturb, estimate the sensitivity, charge the ledger, add noise. Nothing has been sent, and `state` is as it was."""
        eps, norms = admit(self, state, perturbation)
        half = torch.add(state.s, eps, out=self._scratch.like(state.s))  # s^(t+1/2) = s^(t) + eps^(t)
        view = RoundView(state.config, state.round, state.clock, state.rate, norms, half)
        real = real_sensitivity(half, self.mechanism.norm) if self.track_real else None
        estimated, level = noise_level(self, state, view)
        watched = {name: w.estimate(state.watched[name], view) for name, w in self.watch.items()}
        self._charge(state.round, level.sensitivity if self.sensitivity else None, level.scale)
        noise_norms = add_noise(self, state, eps, half, level)  # half is the message from here on
        return Message(half, view, estimated, level, noise_norms, real, watched)

    def growth(self, state: State, rate: float) -> tuple[float, float]:
        """What a round with this factor on the rates adds to an honest node's row, where that is known beforehand: the most that its
        perturbation moves it (L2), and the standard deviation of the noise on each coordinate. Infinite: not known."""
        state = replace(state, rate=rate)
        norms = torch.zeros(len(state.s), dtype=torch.float64)
        view = RoundView(state.config, state.round, state.clock, rate, norms, state.s)
        exchange = self._exchange(state, noise_level(self, state, view)[1].scale)
        return exchange.step, exchange.deviation

    def _accept(self, state: State, message: Message, exchange: Exchange, arrived: Arrived) -> RoundRecord:
        """Take up what has arrived: the round is complete."""
        present, scale, view = exchange.present, message.level.scale, message.view
        synchronised = exchange.weights is None and (present is None or bool(present.all()))
        used, step = (message.level.sensitivity if self.sensitivity else None), message.level.step
        released = Released(message.estimated or 0.0, scale, message.noise_norms, synchronised, step)
        if self.sensitivity:
            state.memory = self.sensitivity.advance(state.memory, view, released)
        state.watched = {
            name: w.advance(state.watched[name], view, replace(released, estimate=message.watched[name]))
            for name, w in self.watch.items()
        }
        record = RoundRecord(
            round=state.round,
            estimated=message.estimated,
            used=used,
            real=message.real,
            scale=scale,
            epsilon=self.mechanism.epsilon(used, scale) if used is not None else math.inf,
            bytes=bytes_of_round(self, state),
            synchronised=synchronised,
            watched=message.watched,
            update_to_noise=self._update_to_noise(message, present),
        )
        state.s, state.a, state.link = arrived.s, arrived.a, arrived.link
        state.round, state.clock = state.round + 1, state.clock + 1
        return record

    def _update_to_noise(self, message: Message, present: np.ndarray | None) -> float | None:
        scale, d = message.level.scale, message.rows.shape[1]
        if scale == 0 or not d:
            return None
        # with partners it is more than the scale
        deviation = self.noise.deviation(self.mechanism, scale, present)
        expected = scale * d if self.mechanism.norm == 1 else deviation * math.sqrt(d)
        return float(message.view.perturbation_norms.mean()) / expected

    def privacy(self, delta: float, group: int = 1) -> Total:
        """What all messages so far cost the node that paid most, at this delta, from the ledger.

        Where the sensitivity depends on the data (node-swap) so does the noise, and only the plain sum of the rounds is known, which
        is no guarantee for all of them together; delta is the chance that the sensitivity fails. A total over seeded noise is marked
        as `simulated`, and says so when it is printed: these very messages are not protected.

        Args:
            delta: the whole allowance.
            group: how many records one person may own.
        """
        simulated, rounds = not self.noise.private, self.ledger.messages
        if self.sensitivity is not None and not self.sensitivity.base_is_public:
            if not self.mechanism.pure and rounds:  # rounds without a pure epsilon have no such sum
                return Total(math.inf, delta, "none", None, {}, simulated)
            delta = getattr(self.sensitivity, "delta", 0.0)
            return replace(self.ledger.total(0.0, group), delta=delta, simulated=simulated)
        distance = self.noise.distance(self.mechanism, self._dimension, rounds) if rounds else 0.0
        return replace(self.ledger.total(delta, group, distance=distance), simulated=simulated)

    def _charge(self, round_: int, used: float | None, scale: float) -> None:
        """Write the release down before it leaves. A sensitivity of 0 means: nothing new is revealed."""
        if used == 0:
            return
        sensitivity = math.inf if used is None else used
        cost = self.mechanism.cost(sensitivity, scale)
        # private start values are in the first message whoever is drawn
        with_start = round_ == 0 and self.sensitivity is not None and self.sensitivity.start_is_private
        for rate, rows in self._rows_by_rate:
            event = sampled(1.0 if with_start else rate, cost)
            self.ledger.charge(Release(round_, event, self.mechanism.name, sensitivity, scale, rows))

    @property
    def hides_failures(self) -> bool:
        """Stopping because of one's data is a message without noise: where messages really leave, or nobody knows the noise and
        so a guarantee is stated, a perturbation that is not finite counts as zero and noise is sent all the same."""
        real = self.noise.private or not self.fabric.simulation
        return real and self.sensitivity is not None and self.sensitivity.base_is_public

    def time(self, state: State) -> int:
        """The counter of the topology: every gossip step is a step of it."""
        return state.clock * self.mixes

    def present(self, state: State) -> np.ndarray | None:
        """Who takes part in the next round; None: everybody."""
        return self.topology.present(self.time(state))

    def weights(self, clock: int) -> Weights | None:
        """Those of a round by its clock, all its gossip steps together; None in a synchronisation round,
        in which all who are present average."""
        if self.synchronises(clock):
            return None
        first = self.topology.weights(clock * self.mixes)
        if self.mixes == 1:
            return first
        product = first.matrix
        for k in range(1, self.mixes):
            product = self.topology.weights(clock * self.mixes + k).matrix @ product
        entries = product.tocoo()
        return Weights.from_entries(self.topology.nodes, entries.row, entries.col, entries.data)

    def _exchange(self, state: State, scale: float) -> Exchange:
        """The round as everybody knows it beforehand."""
        ahead = None
        if not self.fabric.simulation and self.sync_every != 1:
            following = state.clock + (2 if self.synchronises(state.clock + 1) else 1)
            ahead = self.topology.weights(following * self.mixes)
        return Exchange(
            state.round,
            None if self.synchronises(state.clock) else self.topology.weights(self.time(state)),
            self.topology.present(self.time(state)),
            ahead,
            self.sensitivity.largest_perturbation(state.rate) if self.sensitivity else math.inf,
            self.noise.deviation(self.mechanism, scale, self.present(state)),
        )

    def synchronises(self, clock: int) -> bool:
        """Whether all who are present average in the round of this clock."""
        return self.sync_every > 0 and (clock + 1) % self.sync_every == 0
