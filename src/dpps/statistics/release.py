"""One release for all questions: a record becomes one vector, and the sum of all vectors leaves once, with noise.

Every question is a block of length at most 1, times its weight; the squares of all weights add up to 1. So one record moves the
sum by at most 1, and one charge pays for all questions. A release is a run of one round: the shared parameters are the sums, and
every node's only update is its own sum. Contract, ledger, deployments and resuming are those of every run.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor, nn

from dpps.data.node_files import node_table
from dpps.data.schema import Remarks, Schema, column_values, read_schema
from dpps.data.tables import Table, frame_table, read_table
from dpps.disk import write_private
from dpps.errors import RunError, UsageError, needs_extra, unknown
from dpps.learning.algorithms import PartPSP
from dpps.learning.sampling import NodeData
from dpps.noise import NoiseLevel
from dpps.noise.mechanisms import MECHANISMS, Gaussian, Laplace
from dpps.privacy.accountant import Total, label
from dpps.privacy.partners import NOBODY, Trust
from dpps.privacy.promise import Privacy
from dpps.privacy.units import Calibration, Contribution, Plan, Record, Unit
from dpps.protocol import DPPS, State
from dpps.runs.deployment import Deployment
from dpps.runs.folder import RunFolder
from dpps.runs.run import Run
from dpps.runs.summary import Description, fingerprint, model_facts
from dpps.sensitivity import Unclipped
from dpps.statistics.questions import Answer, Array, Category, Columns, Number, Question, Records, ask
from dpps.topology import parse
from dpps.transport import Fabric

MOST_RECORDS = 1 << 28
"""Of a node: sums of so many vectors are exact in float64."""
_OF_PERSONS = re.compile(r"(?i)(?:^|[\W_])(?:patient|person|subject|participant|pid)(?:[\W_]|$)")
_STEP = 2.0**22  # vectors are cut to multiples of 1 / _STEP, so that sums do not depend on their order


def stats(
    nodes: Sequence[Any],
    schema: Schema | str | Path,
    questions: Sequence[str],
    *,
    epsilon: float = 1.0,
    delta: float = 1e-5,
    person: str | None = None,
    trust: Trust = NOBODY,
    records_per_node: int | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    overwrite: bool = False,
) -> "Found":
    """Answer questions about the records of all nodes. The answers are released once, with noise, and every
    record is protected.

    Args:
        nodes: one table per node: a file, a folder that holds `train.csv`, or a pandas frame.
        schema: the public description of the columns: their ranges and categories.
        questions: such as `mean(age)`, `quantiles(age, 0.25, 0.5, 0.75)` or `regression(pressure ~ age + sex)`.
        epsilon: total for all questions together.
        delta: well below 1 / (number of records).
        person: the column that identifies a person. All records of a person at one node are then protected
            together, and answers count persons.
        trust: `Pairs(colluders=C)`: partners share noise that mostly cancels in the sum.
        records_per_node: protect everything that a node contributes, which may be at most this many
            records. None protects single records.
        folder: where ledger and answers.json go; None keeps all in memory.
        seed: seed for a simulation with repeatable noise, which protects nobody. None draws secret noise.
        overwrite: replace the release that the folder holds.

    Examples:
        >>> import dpps, pandas
        >>> clinics = [pandas.DataFrame({"age": [30 + k, 50, 70], "sex": ["f", "m", "f"]}) for k in range(3)]
        >>> columns = (dpps.data.Column("age", "number", (0, 120)), dpps.data.Column("sex", "category", values=("f", "m")))
        >>> found = dpps.stats(clinics, dpps.data.Schema(columns), ["count()", "mean(age)"], epsilon=5, seed=0)
        >>> bool(found["count()"].low[0] < 9 < found["count()"].high[0])
        True
    """
    limits = epsilon, delta, trust, records_per_node
    survey, known, unit = open_survey(questions, schema, person, len(nodes), *limits)
    options: dict[str, Any] = {"folder": folder, "seed": seed, "overwrite": overwrite}
    with Release.of_tables(survey, known, nodes, len(nodes), unit, **options) as run:
        return run.fit(1).found


def open_survey(
    questions: Sequence[str], schema: Schema | str | Path, person: str | None, nodes: int, *limits: Any
) -> tuple["Survey", Schema, Unit]:
    """Parse the questions and the schema, and choose who is protected; `limits` as in `choose_unit`."""
    known = schema if isinstance(schema, Schema) else read_schema(Path(schema))
    if not isinstance(known, Schema):
        raise UsageError(f"the schema {schema} describes images: questions are asked about tables")
    columns = {
        c.name: Category(c.name, c.values) if c.kind == "category" else Number(c.name, *c.range)
        for c in known.described
    }
    survey = Survey(questions, columns, person)
    return survey, known, choose_unit(survey, nodes, *limits)


def topology_of(nodes: int) -> str:
    """The topology that needs the fewest gossip steps until all nodes have the same sums."""
    return f"base-{min(2, nodes - 1)}"


def _persons(table: Table, column: str, schema: Schema) -> NDArray[np.str_]:
    """Whose record each is. Records that name nobody are refused: they would all count as one person's."""
    if column not in table.columns:
        raise unknown(f"column in {table.path} for --person", column, table.names)
    for row, cell in enumerate(table.columns[column]):
        if cell in schema.missing:
            raise UsageError(
                f"{table.place(row, column)} names no person: say who it is, or leave the line out"
            )
    return np.array(table.columns[column])


