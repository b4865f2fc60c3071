r"""Survival: proportional hazards in discrete time.

Time is cut at public edges $e_1 < ... < e_K$ into intervals $(e_{j-1}, e_j]$. A patient who is under observation at the start of
interval j and has the linear predictor $\eta(x)$ has the event within it with probability

$$ h_j(x) = \sigma(\eta(x) + b_j), $$

with one bias $b_j$ per interval. A patient's log-likelihood is a sum over the intervals that the patient was observed in: those
survived to the end, and the one with the event. Patients who leave during an interval, or after the last edge, count up to then.
So every patient has a gradient of their own, which can be clipped. Cox's partial likelihood compares patients with each other and
has no such gradient (Andreux, Manoel, Menuet, Saillard, Simpson, "Federated Survival Analysis with Discrete-Time Cox Models",
2020, arXiv:2006.08997).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpps.errors import UsageError
from dpps.tasks.estimates import Measured, mean
from dpps.tasks.metrics import Metric, Set
from dpps.tasks.task import TASKS, Column, Draft, Task, column, numbers, only, roles, rounded_range

START = -3.0
"""Of every bias: an event in 5 % of the intervals, which is public and near what most studies have."""
SHARE = 0.5
"""How much a parameter of the baseline moves its bias. Biases rank nobody: halved gradients leave them less of the clip."""

_DRAFTED = 6  # intervals of a draft
_OBSERVED = {"0": ("false", "no", "n"), "1": ("true", "yes", "y")}


class Hazards(nn.Module):
    """A network with one output, and a bias for every interval: logits of proportional hazards. The network's own last bias would
    be redundant: it is zero and stays so."""

    def __init__(self, network: nn.Module, intervals: int) -> None:
        super().__init__()
        self.network = network
        last = [module for module in network.modules() if list(module.parameters(recurse=False))][-1]
        if isinstance(last, nn.Linear) and last.bias is not None:
            nn.init.zeros_(last.bias)
            last.bias.requires_grad_(False)
        self.baseline = nn.Parameter(torch.zeros(intervals))

    def forward(self, x: Tensor) -> Tensor:
        """(examples, intervals)."""
        found: Tensor = self.network(x) + (START + SHARE * self.baseline)
        return found


@dataclass(frozen=True)
class HazardLoss:
    """Minus the log-likelihood of each example's observed intervals."""

    edges: tuple[float, ...]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per example, from logits of the hazards (examples, intervals) and time and event (examples, 2)."""
        happened, observed = self.intervals(targets, outputs.dtype)
        return (observed * F.softplus(outputs) - happened * outputs).sum(-1)

    def intervals(self, targets: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Of every example and interval whether the event happened in it, and whether it was observed to its end or to the event."""
        ends = torch.tensor(self.edges, dtype=targets.dtype, device=targets.device)
        starts = torch.cat([torch.full_like(ends[:1], -torch.inf), ends[:-1]])
        time, event = targets[..., :1], targets[..., 1:2] > 0
        happened = event & (time > starts) & (time <= ends)
        return happened.to(dtype), (happened | (time >= ends)).to(dtype)


@TASKS.register("survival")
@dataclass(frozen=True)
class Survival(Task):
    """Predict when an event happens. For some examples it is only known that it had not happened by a
    certain time.

    Attributes:
        edges: the ends of the time intervals, in increasing order.
        time: the column with the time of the event, or of the last observation.
        event: the column that says whether the event was observed (1) or not (0).
    """

    edges: tuple[float, ...]
    time: str = "time"
    event: str = "event"

    name = "survival"
    kind = "survival"
    about = "times"
    metrics = ("c-index", "log-loss")
    steepest = 8.0  # five intervals with hazards of 5 % have the curvature 1/4
    example: ClassVar[Mapping[str, Any]] = {"time": "months", "event": "died", "edges": [6, 12, 24, 48]}

    def __post_init__(self) -> None:
        if not self.edges or any(a >= b for a, b in zip((0.0, *self.edges), self.edges, strict=False)):
            raise UsageError(f"edges are {list(self.edges)}: give one or more times above 0, in rising order")

    @classmethod
    def parse(cls, entry: Mapping[str, Any], where: str) -> Self:
        only(entry, ("time", "event", "edges"), where)
        time, event = column(entry, "time", where), column(entry, "event", where)
        if time == event:
            raise UsageError(f"{where}: time and event are both {time!r}: they are two columns")
        return cls(numbers(entry, "edges", where, "[365, 730, 1825]"), time, event)

    @classmethod
    def draft(cls, columns: Mapping[str, Draft], where: str) -> Self:
        time, event = roles(columns, ("time", "event"), cls.name)
        known = Column(event.name, "category", values=("0", "1"), aliases=_OBSERVED).places
        others = [text for text in event.texts if text.lower() not in known]
        if others:
            raise UsageError(
                f"{where}: the event {event.name!r} is {others[0]!r} somewhere: write 1 where it was observed and 0 where it was not"
            )
        longest = rounded_range([0.0, max(0.0, *time.amounts(where))])[1]
        edges = tuple(float(f"{longest * k / _DRAFTED:.3g}") for k in range(1, _DRAFTED + 1))
        return cls(edges, time.name, event.name)

    def declaration(self) -> dict[str, Any]:
        return {"time": self.time, "event": self.event, "edges": self.edges}

    @property
    def columns(self) -> tuple[Column, ...]:
        time = Column(self.time, "number", (0.0, self.edges[-1]))
        return time, Column(self.event, "category", values=("0", "1"), aliases=_OBSERVED)

    def targets(self, columns: Sequence[np.ndarray]) -> Tensor:
        time, event = (np.asarray(part, dtype=np.float64) for part in columns)
        return torch.from_numpy(np.stack([np.clip(time, 0.0, None), event], axis=1)).float()

    @property
    def outputs(self) -> int:
        return 1

    def head(self, network: nn.Module) -> nn.Module:
        return Hazards(network, len(self.edges))

    def shared(self, prefixes: tuple[str, ...]) -> tuple[str, ...]:
        return (*(f"network.{prefix}" for prefix in prefixes), "baseline")

    @cached_property
    def loss(self) -> Any:
        return HazardLoss(self.edges)

    def constant(self, targets: Tensor) -> Tensor:
        happened, observed = HazardLoss(self.edges).intervals(targets, torch.float64)
        return torch.logit((happened.sum(0) + 0.5) / (observed.sum(0) + 1)).float()

    def predictions(self, outputs: Tensor) -> dict[str, list[Any]]:
        left = (-F.softplus(outputs.double())).cumsum(1).exp()
        shown = {f"survival at {edge:g}": left[:, k].tolist() for k, edge in enumerate(self.edges)}
        return {"risk": (1 - left[:, -1]).tolist(), **shown}

    def metric(self, name: str) -> Metric:
        return self._log_loss if name == "log-loss" else super().metric(name)

    @cached_property
    def _log_loss(self) -> Metric:
        """Mean of the loss: minus the log-likelihood per patient."""

        def measure(sets: Sequence[Set]) -> Measured:
            return mean([self.loss(o.double(), t.double()).cpu().numpy() for o, t in sets])

        return Metric("log-loss", measure, self.about, higher=False)
