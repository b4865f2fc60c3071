"""The start of a run: everything that can be refused is refused before anything is written, then the ledger is opened."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch.utils.data import Dataset

from dpps.disk import write_private
from dpps.errors import RunError, UsageError
from dpps.learning.evaluation import rehearse
from dpps.learning.gradients.calling import FAILURES, pick
from dpps.learning.inputs import check_examples, tell_unscaled
from dpps.learning.preflight import made_up_outputs
from dpps.learning.schedules import WarmUp
from dpps.noise.mechanisms import NoNoise
from dpps.noise.source import NoiseSource
from dpps.privacy.ledger import Ledger
from dpps.privacy.ledger_file import LedgerFile
from dpps.privacy.outlook import foresee
from dpps.privacy.promise import Contract
from dpps.privacy.units import Calibration, Plan, Unit
from dpps.protocol import DPPS
from dpps.runs.deployment import Deployment
from dpps.sensitivity import Sensitivity
from dpps.transport import Fabric
from dpps.version import versions

if TYPE_CHECKING:
    from dpps.runs.run import Run


def check_folder(run: Run) -> None:
    """A resumed run is the one in the folder; a new one needs a folder without a run, unless it may replace it."""
    if run.folder is None:
        return
    if run.resumed:
        run.folder.check_same(run.description.fingerprint, run.description.config)
    else:
        run.folder.check_new(run.overwrite)


def check_epochs(epochs: object, before: int | None) -> int | None:
    """Refuse what is no number of epochs, or another one than the run was started for."""
    if epochs is None:
        return None
    if isinstance(epochs, bool) or not isinstance(epochs, SupportsIndex) or int(epochs) < 1:
        raise UsageError(f"epochs is {epochs!r}: it must be a whole number, 1 or more")
    if before is not None and epochs != before:
        raise UsageError(f"this run was started for {before} epochs, not {epochs}: start another run")
    return int(epochs)


def source_of_noise(given: NoiseSource | None, where: Deployment, secure: bool, seed: int) -> NoiseSource:
    """The deployment's own; or one that was given to study a run, where nothing really leaves."""
    if given is None:
        return where.noise(secure, seed)
    if where.durable:
        raise UsageError(
            f"noise is {type(given).__name__}: another source of noise is for studying a run in a simulation (where=Here()); where "
            "messages really leave each process draws its own, so leave it out"
        )
    return given


def check_data(run: Run, datasets: Sequence[Dataset[Any]], sizes: Sequence[int], rows: Sequence[int]) -> None:
    """Every node held here has examples that suit the model and the loss, and something is learned from the others."""
    if len(datasets) != len(rows):
        raise UsageError(f"{len(datasets)} data sets for {len(rows)} nodes: give one per node")
    if 0 in sizes:
        raise UsageError(f"node {rows[sizes.index(0)]} has no examples: give every node at least one")
    check_examples(datasets, [f"node {row}" for row in rows], run.algorithm.model, run.algorithm.loss)
    tell_unscaled(datasets, rows)
    rehearse_metrics(run)
    run.topology.check_connected()
    if run.unit and run.algorithm.lr_shared == 0 and run.algorithm.partition.shared:
        raise UsageError(
            "lr_shared is 0: then nothing is learned from the others and there is nothing to protect; raise it, or "
            "share nothing"
        )


def rehearse_metrics(run: Run) -> None:
    """Metrics are tried before the first round, on made-up values, where what they are taken of can be made up."""
    sets = [*([run._tests] if run._tests else []), *run._held_out[:1]]
    model = run.algorithm.model
    for x, targets in sets if run._metrics else ():
        try:
            outputs, made = made_up_outputs(model, pick(x, 0), targets[0])
        except FAILURES:  # outputs that are no tensor: only the metric knows
            continue
        rehearse(run._metrics, outputs, made)


def promise(
    unit: Unit | None, plan: Plan, first: Contract | None
) -> tuple[Contract | None, Calibration | None]:
    """The contract: that of the first start when the run is resumed; nothing is solved for again."""
    if unit is None:
        return None, None
    contract = first or Contract.first(unit, plan)
    contract.check(unit, plan)
    return contract, contract.calibrate(unit)