def _check_table(table: Table, schema: Schema, persons: NDArray[np.str_] | None, unit: Unit) -> None:
    """Refuse a table whose answers would be wrong, or whose people less protected than its owner thinks."""
    held = len(table) if persons is None else len(np.unique(persons))
    if isinstance(unit, WholeNode) and unit.clip is not None and held > unit.clip:
        raise UsageError(
            f"{table.path} holds {held} records and --records-per-node is {unit.clip:g}: all of its answers would be scaled down; "
            "declare more"
        )
    if persons is not None or isinstance(unit, WholeNode):
        return
    used = {column.name for column in schema.described}
    for name, cells in table.columns.items():
        known = [cell for cell in cells if cell not in schema.missing]
        if name not in used and _OF_PERSONS.search(name) and len(set(known)) < len(known):
            raise UsageError(
                f"{table.path}: {name!r} has the same value in several records: with --person {name} all records of a person are "
                "protected together; if it does not name persons, take the column out"
            )


def choose_unit(
    survey: "Survey",
    nodes: int,
    epsilon: float,
    delta: float,
    trust: Trust,
    records_per_node: int | None = None,
) -> Unit:
    """Who is protected, with the mechanism that adds the least noise to the sums, by what is public.

    Laplace noise, which partners cannot share, is the smaller one where few questions put each record into one cell.
    """
    if records_per_node is not None:
        whole = WholeNode(float(records_per_node), epsilon, delta, Gaussian.name, trust=trust)
        return whole.for_network(nodes)
    gaussian = OneRecord(epsilon, delta, trust=trust, person=survey.person is not None).for_network(nodes)
    if not math.isfinite(survey.largest_sum):
        return gaussian
    laplace = replace(gaussian, trust=NOBODY, mechanism=Laplace.name, reach=survey.largest_sum)
    return min(gaussian, laplace, key=lambda unit: planned_noise(unit, nodes))


# The questions of a release


