"""The options of a release of statistics that all nodes must agree on, on the command line and in a
federation's plan."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Self

from tyro.conf import UseAppendAction, arg

from dpps.data.schema import Schema
from dpps.errors import UsageError
from dpps.privacy.partners import TRUSTS, Pairs
from dpps.privacy.units import PrivacyOptions, Unit
from dpps.runs.options import typed_options
from dpps.statistics.release import Survey, open_survey


@dataclass(frozen=True)
class SurveyOptions:
    """Questions, who is protected, and how."""

    ask: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="QUESTION")]]
    """A question; give the option once for each."""
    schema: Annotated[Path, arg(metavar="FILE")]
    """Public ranges and categories of the columns.

    Draft it with dpps data describe.
    """
    nodes: int
    """Number of nodes."""
    person: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Column that names the person, who is then protected as a whole.

    All records of a person at one node are averaged: each person counts once, and all of their records are protected.
    """
    epsilon: float = 1.0
    """Total privacy loss, for all questions together."""
    delta: float = 1e-5
    """Probability that the guarantee fails.

    Choose it well below 1 / (number of records).
    """
    records_per_node: Annotated[int | None, arg(metavar="N")] = None
    """Protect whole nodes of at most N records.

    Instead of single records, everything that a node contributes.
    """
    trust: Annotated[str, arg(metavar="{" + ",".join(TRUSTS) + "}")] = "nobody"
    """Whether partners share noise that cancels in the sum."""
    colluders: Annotated[int | None, arg(metavar="C")] = None
    """Nodes that may pool their secrets with an observer.

    With --trust pairs; by default a third of the nodes, rounded down.
    """
    mean_variance: Annotated[float | None, arg(metavar="R")] = None
    """Variance of the noise, as a multiple of the minimum.

    With --trust pairs; by default 1.25 times the minimum possible against that many colluders.
    """

    def opened(self) -> tuple[Survey, Schema, Unit]:
        """The questions as they are understood, what they are asked about, and who is protected.

        Raises:
            UsageError: they do not suit each other.
        """
        if self.trust not in TRUSTS:
            raise UsageError(f"--trust is {self.trust!r}: choose one of {', '.join(TRUSTS)}")
        trust = PrivacyOptions.of(self).trusted()
        limits = self.epsilon, self.delta, trust, self.records_per_node
        return open_survey(self.ask, self.schema, self.person, self.nodes, *limits)

    def to_table(self) -> dict[str, Any]:
        """The options by the names of the command line; those that are None are left out."""
        found = {f.name.replace("_", "-"): getattr(self, f.name) for f in fields(SurveyOptions)}
        found |= {"ask": list(self.ask), "schema": str(self.schema)}
        return {name: value for name, value in found.items() if value is not None}

    def to_toml(self) -> str:
        """A file for dpps federation create."""
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in self.to_table().items())

    @classmethod
    def from_table(cls, table: Mapping[str, Any], where: str) -> Self:
        """What `to_table` made, read back; `where` is the file that it was found in, for messages."""
        if missing := [name for name in ("ask", "schema", "nodes") if name not in table]:
            raise UsageError(f"{where} has no {missing[0]}: make it with dpps stats --print-config")
        asked = table["ask"]
        if type(asked) is not list or any(type(question) is not str for question in asked):
            raise UsageError(f"{where}: ask is {asked!r}: write it as dpps stats --print-config does")
        others = {name: value for name, value in table.items() if name != "ask"}
        return cls(ask=tuple(asked), **typed_options(others, SurveyOptions, where))

    def for_members(self) -> Self:
        """As a contract has it: with the trust that the noise really needs, and all numbers that follow from the number of nodes."""
        trust = self.opened()[2].trust
        if isinstance(trust, Pairs):
            return replace(self, colluders=trust.coalition(self.nodes))
        return replace(self, trust=trust.name, colluders=None, mean_variance=None)