def warnings(run: Run) -> Iterator[str]:
    """What can be foreseen to go wrong although nothing is refused."""
    schedule, rounds = run.algorithm.schedule, run.plan.count
    if isinstance(schedule, WarmUp) and schedule.over > rounds:
        yield (
            f"schedule {schedule}: the run has {rounds} rounds, so the rates only reach {schedule.factor(rounds - 1, rounds):.2g} "
            "of what they should be; warm up over fewer"
        )
    if _lost_when_killed(run):
        yield (
            f"the target epsilon is spread over exactly {rounds} rounds: if this process is killed, the rounds after "
            "its last checkpoint would have to be paid for twice, and the run could not go on; spare rounds pay for that "
            "(--spare-rounds 20 --checkpoint-every 10; in Python spare_rounds and checkpoint_every)"
        )
    if run.unit is not None:
        shared = run.algorithm.partition.shared_size
        yield from foresee(run.unit, run.plan, shared, run.topology, run.sync_every)


def _lost_when_killed(run: Run) -> bool:
    """Whether a new run that is to be kept has a target epsilon, and nothing to pay for rounds that are repeated."""
    kept = run.folder is not None and not run.resumed and keeps_ledger(run) and run.where.repeats_rounds
    return kept and run.unit is not None and run.unit.epsilon is not None and run.plan.paid == run.plan.count


def keeps_ledger(run: Run) -> bool:
    """Whether every charge must be on disk before its message leaves: where messages really leave, and wherever nobody knows the
    noise, so that a guarantee is stated."""
    return run.where.durable or run.secure_noise or run.protocol.noise.private


def open_ledger(run: Run) -> Ledger:
    """The ledger, written ahead where there is a folder. Rounds beyond the promised total are refused before they are sent."""
    rows = run.protocol.fabric.rows
    budget = run.contract.budget(run.unit) if run.contract and run.unit else None
    if run.folder is None:
        return Ledger(rows, budget)
    run.folder.claim(run.overwrite)
    if run.contract is None:
        return Ledger(rows)
    durable = keeps_ledger(run)
    header = {
        "run": run.description.fingerprint,
        "unit": run.contract.unit,
        "mechanism": run.contract.mechanism,
        "rows": list(rows),
        "durable": durable,
        "contract": run.contract.to_json(),
        **run.where.header(),
    }
    if run.resumed:  # replays count
        header["nonce"] = LedgerFile.read_header(run.folder.ledger).get("nonce")
        return run.where.ledger.open(run.folder.ledger, header, durable, budget=budget)
    header["nonce"] = secrets.token_hex(16)  # no two runs have the same first line
    processes = run.where.processes
    return run.where.ledger.create(run.folder.ledger, header, durable, budget=budget, processes=processes)


def sign_folder(run: Run) -> None:
    """Say in the folder of a new run which run it holds."""
    if run.folder is not None and not run.resumed:
        about = {
            "config": run.description.config,
            "versions": versions(),
            "private_noise": run.protocol.noise.private,
            "federation": run.where.federation,
        }
        if schema := run.remarks.get(
            "schema"
        ):  # whoever reads the folder need not have the file it was given as
            write_private(run.folder.schema, schema.encode())
        run.folder.sign({"fingerprint": run.description.fingerprint, "epochs": run.epochs, **about})


def make_protocol(
    run: Run,
    calibration: Calibration | None,
    fabric: Fabric,
    noise: NoiseSource,
    watch: Mapping[str, Sensitivity],
) -> DPPS:
    """The protocol as the run's promise needs it."""
    return DPPS(
        run.topology,
        calibration.mechanism if calibration else NoNoise(),
        calibration.sensitivity if calibration else None,
        sync_every=run.sync_every,
        noise=calibration.source(noise) if calibration else noise,
        fabric=fabric,
        sampling=_sampling(calibration, fabric.rows),
        watch=watch,
        mixes=run.mixes,
    )


def _sampling(calibration: Calibration | None, rows: Sequence[int]) -> float | list[float]:
    """What a node is charged for: the largest rate of all, or its own where every node chose its batch."""
    if calibration is None:
        return 1.0
    return [calibration.rates[row] for row in rows] if calibration.rates else calibration.sampling


def refuse_unpaid(run: Run) -> None:
    """A target epsilon was spread over the planned rounds: a round beyond them would break the promise."""
    target = None if run.unit is None else run.unit.epsilon
    if target is not None and run.state.round >= run.plan.paid:
        raise RunError(
            f"round {run.state.round} refused before sending: epsilon {target:g} was spread over {run.plan.paid} rounds; "
            "plan more epochs (or spare rounds) from the start"
        )