class Survey:
    """Questions that are answered together.

    Args:
        questions: as texts, such as `mean(age)`.
        columns: what is public of every column.
        person: the column that says whose record it is; None: every record counts for itself.
    """

    def __init__(self, questions: Sequence[str], columns: Columns, person: str | None = None) -> None:
        if not questions:
            raise UsageError("there is no question: ask one or more, such as count() or mean(age)")
        for text in questions:
            if list(questions).count(text) > 1:
                raise UsageError(
                    f"{text} is asked twice: every question takes its share of the budget; ask it once"
                )
        self.questions: list[Question] = [ask(text, columns) for text in questions]
        self.columns, self.person = columns, person
        weights = np.array([question.weight for question in self.questions])
        self.weights: Array = weights / np.sqrt((weights**2).sum())
        self.width = sum(question.width for question in self.questions)

    @property
    def largest_sum(self) -> float:
        """The most that the absolute values of one record's numbers add up to; infinite: not known."""
        return float(sum(w * q.largest_sum for w, q in zip(self.weights, self.questions, strict=True)))

    def sums(self, records: Records, persons: NDArray[Any] | None = None) -> Array:
        """The sum over the records of one node, each at most 1 long, before and after it is cut.

        Args:
            records: by column.
            persons: whose record each is. A person's vectors are averaged, so that each person counts once.
        """
        if (persons is None) != (self.person is None):
            raise UsageError(
                "the questions are about persons, or they are not: name the person of every record, or of none"
            )
        parts = zip(self.weights, self.questions, strict=True)
        vectors = np.concatenate([w * q.encode(records) for w, q in parts], axis=1)
        if persons is not None:
            _, person, count = np.unique(persons, return_inverse=True, return_counts=True)
            averages = np.zeros((len(count), self.width))
            np.add.at(averages, person, vectors)
            vectors = averages / count[:, None]
        # toward zero, which makes no vector longer
        total: Array = np.trunc(vectors * _STEP).sum(0) / _STEP
        return total

    def expected(self, unit: Unit, nodes: int, records: int) -> list[Answer]:
        """What answers would look like if the records of all nodes were spread evenly over what is public. Reads no data."""
        draw = np.random.default_rng(0)
        drawn = {
            name: draw.uniform(c.low, c.high, records)
            if isinstance(c, Number)
            else draw.integers(0, len(c.values), records).astype(float)
            for name, c in self.columns.items()
        }
        persons = None if self.person is None else np.arange(records)
        return self.answers(self.sums(drawn, persons), planned_noise(unit, nodes))

    def answers(self, sums: Array, noise: float) -> list[Answer]:
        """From the noised sums of all nodes; `noise` is the standard deviation of each of them."""
        ends = np.cumsum([question.width for question in self.questions])[:-1]
        parts = zip(self.questions, self.weights, np.split(sums, ends), strict=True)
        return [question.answer(part / w, noise / w) for question, w, part in parts]


# Who is protected

_FIXED = "ranges, bins and questions were fixed before the data were read"
_MORE = "further questions and runs on the same data add up; questions chosen by looking at the data are not counted"


@dataclass(frozen=True)
class OneRecord(Record):
    """One record of one node, in a sum of vectors: adding or removing it moves the sum by at most `reach`.

    Args:
        mechanism: "gaussian", or "laplace" where `reach` is a bound on the sum of absolute values.
        reach: in the mechanism's norm.
        person: whether a person's records at one node count as one.
    """

    mechanism: str = Gaussian.name
    reach: float = 1.0
    person: bool = False
    protects: ClassVar[str] = "one record"
    trains: ClassVar[bool] = False

    def noise(self, plan: Plan) -> float:
        if self.mechanism == Laplace.name:
            assert self.epsilon is not None
            return self.epsilon
        return super().noise(plan)

    def calibrate(self, plan: Plan, noise: float | None = None) -> Calibration:
        amount = self.noise(plan) if noise is None else noise
        bound = Unclipped(self.reach, coordinates=plan.coordinates, largest=self.reach * MOST_RECORDS)
        mechanism = MECHANISMS[self.mechanism].of(amount)
        return Calibration(mechanism, bound, partners=self.trust.partners(plan.nodes))

    def promise(self, total: Total, rounds: int) -> str:
        return _promise(total)

    def who(self) -> str:
        owned = "all records of one person at one node" if self.person else "one record of one node"
        return (
            f"{owned}, against anybody who sees all messages of all nodes and the answers{self.trust.who()}: adding or removing "
            f"{'them' if self.person else 'it'} changes little; {_FIXED}"
        )

    def not_covered(self) -> str:
        several = "" if self.person else "who owns several records, or "
        return f"a person {several}whose records lie with several nodes is protected less; {_MORE}{self.trust.not_covered()}"


