"""`dpps stats`: questions about the records of all nodes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from rich.table import Table
from tyro.conf import UseAppendAction, arg

from dpps.cli.console import plain_console, wide_console
from dpps.cli.main import DONE, parse_options
from dpps.data.node_files import node_folder
from dpps.data.schema import Schema, read_schema
from dpps.errors import UsageError
from dpps.privacy.partners import TRUSTS
from dpps.privacy.units import PrivacyOptions, Unit
from dpps.runs.deployment import Deployment, Simulation
from dpps.runs.torch_distributed import TorchDistributed
from dpps.statistics.questions import Answer
from dpps.statistics.release import Found, Release, Survey, choose_unit, columns_of
from dpps.transport.cluster import started_distributed


@dataclass(frozen=True)
class StatsOptions:
    """Ask questions about the records of all nodes. All answers come from one release, and every record is protected.

    Questions: count(), mean(x), variance(x), histogram(x), table(x, y), quantiles(x, 0.25, 0.5), correlation(x, y),
    regression(y ~ x1 + x2), km(time, event). Each takes by=CATEGORY and weight=W.

    Example: dpps stats --plan --nodes 3 --schema schema.toml --ask 'mean(age)'
    """

    ask: UseAppendAction[Annotated[tuple[str, ...], arg(metavar="QUESTION")]]
    """A question; give the option once for each."""
    schema: Annotated[Path, arg(metavar="FILE")]
    """Public ranges and categories of the columns.

    Draft it with dpps data describe.
    """
    nodes: int
    """Number of nodes."""
    node_data: Annotated[Path | None, arg(metavar="PATH")] = None
    """Every node's table, or its folder: clinics/node-{rank}.

    {rank} stands for the node's number. A folder holds the table as train.csv (.tsv, .parquet, .npz).
    """
    person: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Column that names the person, who is then protected as a whole.

    All records of a person at one node are averaged: each person counts once, and all of their records are protected.
    """
    epsilon: float = 1.0
    """Total privacy loss, total for all questions together."""
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
    plan: bool = False
    """Print how wide every interval would be; reads no data."""
    records: int = 10_000
    """For --plan: expected number of records of all nodes."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Folder for answers.json and the ledger.

    By default runs/DATE-TIME.
    """
    resume: bool = False
    """Continue the release in --out after a crash.

    The same message is sent, and paid for once.
    """
    overwrite: bool = False
    """Delete the release that --out holds, and start again."""
    seed: Annotated[int | None, arg(metavar="INT")] = None
    """Seed of noise that can be repeated, which protects nobody.

    For simulations. Without it the noise is one that nobody knows.
    """
    timeout: float = 60.0
    """Seconds until a dead or hung process is noticed."""
    json: bool = False
    """Print the answers as JSON."""


def stats(arguments: list[str]) -> int:
    """Ask and answer."""
    options = parse_options(StatsOptions, arguments, "dpps stats")
    if options.trust not in TRUSTS:
        raise UsageError(f"--trust is {options.trust!r}: choose one of {', '.join(TRUSTS)}")
    together = started_distributed()
    _refuse_useless(arguments, options, together)
    schema = read_schema(options.schema)
    if not isinstance(schema, Schema):
        raise UsageError(f"--schema {options.schema} describes images: questions are asked about tables")
    survey = Survey(options.ask, columns_of(schema), options.person)
    trust = PrivacyOptions.of(options).trusted()
    limits = options.epsilon, options.delta, trust, options.records_per_node
    unit = choose_unit(survey, options.nodes, *limits)
    if options.plan:
        _print(survey.expected(unit, options.nodes, options.records), options, planned=True)
        return DONE
    if options.node_data is None:
        raise UsageError("--node-data is missing: name every node's table, such as clinics/node-{rank}")
    if not together:
        return _release(options, survey, schema, unit, Simulation())
    if options.out is None:
        raise UsageError("--out is missing: processes that belong together need the same folder")
    with TorchDistributed.from_environment(timeout=options.timeout) as deployment:
        return _release(options, survey, schema, unit, deployment)


def _refuse_useless(arguments: Sequence[str], options: StatsOptions, together: bool) -> None:
    """Refuse an option that would be ignored: whoever writes one means something by it."""
    alone = "it belongs to runs of several processes (torchrun)"
    rules = {
        "colluders": (options.trust == "nobody", "it belongs to --trust pairs"),
        "mean-variance": (options.trust == "nobody", "it belongs to --trust pairs"),
        "timeout": (not together, alone),
        "records": (not options.plan, "it belongs to --plan"),
        **dict.fromkeys(
            ("node-data", "out", "overwrite", "resume"),
            (options.plan, "--plan reads no data and writes nothing"),
        ),
        "seed": (together or options.plan, "it is for a simulation, whose noise may be repeated"),
    }
    given = {
        word.partition("=")[0].replace("_", "-").removeprefix("--") for word in arguments if word[:2] == "--"
    }
    for name, (useless, why) in rules.items():
        if useless and name in given:
            raise UsageError(f"--{name} would be ignored here ({why}): leave it out")
    if options.resume and options.overwrite:
        raise UsageError("--resume and --overwrite exclude each other: choose one")


def _release(
    options: StatsOptions, survey: Survey, schema: Schema, unit: Unit, deployment: Deployment
) -> int:
    assert options.node_data is not None
    rows = deployment.rows(options.nodes)
    sources = [node_folder(options.node_data, row, len(rows) == 1) for row in rows]
    out = options.out or Path("runs") / datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    run = Release.of_tables(
        survey,
        schema,
        sources,
        options.nodes,
        unit,
        options.seed,
        folder=out,
        deployment=deployment,
        overwrite=options.overwrite,
    )
    run.resumed = options.resume
    with run:
        run.fit(1)
        found = run.found
    _print(found.answers, options, found=found)
    if not options.json:
        plain_console().print(
            f"\n{found.privacy.statement}\n{run.folder and run.folder.answers}", markup=False
        )
    return DONE


def _print(
    answers: Sequence[Answer], options: StatsOptions, found: Found | None = None, planned: bool = False
) -> None:
    if options.json:
        shown = {"answers": [a.as_json() for a in answers]} if found is None else found.to_json()
        print(json.dumps(shown, indent=1))
        return
    console = wide_console()
    table = Table(box=None, pad_edge=False)
    for name, side in (
        ("question", "left"),
        ("", "left"),
        ("answer", "right"),
        ("95 % interval", "right"),
        ("noise", "right"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    if planned:
        table.columns.pop(2)
        table.columns[2].header = "half-width"
    for answer in answers:
        for k, label in enumerate(answer.labels or ("",)):
            name = " / ".join(map(str, label)) if isinstance(label, tuple) else str(label)
            value, low, high, noise = (
                f"{x[k]:.4g}" for x in (answer.value, answer.low, answer.high, answer.noise)
            )
            lost = bool(answer.too_noisy[k])
            query = answer.query if k == 0 else ""
            if planned:
                width = "too noisy" if lost else f"{(answer.high[k] - answer.low[k]) / 2:.3g}"
                table.add_row(query, name, width, noise)
            else:
                table.add_row(
                    query, name, *(("too noisy", "", "") if lost else (value, f"{low} to {high}", noise))
                )
    console.print(table, markup=False)
    if any(answer.too_noisy.any() for answer in answers):
        console.print(
            "too noisy: ask fewer questions, narrow the ranges, give the question more weight, or raise epsilon"
        )
