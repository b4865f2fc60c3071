"""`dpps stats`: questions about the records of all nodes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import arg

from dpps.cli.main import DONE, parse_options, plain_console, plain_table, wide_console
from dpps.data.node_files import node_folder
from dpps.data.schema import Schema
from dpps.errors import UsageError
from dpps.privacy.units import Unit
from dpps.runs.deployment import Deployment, Simulation
from dpps.runs.folder import new_folder
from dpps.runs.options import refuse_given
from dpps.runs.torch_distributed import TorchDistributed
from dpps.statistics.options import SurveyOptions
from dpps.statistics.questions import Answer
from dpps.statistics.release import Found, Release, Survey
from dpps.transport.cluster import started_distributed


@dataclass(frozen=True)
class StatsConfig(SurveyOptions):
    """Ask questions about the records of all nodes. All answers come from one release, and every record is protected.

    Questions: count(), mean(x), variance(x), histogram(x), table(x, y), quantiles(x, 0.25, 0.5), correlation(x, y),
    regression(y ~ x1 + x2), km(time, event). Each takes by=CATEGORY and weight=W.

    Examples:
      dpps stats --plan --nodes 3 --schema schema.toml --ask 'mean(age)'
      dpps stats --nodes 3 --schema schema.toml --ask 'mean(age)' --print-config
    """

    groups: ClassVar[Mapping[str, str]] = {"ask": "questions", "person": "privacy", "node_data": "run"}
    """The groups of --help: the first option of each, and its title."""

    node_data: Annotated[Path | None, arg(metavar="PATH")] = None
    """Every node's table, or its folder: clinics/node-{rank}.

    {rank} stands for the node's number. A folder holds the table as train.csv (.tsv, .parquet, .npz).
    """
    plan: bool = False
    """Print how wide every interval would be; reads no data."""
    print_config: bool = False
    """Print the plan of a federation that asks this; reads no data."""
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
    """Delete the release in --out and start again."""
    seed: Annotated[int | None, arg(metavar="INT")] = None
    """Seed for repeatable noise, which protects nobody.

    For simulations. Without it the noise is one that nobody knows.
    """
    timeout: float = 60.0
    """Seconds until a dead or hung process is noticed."""
    json: bool = False
    """Print the answers as JSON."""


def stats(arguments: list[str]) -> int:
    """Ask and answer."""
    options = parse_options(StatsConfig, arguments, "dpps stats")
    together = started_distributed()
    _refuse_useless(arguments, options, together)
    survey, schema, unit = options.opened()
    if options.plan:
        answers = survey.expected(unit, options.nodes, options.records)
        if options.json:
            print(json.dumps({"answers": [answer.as_json() for answer in answers]}, indent=1))
        else:
            _print_table(answers, planned=True)
        return DONE
    if options.print_config:
        print(options.to_toml(), end="")
        return DONE
    if options.node_data is None:
        raise UsageError("--node-data is missing: name every node's table, such as clinics/node-{rank}")
    if not together:
        return _release(options, survey, schema, unit, Simulation())
    if options.out is None:
        raise UsageError("--out is missing: processes that belong together need the same folder")
    with TorchDistributed.from_environment(timeout=options.timeout) as deployment:
        return _release(options, survey, schema, unit, deployment)


def _refuse_useless(arguments: Sequence[str], options: StatsConfig, together: bool) -> None:
    """Refuse options that would be ignored, or that exclude each other."""
    dry = options.plan or options.print_config
    nothing = f"--{'plan' if options.plan else 'print-config'} reads no data and writes nothing"
    rules = {
        ("colluders", "mean-variance"): (options.trust == "nobody", "it belongs to --trust pairs"),
        ("timeout",): (not together, "it belongs to runs of several processes (torchrun)"),
        ("records",): (not options.plan, "it belongs to --plan"),
        ("node-data", "out", "overwrite", "resume"): (dry, nothing),
        ("seed",): (together or dry, "it is for a simulation, whose noise may be repeated"),
        ("json",): (options.print_config, "--print-config prints TOML"),
    }
    refuse_given(arguments, {n: why for names, (useless, why) in rules.items() if useless for n in names})
    for one, other in (("resume", "overwrite"), ("plan", "print_config")):
        if getattr(options, one) and getattr(options, other):
            raise UsageError(f"--{one} and --{other.replace('_', '-')} exclude each other: choose one")


def _release(options: StatsConfig, survey: Survey, schema: Schema, unit: Unit, deployment: Deployment) -> int:
    assert options.node_data is not None
    rows = deployment.rows(options.nodes)
    sources = [node_folder(options.node_data, row, len(rows) == 1) for row in rows]
    out = options.out or new_folder()
    more = {"seed": options.seed, "folder": out, "deployment": deployment, "overwrite": options.overwrite}
    run = Release.of_tables(survey, schema, sources, options.nodes, unit, **more)
    run.resumed = options.resume
    with run:
        run.fit(1)
        found = run.found
    if options.json:
        print(json.dumps(found.to_json(), indent=1))
        return DONE
    print_found(found)
    plain_console().print(f"{run.folder and run.folder.answers}", markup=False)
    return DONE


def print_found(found: Found) -> None:
    """The answers and what they cost, on the terminal."""
    _print_table(found.answers)
    plain_console().print(f"\n{found.privacy.statement}", markup=False)


def _print_table(answers: Sequence[Answer], planned: bool = False) -> None:
    console = wide_console()
    numbers = ("half-width", "noise") if planned else ("answer", "95 % interval", "noise")
    table = plain_table(("question", ""), numbers)
    for answer in answers:
        for k, label in enumerate(answer.labels or ("",)):
            name = " / ".join(map(str, label)) if isinstance(label, tuple) else str(label)
            value, low, high, noise = (x[k] for x in (answer.value, answer.low, answer.high, answer.noise))
            if answer.too_noisy[k]:
                cells = ["too noisy", ""] if planned else ["too noisy", "", ""]
            elif planned:
                cells = [f"{(high - low) / 2:.3g}", f"{noise:.4g}"]
            else:
                cells = [f"{value:.4g}", f"{low:.4g} to {high:.4g}", f"{noise:.4g}"]
            table.add_row(answer.query if k == 0 else "", name, *cells)
    console.print(table, markup=False)
    if any(answer.too_noisy.any() for answer in answers):
        console.print(
            "too noisy: ask fewer questions, narrow the ranges, give the question more weight, or raise epsilon"
        )