class WholeNode(Contribution):
    """All records of one node: they move its sum by at most twice the largest number of records, which is its clip."""

    trains: ClassVar[bool] = False

    def promise(self, total: Total, rounds: int) -> str:
        return _promise(total)

    def who(self) -> str:
        return f"{super().who()}; {_FIXED}"

    def not_covered(self) -> str:
        return f"people whose records lie with several nodes are protected once per node; {_MORE}{self.trust.not_covered()}"


def _promise(total: Total) -> str:
    return f"Guarantee: {label(total.epsilon)}, delta {total.delta:g}, for all answers together (by {total.accountant})."


# The run


class Sums(nn.Module):
    """The sums as parameters. The loss of an example is minus their product with it, so a step of rate 1 adds the example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.sums = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """The product with every example."""
        return x @ self.sums


def added(outputs: Tensor, _: Tensor) -> Tensor:
    """The loss of `Sums`."""
    return -outputs.mean()


class OnceOnly(DPPS):
    """Releases one message and keeps it: a process that is killed after its charge sends the same message, and pays once.

    The message is on this machine's disk before it is charged for, and charged for before it leaves.
    """

    kept: Path | None = None
    """Where the message is kept; None: it is not, or a deployment keeps it."""
    place: slice | None = None
    """Where in the row the numbers of the only node held here stand, if those of the others have places of their own."""

    def _charge(self, round_: int, level: NoiseLevel) -> None:
        if self.kept is None:
            super()._charge(round_, level)

    def _add_noise(self, state: State, eps: Tensor, half: Tensor, level: NoiseLevel) -> Tensor:
        if self.place is not None:
            return self._fill_place(self.place, state, eps, half, level)
        if self.kept is None:
            return super()._add_noise(state, eps, half, level)
        if self.kept.exists():
            half.copy_(load_file(self.kept)["message"])
        else:
            super()._add_noise(state, eps, half, level)
            write_private(self.kept, save({"message": half}))
        if self.ledger.messages == 0:
            super()._charge(state.round, level)
        return torch.zeros(len(half), dtype=torch.float64)

    def _fill_place(self, place: slice, state: State, eps: Tensor, half: Tensor, level: NoiseLevel) -> Tensor:
        """Noise for this node's own numbers; rows of others that have arrived already are as they were. After the numbers stands
        a 1, whatever they are: with what share of the message it arrives somewhere, the numbers arrive there, too."""
        part, before = half[:, place].contiguous(), state.s[:, place].contiguous()
        norms = super()._add_noise(replace(state, s=before), eps[:, place].contiguous(), part, level)
        half[:, place] = torch.round(part * _STEP) / _STEP
        half[:, place.stop] = 1.0
        return norms


def messages_in(row: Array, nodes: int) -> dict[int, Array]:
    """By node, the message of everybody from whom anything has arrived.

    Members come and go, and parts of what they send may be lost with one of them, so the mean over all of them need not give
    everybody the same weight. Each node's numbers have a place of their own, and so has the weight with which they arrived.
    """
    places = row.reshape(nodes, -1)
    return {
        node: np.round(numbers[:-1] / numbers[-1] * _STEP) / _STEP
        for node, numbers in enumerate(places)
        if numbers[-1] > 0
    }


class Release(Run):
    """The run of a survey; `fit` releases, and `found` has the answers.

    Where all nodes are there from beginning to end, the mean of their messages is all that travels. Between organisations, of which
    some may never come, the messages travel side by side, so that everybody knows whose arrived (`messages_in`).

    Args:
        survey: the questions.
        sums: of the nodes held here, a row each.
        nodes: how many there are in all.
        unit: who is protected.
        schema, sources, contents: of the tables, as in `Description`.
        options: further arguments of `Run`.
    """

    kind = OnceOnly
    protocol: OnceOnly
    skips_rounds = False  # there is one, and it is not too late for it while nobody has finished

    def __init__(
        self,
        survey: Survey,
        sums: Array,
        nodes: int,
        unit: Unit,
        *,
        schema: str | None = None,
        sources: tuple[str, ...] = (),
        contents: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        if nodes < 2:
            raise UsageError(f"there are {nodes} nodes: give the tables of two or more")
        asked = {
            "ask": [question.text for question in survey.questions],
            "person": survey.person,
            "nodes": nodes,
            "unit": unit.name,
            "epsilon": unit.epsilon,
            "delta": unit.delta,
            "trust": str(unit.trust),
            "seed": options.get("seed"),
        }
        named = fingerprint(asked | {"schema": schema or str(survey.columns)})
        deployment: Deployment | None = options.get("deployment")
        self._place: slice | None = None
        if deployment is not None and deployment.members:
            place = deployment.rows(nodes)[0] * (survey.width + 1)
            row = np.zeros((1, nodes * (survey.width + 1)))
            row[:, place : place + survey.width] = sums
            sums, self._place = row, slice(place, place + survey.width)
        model = Sums(sums.shape[1])
        # no checksum of the sums: there are so few likely ones that it would tell them to whoever tries
        described = Description(
            asked, asked, named, model_facts(model), {}, sources=sources, contents=contents, schema=schema
        )
        topology = parse(topology_of(nodes), nodes)
        data = [(torch.from_numpy(row[None]), torch.zeros(1, dtype=torch.int64)) for row in sums]
        self.survey = survey
        super().__init__(
            PartPSP(model, "all", lr_shared=1.0, batch_size=1, loss=added),
            data,
            topology=topology,
            privacy=unit,
            mixes=topology.period or 1,
            # each holds one sum; only where nobody is asked it has to be said
            declared_sizes=1 if deployment is not None and deployment.durable else None,
            description=described,
            **options,
        )

    @classmethod
    def of_tables(
        cls, survey: Survey, schema: Schema, sources: Sequence[Any], nodes: int, unit: Unit, **options: Any
    ) -> "Release":
        """The release of the tables of the nodes held here: files, folders or frames. Without a seed, nobody knows the noise."""
        paths = [source for source in sources if isinstance(source, (str, Path))]
        tables = [
            read_table(node_table(Path(source))) if isinstance(source, (str, Path)) else frame_table(source)
            for source in sources
        ]
        columns = {column.name: column for column in schema.described}
        sums = []
        with Remarks() as remarks:
            for table in tables:
                read = {n: column_values(table, columns[n], schema, remarks) for n in survey.columns}
                persons = None if survey.person is None else _persons(table, survey.person, schema)
                _check_table(table, schema, persons, unit)
                sums.append(survey.sums(read, persons))
        if len(paths) == len(sources):
            options["sources"] = tuple(map(str, paths))
        else:
            options["contents"] = tuple(table.content() for table in tables)
        options |= {"secure_noise": options.get("seed") is None, "schema": schema.to_toml()}
        return cls(survey, np.stack(sums), nodes, unit, **options)

    def _planned_epochs(self) -> int:
        """Everything is released at once."""
        return 1

    def _check_data(self, data: NodeData, rows: Sequence[int]) -> None:
        """Sums need no scaling, and how large they are is for nobody to read."""

    def _make_protocol(self, calibration: Calibration | None, fabric: Fabric) -> DPPS:
        protocol = super()._make_protocol(calibration, fabric)
        assert isinstance(protocol, OnceOnly)
        # what partners in other processes share is drawn anew when they start again, and would not cancel a kept message
        partners = None if calibration is None else calibration.partners
        repeats = self.deployment.repeats_rounds and (partners is None or self.deployment.processes == 1)
        if self.folder is not None and repeats:
            protocol.kept = self.folder.message
        protocol.place = self._place
        return protocol

    def affords_rest(self, position: int) -> bool:
        """A message that was paid for is kept, and sent again as it is."""
        return self.protocol.kept is not None or super().affords_rest(position)

    def _warnings(self) -> Iterator[str]:
        yield from ()  # what is foreseen of training does not apply

    def _warn_of_noise(self) -> None:
        """Every answer says itself when it is lost in noise."""

    @property
    def found(self) -> "Found":
        """The answers, after the release."""
        nodes, row = self.topology.nodes, self.shared.numpy()
        if self._place is not None:
            messages = messages_in(row, nodes)
            released, sums = tuple(messages), sum(messages.values(), np.zeros(self.survey.width))
        else:
            released, sums = tuple(range(nodes)), nodes * row
        if not released:
            raise RunError(
                "no message of any node has arrived, so there are no answers: make a new federation"
            )
        names = self.deployment.members
        absent = ", ".join(name for node, name in enumerate(names) if node not in released)
        counted = f"{len(released)} of {nodes} nodes released{f' (not {absent})' if absent else ''}."
        privacy = replace(self.privacy, statement=f"{self.privacy.statement} {counted}")
        return Found(self.survey.answers(sums, self.noise_of_sums(released)), (len(released), nodes), privacy)

    def noise_of_sums(self, released: Sequence[int]) -> float:
        """The standard deviation of the noise in the sum over these nodes."""
        assert self.nodes.calibration is not None
        scale = self.protocol.level(self.state.shared, 1.0).scale
        return _of_sum(self.nodes.calibration, scale, released)

    def _write_results(self, folder: RunFolder) -> None:
        found = json.dumps(self.found.to_json(), indent=1, allow_nan=False) + "\n"
        write_private(folder.answers, found.encode())


def planned_noise(unit: Unit, nodes: int) -> float:
    """The same before any data are read."""
    calibration = unit.calibrate(Plan(((1.0, 1),), 1.0, 1.0, declared_sizes=(1,) * nodes))
    moved = unit.reach if isinstance(unit, OneRecord) else 2 * (unit.clip or 0.0)
    return _of_sum(calibration, calibration.mechanism.scale(moved), range(nodes))


def _of_sum(calibration: Calibration, scale: float, released: Sequence[int]) -> float:
    """What the noise of these nodes' messages adds up to; that of partners cancels if both are among them."""
    if calibration.partners is None:
        laplace = calibration.mechanism.name == Laplace.name
        return scale * (math.sqrt(2) if laplace else 1.0) * math.sqrt(len(released))
    shares, pairs = calibration.partners.shares(), calibration.partners.among()
    left = int((np.isin(pairs, list(released)).sum(1) == 1).sum())
    return scale * math.sqrt(len(released) * shares.independent**2 + left * shares.pair**2)


@dataclass(frozen=True, eq=False)
class Found(Mapping[str, Answer]):
    """The answers, by question.

    Attributes:
        answers: in the order of the questions.
        nodes: how many nodes released, of how many.
        privacy: what it cost, and whom it protects.
    """

    answers: Sequence[Answer]
    nodes: tuple[int, int]
    privacy: Privacy

    def __getitem__(self, query: str) -> Answer:
        return {answer.query: answer for answer in self.answers}[query]

    def __iter__(self) -> Iterator[str]:
        return (answer.query for answer in self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def to_json(self) -> dict[str, Any]:
        """As answers.json has it."""
        found = [answer.as_json() for answer in self.answers]
        return {"answers": found, "nodes": list(self.nodes), "privacy": self.privacy.to_json()}

    def to_frame(self) -> Any:
        """A pandas frame with a row for every number: query, label, value, low, high, noise, too_noisy."""
        with needs_extra("tables"):
            import pandas

        numbers = ("value", "low", "high", "noise", "too_noisy")
        return pandas.DataFrame(
            {"query": a.query, "label": label, **{name: getattr(a, name)[k] for name in numbers}}
            for a in self.answers
            for k, label in enumerate(a.labels or ("",))
        )
