"""One run: the same object for the library, the command line and many processes."""

from __future__ import annotations

import copy
import csv
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex, get_args

import torch
from torch import Tensor, nn

from dpps.disk import write_private, writing
from dpps.errors import DppsError, RunError, UsageError, unknown
from dpps.frozen import Frozen
from dpps.learning.algorithms import Algorithm, TrainState
from dpps.learning.evaluation import EVALUATED, accuracies, accuracies_of_some, are_classes
from dpps.learning.gradients.batch import EngineName
from dpps.learning.gradients.calling import FAILURES, pick
from dpps.learning.inputs import as_datasets, as_topology, as_unit, check_loaders
from dpps.learning.nodes import Nodes, advice, hopeless
from dpps.learning.preflight import check_examples, made_up_outputs, tell_unscaled
from dpps.learning.sampling import NodeData, announce, for_every_node
from dpps.noise.mechanisms import NoNoise
from dpps.noise.source import NoiseSource, fresh_seed
from dpps.privacy.accountant import finite_or_none
from dpps.privacy.ledger import Ledger, LedgerFile, Mark
from dpps.privacy.outlook import foresee
from dpps.privacy.promise import Contract, Privacy, account, charges_ahead, planned_charges
from dpps.privacy.units import Calibration, Unit
from dpps.protocol import DPPS
from dpps.runs import results
from dpps.runs.callbacks import TOTALS, Callback, Progress, RoundLog
from dpps.runs.data_ledger import note_runs
from dpps.runs.deployment import Deployment, Simulation
from dpps.runs.folder import RunFolder, load_checkpoint, save_checkpoint
from dpps.runs.results import Examples, as_evaluable
from dpps.runs.summary import Description, Metrics, Summary, describe
from dpps.sensitivity import Oracle, Sensitivity
from dpps.tasks import rehearse
from dpps.tasks.metrics import Function, by_name
from dpps.topology import Topology
from dpps.transport import Fabric
from dpps.version import versions

if TYPE_CHECKING:
    from dpps.runs.options import Options

logger = logging.getLogger(__name__)

_CHOSEN_PAUSE = (
    "A callback, or the program whose loop the run was, chose a round at which it paused: if it looked at losses or "
    "other results of private data, that choice is not covered either."
)


class NotStartedError(UsageError, AttributeError):
    """The run has not started. An AttributeError, so that `hasattr(run, "state")` is False."""


class Run(Frozen):
    """A training run of many nodes.

    Args:
        algorithm: what is computed, with the model: `PartPSP(model, shared=["layer1"])`.
        data: one data set per node in this process: map-style, or (inputs, targets). You may pass a DataLoader:
            the run uses its data set and draws its own batches of the algorithm's `batch_size`. Settings
            that it would not follow are refused; settings about speed have no effect and give a warning.
        topology: who sends to whom; or its name ("exp", "4-out"), on as many nodes as there are data sets.
        privacy: `Record(...)`, `Contribution(...)`, `NodeSwap(...)`, or None for no noise; or the unit's name ("record"), with
            the defaults of `dpps train`. Fixed when the run starts.
        test: a data set, or (inputs, labels), evaluated after every epoch. With more than 64 nodes, only 64
            of them are evaluated until the last epoch.
        held_out: one data set per node in this process, or (inputs, labels), drawn like the node's own data
            and evaluated at the end.
        metrics: names (accuracy, balanced-accuracy, auroc, f1, calibration, rmse) or functions of (outputs,
            targets). Every node is measured after every epoch, on the test set and on its held-out data.
        folder: folder for ledger, log, checkpoints, models and summary. None keeps everything in memory.
        deployment: `Simulation()`, the default, or `TorchDistributed(...)`.
        sync_every: P, the synchronisation period (0 = never).
        mixes: M, gossip steps per released message: free in the units record and contribution, refused in node-swap.
        seed: seed of noise and sampling in a simulation. None draws one from the operating system.
        secure_noise: draw noise from a cryptographic keystream that nobody knows, and write the ledger to
            disk before each message is sent.
        noise: a different source of noise, for experiments in a simulation.
        declared_sizes: the number of examples that each node declares: one number for all nodes or one per
            node. By default, what the node holds at the start. It is public. The number of rounds and, in
            the unit record, the sampling rates depend on it alone, so that adding or removing an example
            does not change them.
        spare_rounds: extra rounds included in the privacy budget, so that rounds repeated after a crash
            stay within the target epsilon.
        checkpoint_every: rounds between checkpoints. 0 writes one only if the run stops early, or at the end of
            a distributed run or a run with secure noise.
        callbacks: functions called after every round with the run and the round's log. If one has a
            `close()` method, it is called when the run is closed.
        watch: further sensitivities to evaluate in every round without using them.
        track_real: record the real sensitivity of every round (simulation).
        engine: how gradients are computed; "auto" decides by the model.
        device: where model, data and noise live: "cpu", "cuda", "cuda:1", or "auto" for CUDA if there is any.
        overwrite: replace the run that the folder holds.
        description: the settings of a run made from options. Otherwise they are derived from the arguments.

    Examples:
        >>> import dpps, torch
        >>> x, labels = torch.randn(4, 40, 6), torch.randint(0, 3, (4, 40))
        >>> nodes = [torch.utils.data.TensorDataset(*part) for part in zip(x, labels)]
        >>> algorithm = dpps.PartPSP(dpps.models.MLP((6, 4, 3)), shared=["layer1"], batch_size=10)
        >>> run = dpps.Run(algorithm, nodes, topology=dpps.Ring(4), privacy=dpps.Record(epsilon=3), seed=0).fit(epochs=2)
        >>> len(run.log), run.privacy.epsilon <= 3
        (8, True)
    """

    fixed = frozenset(
        {"algorithm", "topology", "unit", "sync_every", "mixes", "plan", "contract", "protocol", "nodes"}
    )

    kind: type[DPPS] = DPPS
    """The protocol's class."""
    skips_rounds = True
    """Whether a node that comes late leaves out the rounds that it missed."""
    epochs = 0
    ended_by_callback = False
    """Whether a callback chose the last round; what it looked at is not covered by the guarantee."""
    stopped = False
    """Whether somebody asked to stop before the last round; such a run can be opened again."""
    stop_asked = False
    """Whether `stop` was called in this process."""
    resumed = _closed = _advised = False
    _safe = -1  # the round of the checkpoint that was written or restored last

    def __init__(
        self,
        algorithm: Algorithm,
        data: Sequence[Any],
        *,
        topology: Topology | str,
        privacy: Unit | str | None = None,
        test: Examples | None = None,
        held_out: Sequence[tuple[Tensor, Tensor]] = (),
        metrics: str | Function | Sequence[str | Function] = (),
        folder: str | Path | None = None,
        deployment: Deployment | None = None,
        sync_every: int = 0,
        mixes: int = 1,
        seed: int | None = None,
        secure_noise: bool = False,
        noise: NoiseSource | None = None,
        declared_sizes: int | Sequence[int] | None = None,
        spare_rounds: int = 0,
        checkpoint_every: int = 0,
        callbacks: Sequence[Callback] = (),
        watch: Mapping[str, Sensitivity] | None = None,
        track_real: bool = False,
        engine: EngineName = "auto",
        device: str = "cpu",
        overwrite: bool = False,
        description: Description | None = None,
    ) -> None:
        self.callbacks: list[Callback] = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
        self.deployment, asked = deployment or Simulation(), seed
        seed = fresh_seed() if seed is None else seed
        model = "one with its model, such as dpps.PartPSP(model, shared=['layer1'])"
        watched = watch.items() if isinstance(watch, Mapping) else [("...", watch)] if watch else []
        _check_kinds(
            ("algorithm", algorithm, Algorithm, model),
            ("deployment", self.deployment, Deployment, "dpps.Simulation() or dpps.TorchDistributed(...)"),
            ("noise", noise, NoiseSource | None, "a source such as dpps.Seeded(1), or None"),
            ("folder", folder, (str, os.PathLike, type(None)), "a path, or None to keep all in memory"),
            *((f"watch[{name!r}]", each, Sensitivity, "sensitivities by name") for name, each in watched),
            *(("a callback", each, Callable, "functions of (run, log)") for each in self.callbacks),
        )
        if engine not in get_args(EngineName):
            raise unknown("engine", engine, get_args(EngineName))
        _check_count(
            sync_every=sync_every, spare_rounds=spare_rounds, checkpoint_every=checkpoint_every, seed=seed
        )
        _check_count(1, mixes=mixes)
        unit = as_unit(privacy)
        check_loaders(data, algorithm.batch_size, random=unit is not None and unit.per_example)
        data = as_datasets(data, algorithm.model, algorithm.loss)
        if isinstance(topology, str) and self.deployment.processes > 1:
            raise UsageError(
                f"topology is {topology!r} in a run of {self.deployment.processes} processes: give the object with the number of all nodes"
            )
        self.algorithm, self.topology = algorithm, as_topology(topology, len(data))
        self.unit = algorithm.unit(unit and unit.for_network(self.topology.nodes))
        self.out = None if folder is None else Path(folder)
        self.folder = None if folder is None else self.deployment.folder(Path(folder))
        self.sync_every, self.mixes = sync_every if algorithm.synchronises else 0, mixes
        self.seed = int(seed)
        self._device = device = as_device(device)
        algorithm.model.to(device)  # what is not trained, too: frozen parameters and buffers
        self.secure_noise, self.checkpoint_every = secure_noise, checkpoint_every
        self.overwrite, self._data, self._test = overwrite, data, test
        self.held_out = [
            as_evaluable(algorithm, device, each, f"held-out set {k}") for k, each in enumerate(held_out)
        ]
        if self.held_out and len(self.held_out) != len(data):
            raise UsageError(
                f"held_out has {len(self.held_out)} data sets for {len(data)} nodes: give one per node, or none"
            )
        self.metrics = by_name(metrics, getattr(algorithm.judged_as, "metric", None))
        self.undefined: set[tuple[str, int]] = set()  # (metric, node) that were reported as undefined
        if noise is not None and self.deployment.durable:
            raise UsageError(
                f"noise is {type(noise).__name__}: another source of noise is for studying a run in a simulation "
                "(deployment=Simulation()); where messages really leave each process draws its own, so leave it out"
            )
        self._noise = self.deployment.noise(secure_noise, self.seed) if noise is None else noise
        self._declared = (
            None if declared_sizes is None else for_every_node(declared_sizes, self.topology.nodes)
        )
        self._planned_for, self._engine = (int(spare_rounds), self.unit), engine
        self._watch = {**(watch or {}), **({"real": Oracle()} if track_real else {})}
        self.description = description or describe(
            algorithm,
            self.topology,
            self.unit,
            {"seed": asked, "sync_every": self.sync_every, "mixes": mixes}
            | {"secure_noise": secure_noise, "spare_rounds": spare_rounds},
        )
        self.log: list[RoundLog] = []
        self.accuracy_by_epoch: list[float] = []
        self.metrics_by_epoch: list[Metrics] = []
        self.seconds = {"gradients": 0.0, "protocol": 0.0, "evaluation": 0.0}
        self._csv: IO[str] | None = None  # rounds.csv
        self._by_node: list[float] | None = None
        self._summary: Summary | None = None  # as it was written
        self._clipped = 0, 0

    @classmethod
    def from_options(
        cls,
        options: Options,
        folder: str | Path | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        deployment: Deployment | None = None,
    ) -> Run:
        """Create a run from the options of `dpps train`. Nothing is written before it starts.

        Args:
            options: the options; this method resolves them.
            folder: folder for the results, by default the options' `out`. Without either, results stay in
                memory.
            callbacks: called after every round.
            deployment: where the nodes are; by default all in this process.
        """
        from dpps.runs.from_options import make_run

        return make_run(options, folder, callbacks, deployment)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        algorithm: Algorithm | None = None,
        data: Sequence[Any] | None = None,
        **options: Any,
    ) -> Run:
        """Continue the run in a folder. Its contract decides what may still be spent.

        A run started by `dpps train` is rebuilt from the options in its folder. A run made in Python stores
        neither code nor data: pass the algorithm, the data and the same arguments as at its first start.
        """
        if algorithm is None and data is None:
            from dpps.runs.from_options import reopen

            return reopen(Path(folder), **options)
        if algorithm is None or data is None:
            raise UsageError(f"{folder}: to open a run made in Python give both the algorithm and the data")
        run = cls(algorithm, data, folder=folder, **options)
        run.resumed = True
        return run

    def __getattr__(self, name: str) -> Any:
        """Called for a missing attribute, and for a property that needs one."""
        early = name in ("state", "protocol", "nodes", "plan", "tests") or hasattr(type(self), name)
        if early and not self.started:
            raise NotStartedError(
                "the run has not started: call fit(epochs), rounds(epochs) or start(epochs) first"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Start

    @property
    def started(self) -> bool:
        """Whether the run has started. From then on, nothing that the guarantee depends on can change."""
        return "nodes" in self.__dict__

    @property
    def keeps_ledger(self) -> bool:
        """Whether every charge must be on disk before its message is sent. True where messages leave this
        process, and where the noise is secret, so that a guarantee is stated."""
        return self.deployment.durable or self.secure_noise or self.protocol.noise.private

    def start(self, epochs: int | None = None) -> Self:
        """Check all arguments and prepare the run. Nothing is written before all checks have passed.

        Args:
            epochs: planned passes over the data; a target epsilon is spread over them. None: as many as the
                run's options or its first start say; otherwise the rule chooses, or 12.
        """
        if epochs is not None:
            _check_count(1, epochs=epochs)
            epochs = int(epochs)
        if self.started:
            if epochs not in (None, self.epochs):
                raise UsageError(
                    f"this run was started for {self.epochs} epochs, not {epochs}: start another run"
                )
            return self
        self.resumed, self.overwrite = self.deployment.decide_resume(
            self.folder, self.resumed, self.overwrite
        )
        if self.folder is not None and self.resumed:
            self.folder.check_same(self.description.fingerprint, self.description.config)
        elif self.folder is not None:
            self.folder.check_new(self.overwrite)
        self.tests: tuple[Any, Tensor] | None = None
        if self._test is not None:
            self.tests = as_evaluable(self.algorithm, self._device, self._test, "the test set")
        fabric = self.deployment.connect(self)
        data = NodeData(self._data, self._device)
        self._check_data(data, fabric.rows)
        first = self.folder.contract() if self.folder and self.resumed else None
        sizes = announce(self._declared, data.sizes, fabric, first)
        spare, unit = self._planned_for
        self.epochs = epochs or self._planned_epochs() or self.algorithm.epochs(sizes, unit)
        self.plan = self.algorithm.plan(sizes, self.epochs, spare, unit)
        self.contract, calibration = self._promise(first)
        self.protocol = self._make_protocol(calibration, fabric)
        for warning in self._warnings():
            logger.warning("%s", warning)
        nodes = Nodes(self.algorithm, data, self.protocol, self.plan, calibration, self.seed, self._engine)
        self.state: TrainState = self.algorithm.start(nodes)
        self.protocol.ledger = self._open_ledger()  # last, when nothing can be refused any more
        self.nodes = nodes
        try:
            if self.unit is not None and self.keeps_ledger:
                note_runs(self)  # before it is signed: where that fails, the same command starts afresh
            self._sign_folder()
            self.deployment.resume(self)
        except BaseException:
            self.close()
            raise
        return self

    def _check_data(self, data: NodeData, rows: Sequence[int]) -> None:
        """Refuse examples, metrics or a network that do not fit, and a run that learns nothing from the others."""
        algorithm = self.algorithm
        if len(self._data) != len(rows):
            raise UsageError(f"{len(self._data)} data sets for {len(rows)} nodes: give one per node")
        if 0 in data.sizes:
            raise UsageError(
                f"node {rows[data.sizes.index(0)]} has no examples: give every node at least one"
            )
        check_examples(self._data, [f"node {row}" for row in rows], algorithm.model, algorithm.loss)
        tell_unscaled(self._data, rows)
        for x, targets in [*([self.tests] if self.tests else []), *self.held_out[:1]] if self.metrics else ():
            try:  # metrics are tried on invented outputs and targets like those of the data
                outputs, invented = made_up_outputs(algorithm.model, pick(x, 0), targets[0])
            except FAILURES:  # outputs that are no tensor: only the metric knows
                continue
            rehearse(self.metrics, outputs, invented)
        self.topology.check_connected()
        if self.unit and algorithm.lr_shared == 0 and algorithm.partition.shared:
            raise UsageError(
                "lr_shared is 0: then nothing is learned from the others and there is nothing to protect; raise it, or "
                "share nothing"
            )

    def _planned_epochs(self) -> int | None:
        """As the first start of a resumed run planned, or as the options say."""
        kept = self.folder.read_settings() if self.folder is not None and self.resumed else {}
        found: int | None = kept.get("epochs") or self.description.config.get("epochs")
        return found

    def _promise(self, first: Contract | None) -> tuple[Contract | None, Calibration | None]:
        """The contract, and the noise it needs. A resumed run keeps its first contract; nothing is solved for again."""
        if self.unit is None:
            return None, None
        contract = first or Contract.first(self.unit, self.plan)
        contract.check(self.unit, self.plan)
        return contract, contract.calibrate(self.unit)

    def _make_protocol(self, calibration: Calibration | None, fabric: Fabric) -> DPPS:
        sampling: float | list[float] = 1.0
        if calibration is not None:  # the largest rate, or each node's own where every node chose its batch
            rates = calibration.rates
            sampling = [rates[row] for row in fabric.rows] if rates else calibration.sampling
        return self.kind(
            self.topology,
            calibration.mechanism if calibration else NoNoise(),
            calibration.sensitivity if calibration else None,
            sync_every=self.sync_every,
            noise=calibration.source(self._noise) if calibration else self._noise,
            fabric=fabric,
            sampling=sampling,
            watch=self._watch,
            mixes=self.mixes,
        )

    def _warnings(self) -> Iterator[str]:
        """What will probably go wrong, although nothing is refused."""
        rounds, unit = self.plan.count, self.unit
        if unit is None:
            return
        new = self.folder is not None and not self.resumed
        repeats = new and self.keeps_ledger and self.deployment.repeats_rounds
        if repeats and unit.epsilon is not None and self.plan.paid == rounds:
            yield (
                f"the target epsilon is spread over exactly {rounds} rounds: if this process is killed, the rounds after "
                "its last checkpoint would have to be paid for twice, and the run could not go on; spare rounds pay for that "
                "(--spare-rounds 20 --checkpoint-every 10; in Python spare_rounds and checkpoint_every)"
            )
        yield from foresee(
            unit, self.plan, self.algorithm.partition.shared_size, self.topology, self.sync_every
        )

    def _open_ledger(self) -> Ledger:
        """The ledger: on disk if there is a folder. It refuses rounds beyond the promised total before they are sent."""
        rows = self.protocol.fabric.rows
        budget = self.contract.budget(self.unit) if self.contract and self.unit else None
        if self.folder is None:
            return Ledger(rows, budget)
        self.folder.claim(self.overwrite)
        if self.contract is None:
            return Ledger(rows)
        kind, path, durable = self.deployment.ledger, self.folder.ledger, self.keeps_ledger
        header = {
            "run": self.description.fingerprint,
            "unit": self.contract.unit,
            "mechanism": self.contract.mechanism,
            "rows": list(rows),
            "durable": durable,
            "contract": self.contract.to_json(),
            **self.deployment.header(),
        }
        if self.resumed:  # replays count
            header["nonce"] = LedgerFile.read_header(path).get("nonce")
            return kind.open(path, header, durable, budget=budget)
        header["nonce"] = secrets.token_hex(16)  # no two runs have the same first line
        return kind.create(path, header, durable, budget=budget, processes=self.deployment.processes)

    def _sign_folder(self) -> None:
        """Write run.json and the schema to the folder of a new run."""
        if self.folder is None or self.resumed:
            return
        if self.description.schema:  # readers of the folder may not have the file that it was read from
            write_private(self.folder.schema, self.description.schema.encode())
        self.folder.sign(
            {
                "fingerprint": self.description.fingerprint,
                "epochs": self.epochs,
                "config": self.description.config,
                "versions": versions(),
                "private_noise": self.protocol.noise.private,
                "members": list(self.deployment.members),
                "directory": str(Path.cwd()),  # which paths in the options are relative to
            }
        )

    # Rounds

    def fit(self, epochs: int | None = None, *, progress: bool | None = None) -> Self:
        """Train to the end, or until a callback returns True, and evaluate.

        Args:
            epochs: passes over the data; None as in `start`.
            progress: whether to show a progress bar on standard error. None shows it if standard error is a
                terminal.
        """
        from rich.console import Console

        console = Console(stderr=True, force_terminal=progress or None)
        with Progress(console, shown=progress is not False) as shown:
            shown.begin(self.start(epochs))
            for log in self.rounds(epochs):
                shown.after_round(self, log)
        return self

    def rounds(self, epochs: int | None = None) -> Iterator[RoundLog]:
        """Run the rounds one by one, and yield the log of each when it is complete.

        Leaving the loop before the last round, by `break` or an exception, stops the run. It writes a
        checkpoint to the run's folder, from which `Run.open` continues, but no models or summary. To write
        those, call `finish()` after the loop. With several processes, all continue until each has heard of
        the stop. (After an exception, Python ends the loop only when nothing refers to it any more; `with
        run:` around the loop stops the run at once.)
        """
        self.start(epochs)
        begun, before = time.perf_counter(), self.seconds.get("total", 0.0)
        try:
            while self._goes_on():
                log = self.step()
                self.seconds["total"] = before + time.perf_counter() - begun
                yield log
                if self._ends(log):
                    break
        except GeneratorExit:
            self._leave(log)
            raise
        except BaseException as error:
            self.__exit__()
            if self.out is not None:
                error.add_note(f"the run is kept in {self.out}: dpps.Run.open continues it")
            raise
        self._end(results=not self.stopped)

    def step(self) -> RoundLog:
        """Run one round. It completes, or raises and changes nothing. Call `start` first."""
        if not self.started:
            raise UsageError("the run has not started: call start(epochs) first, or use fit or rounds")
        if self._closed:
            raise UsageError("the run is finished and its ledger closed: go on with Run.open(folder)")
        target = None if self.unit is None else self.unit.epsilon
        if target is not None and self.state.round >= self.plan.paid:
            raise RunError(
                f"round {self.state.round} refused before sending: epsilon {target:g} was spread over {self.plan.paid} rounds; "
                "plan more epochs (or spare rounds) from the start"
            )
        self.forget_evaluation()
        epoch, within = divmod(self.state.round, self.rounds_per_epoch)
        round_, t0 = self.state.round, time.perf_counter()
        with self.nodes.transaction(self.state):
            if within == 0:
                self.nodes.start_epoch(self.state, epoch + 1)
            record, losses = self.algorithm.step(self.nodes, self.state)
        spent, exchange = time.perf_counter() - t0, self.nodes.protocol_seconds
        self.seconds["protocol"] += exchange
        self.seconds["gradients"] += spent - exchange
        self.deployment.after_round(self)
        log = RoundLog.of(round_, record, losses, self.protocol, self.state.shared.s)
        log = replace(log, clipped=self._count_clipped(), epsilon_total=self._epsilon_so_far())
        first_epoch = self.state.round == self.rounds_per_epoch
        if first_epoch and self._clipped[0] == 0:
            self._advise_on_clip()  # a clip that is far too large shows at once
        if within + 1 == self.rounds_per_epoch:
            t0 = time.perf_counter()
            log = self._evaluate_epoch(log)
            self.seconds["evaluation"] += time.perf_counter() - t0
        self.log.append(log)
        if first_epoch:
            self._warn_of_noise()
        self._write_log(log)
        return log

    @property
    def rounds_per_epoch(self) -> int:
        """The number of rounds in one pass over the data."""
        return self.plan.count // self.epochs

    def _goes_on(self) -> bool:
        """Whether there is another round. The deployment may wait for others here, and skip rounds."""
        more = self.state.round < self.plan.count and self.deployment.before_round(self)
        return more and self.state.round < self.plan.count

    def _ends(self, log: RoundLog) -> bool:
        enough = [bool(callback(self, log)) for callback in self.callbacks]
        if any(enough):
            self.ended_by_callback = True
            if not self.protocol.fabric.simulation:  # everybody has to end after the same round
                self.stop()
                enough = []
        self.stopped = self._stops_here() and self.state.round < self.plan.count
        if self.checkpoint_every and self.state.round % self.checkpoint_every == 0 and not self.stopped:
            self.checkpoint()
        return any(enough) or self.stopped

    # Stopping before the last round

    def stop(self) -> None:
        """Stop all processes after the current round. The run can be continued."""
        self.stop_asked = True

    def _stops_here(self) -> bool:
        """Whether the round just completed was the last. A request to stop travels with the rows and takes effect after the
        same round in all processes."""
        fabric, done = self.protocol.fabric, self.state.round - 1
        if self.stop_asked and fabric.stop_after is None:
            sending = self.clocks() if self.algorithm.partition.shared else ()
            rounds = fabric.rounds_until_heard(self.protocol.weights(clock) for clock in sending)
            if rounds is not None:  # otherwise the run is over before everybody could know
                fabric.ask_to_stop(done + rounds)
        return fabric.stop_after is not None and done >= fabric.stop_after

    def clocks(self) -> Iterator[int]:
        """The topology's clock in each round to come. It restarts where the rates change."""
        clock, rate = self.state.shared.clock, self.state.shared.rate
        for round_ in range(self.state.round, self.plan.count):
            epoch, within = divmod(round_, self.rounds_per_epoch)
            if within == 0 and self.algorithm.rate(epoch + 1) != rate:
                clock, rate = 0, self.algorithm.rate(epoch + 1)
            yield clock
            clock += 1

    def _leave(self, log: RoundLog) -> None:
        """The loop was left early. An exception in the loop looks the same from here as a `break`, so neither counts as the
        planned end: the run is stopped, and as with a callback, what the loop looked at is not covered."""
        if self._closed:
            return
        if self.state.round < self.plan.count:
            self.ended_by_callback = self.stopped = True
        if self.protocol.fabric.meets and not self.protocol.fabric.simulation:
            self.stop()
            while not self._ends(log) and self._goes_on():
                log = self.step()
        self._end(results=not self.stopped)

    # End

    def finish(self) -> None:
        """Write models and summary as they are now, if there is a folder, and close the ledger.

        `fit` and a complete loop over `rounds` do this themselves. Call it for a run that was stopped; such
        a run can still be continued.
        """
        if not self._closed:
            self._end(results=True)
        elif self.stopped and self.folder is not None:
            if not self.protocol.fabric.simulation:
                raise UsageError(
                    "the run was stopped and the other processes have left, so its results cannot be put together: go on with Run.open"
                )
            self._write_results(self.folder)

    def _end(self, *, results: bool) -> None:
        """Close the run, and write models and summary if there are `results`. Before that comes a checkpoint, if rounds are
        left or messages really left: whatever happens now, nothing has to be sent and paid for again."""
        self._advise_on_clip()
        try:
            complete = self.state.round >= self.plan.count
            if complete and not self.stopped:
                self.deployment.after_last_round(self)
            if self.folder is not None:
                if (not complete or self.keeps_ledger) and self._safe != self.state.round:
                    self.checkpoint()
                if results:
                    self._write_results(self.folder)
                    if complete:
                        self.deployment.after_results(self)
        finally:
            self.close()

    def close(self) -> None:
        """Close ledger and log, and call `close()` of the callbacks that have it. A run in memory can
        continue afterwards; a run with a folder continues with `Run.open`."""
        self.deployment.close()
        for callback in self.callbacks:
            if hasattr(callback, "close"):
                callback.close()
        if self._csv is not None:
            try:
                self._csv.close()
            except OSError as error:  # its lines are in the checkpoints, too
                logger.warning("rounds.csv cannot be written: %s", error.strerror)
        self._csv = None
        if "protocol" in self.__dict__:
            self.protocol.ledger.close()
        self._closed = self.folder is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Write a checkpoint of the complete rounds, so that what they cost is not lost, and close.

        Not with several processes: each would keep a round of its own, so they go on from the checkpoints that they planned
        together.
        """
        kept = self.started and not self._closed and self.folder and self.protocol.fabric.simulation
        if kept and 0 < self.state.round == len(self.log) != self._safe:
            try:
                self.checkpoint()
            except DppsError as error:  # the first failure is the one to report
                logger.warning("%s", error)
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a run holds an open ledger and noise that must not be drawn twice, so it cannot be pickled: pickle run.models(), or give "
            "the run a folder and go on with Run.open(folder, ...)"
        )

    # Privacy

    @property
    def ledger(self) -> Ledger:
        """All messages released so far, with their cost."""
        return self.protocol.ledger

    @property
    def privacy(self) -> Privacy:
        """The guarantee and what was spent so far, computed from the ledger, as numbers and as a statement.

        Before the last planned round, the guarantee is the epsilon promised for all rounds. What was spent
        so far is no guarantee, because whoever ends the run early may have looked at its results.
        """
        messages, done, calibration = self.ledger.messages, self.state.round, self.nodes.calibration
        paused = self.ended_by_callback and done == self.plan.count
        ahead = charges_ahead(calibration, self.plan, done, messages) if calibration else []
        return account(
            self.unit,
            self.ledger,
            private_noise=self.protocol.noise.private,
            distance=self.nodes.noise_distance(messages + sum(charge.count for charge in ahead)),
            ahead=ahead,
            promised=self.unit.epsilon if self.unit else None,
            preface=self.deployment.preface,
            remarks=[*self.deployment.remarks(self), *([_CHOSEN_PAUSE] if paused else [])],
        )

    def _epsilon_so_far(self) -> float | None:
        """What the node that paid most has spent. Only now and then: an accountant takes as long as a small model's round."""
        done, planned, unit = self.state.round, self.plan.count, self.unit
        if unit is None or (done % max(1, planned // TOTALS) and done != planned):
            return None
        distance = self.nodes.noise_distance(self.ledger.messages)
        found = self.ledger.by_row(lambda c: unit.running_total(c, planned, distance=distance)).values()
        return None if None in found else finite_or_none(max(e for e in found if e is not None))

    def affords_rest(self, position: int) -> bool:
        """Whether the budget covers a run that continues from round `position`. Repeated rounds are charged
        again."""
        left, calibration = self.plan.after(position), self.nodes.calibration
        if calibration is None or not left.count:
            return True
        return self.ledger.affords(planned_charges(calibration, left))

    # How it goes

    @property
    def clipped(self) -> float | None:
        """The share of examples that were clipped since this object started (unit record). Not noised: do
        not publish it."""
        return self._clipped[0] / self._clipped[1] if self._clipped[1] else None

    def _count_clipped(self) -> float | None:
        if self.nodes.clipping is None:
            return None
        clipped, seen = self.nodes.clipping[1].take()
        self._clipped = (self._clipped[0] + clipped, self._clipped[1] + seen)
        return clipped / seen if seen else None

    def _advise_on_clip(self) -> None:
        words = advice(self.nodes.clipping[0], *self._clipped) if self.nodes.clipping else None
        if words and not self._advised:
            self._advised = True
            logger.warning("%s", words)

    @property
    def update_to_noise(self) -> float | None:
        """Norm of a node's update divided by the norm of its noise, averaged over the rounds since this
        object started. Not noised: do not publish it."""
        known = [log.update_to_noise for log in self.log if log.update_to_noise]  # a first update may be zero
        return fmean(known) if known else None

    def _warn_of_noise(self) -> None:
        """After the first epoch, unless partners share noise: most of theirs does not stay in the mean."""
        ratio, calibration = self.update_to_noise, self.nodes.calibration
        if ratio is None or calibration is None or calibration.partners is not None:
            return
        if words := hopeless(ratio, self.protocol.topology.nodes, self.plan.count):
            logger.warning("%s", words)

    # What came out

    @property
    def shared(self) -> Tensor:
        """The average of the nodes' shared parameters."""
        return self.nodes.mean_shared(self.state)

    @property
    def local(self) -> Tensor:
        """The local parameters, one row per node, as a copy."""
        return self.state.local.clone()

    def models(self) -> list[nn.Module]:
        """One trained model per node: the averaged shared parameters, and the node's own local parameters
        and buffers."""
        made = []
        for state in results.state_dicts(self):
            model = copy.deepcopy(self.algorithm.model)
            model.load_state_dict(state, strict=False)
            made.append(model.eval())
        return made

    def state_dict(self, k: int) -> dict[str, Tensor]:
        """Parameters and buffers of the k-th node in this process."""
        return next(islice(results.state_dicts(self), k, None))

    def save(self, folder: str | Path) -> list[Path]:
        """Write every node's model to `node-K.safetensors`, with the information needed to use it.
        `dpps.load(folder)` reads the files."""
        return results.save_models(self, Path(folder))

    def evaluate(self, data: Examples | None = None) -> list[float]:
        """Accuracy of each node's model in percent, on the test set or on other data."""
        tests = self.tests
        if data is not None:
            tests = as_evaluable(self.algorithm, self._device, data, "the data to evaluate on")
        if tests is None:
            raise UsageError("no test set was given to the run: evaluate(data) with one")
        if not are_classes(tests[1]):
            raise UsageError(
                "the targets are no class numbers, so there is no accuracy: name metrics=['rmse'] or a "
                "function of (outputs, targets)"
            )
        return accuracies(self.nodes.engine, self.shared, self.state.local, *tests)

    def _evaluate_epoch(self, log: RoundLog) -> RoundLog:
        """Metrics and accuracy after the last round of an epoch. Of many nodes, only some are evaluated before the last epoch."""
        if self.metrics:
            self.metrics_by_epoch.append(self.metrics_by_node)
        if self.tests is None or not are_classes(self.tests[1]):
            return log
        if self.state.round == self.plan.count or len(self.state.local) <= EVALUATED:
            found = self.accuracy_by_node
        else:
            found = accuracies_of_some(self.nodes.engine, self.shared, self.state.local, *self.tests)
        self.accuracy_by_epoch.append(fmean(found))
        return replace(log, accuracy=self.accuracy_by_epoch[-1])

    def forget_evaluation(self) -> None:
        """Discard cached accuracies, because the parameters have changed."""
        self._by_node = self._summary = None

    @property
    def accuracy_by_node(self) -> list[float]:
        """Accuracy of each node on the test set, in percent. Empty without a test set."""
        if self._by_node is None and self.tests is not None and are_classes(self.tests[1]):
            self._by_node = self.evaluate()
        return self._by_node or []

    @property
    def accuracy(self) -> float | None:
        """Mean over nodes of the accuracy on the whole test set, in percent."""
        return fmean(self.accuracy_by_node) if self.accuracy_by_node else None

    @property
    def own_accuracy_by_node(self) -> list[float]:
        """Accuracy of each node on its own held-out examples, in percent."""
        return results.accuracies_on_own_data(self)

    @property
    def own_accuracy(self) -> float | None:
        """The mean of `own_accuracy_by_node`."""
        found = self.own_accuracy_by_node
        return fmean(found) if found else None

    @property
    def metrics_by_node(self) -> Metrics:
        """The requested metrics, by data ("test", "own"), name and node. Not noised: do not publish them."""
        return results.metrics_by_node(self)

    @property
    def by_class(self) -> dict[str, list[dict[str, Any]]]:
        """By data ("test", "own"): one row per class, over all nodes in this process. Only if metrics were
        requested. Not noised: do not publish it."""
        return results.rows_by_class(self)

    @property
    def summary(self) -> Summary:
        """The content of summary.json, for the nodes in this process."""
        return self._summary or Summary.of(self)

    def report(self, path: str | Path | None = None) -> Path:
        """Write a self-contained HTML page about this run, by default report.html in the run's folder."""
        import importlib

        path = path or (self.folder.report if self.folder else None)
        if path is None:
            raise UsageError("nowhere to put the page: report(path), or give the run a folder")
        page: Path = importlib.import_module("dpps.report").from_run(self, path)
        return page

    # On disk

    def _write_log(self, log: RoundLog) -> None:
        if self.folder is None:
            return
        if self._csv is None:
            self._csv = self.folder.open_log(self.log[:-1])
        with writing(self.folder.rounds):
            csv.writer(self._csv).writerow(log.row())

    def _write_results(self, folder: RunFolder) -> None:
        self.save(folder.models)
        if self._csv is None and self.log:  # no round since this start, and a kill may have cut off the file
            folder.open_log(self.log).close()
        self.write_summary(Summary.of(self))
        everybody = self.deployment.summary(self.summary, self)
        if everybody is not None and self.out is not None:
            RunFolder(self.out).write_summary(everybody.to_json())

    def write_summary(self, summary: Summary) -> None:
        """Write a summary to the run's folder, atomically. `summary` returns it from now on."""
        assert self.folder is not None
        self.folder.write_summary(summary.to_json())
        self._summary = summary

    def checkpoint(self) -> None:
        """Write everything that a resumed run needs to disk, the ledger first."""
        if self.folder is None:
            raise UsageError("nowhere to put a checkpoint: give the run a folder")
        self.ledger.flush()
        if self._csv is not None:
            with writing(self.folder.rounds):
                self._csv.flush()
        meta = {
            "accuracy_by_epoch": self.accuracy_by_epoch,
            "metrics_by_epoch": self.metrics_by_epoch,
            "seconds": self.seconds,
            "ended_by_callback": self.ended_by_callback,
            "rounds": [log.to_json() for log in self.log],
            "ledger": asdict(self.ledger.mark) if isinstance(self.ledger, LedgerFile) else None,
            **self.nodes.meta(self.state),
        }
        save_checkpoint(self.folder.checkpoints, self.state.round, self.nodes.tensors(self.state), meta)
        self._safe = self.state.round

    def restore(self, at: int | None = None) -> int:
        """Load the newest complete checkpoint, or that of round `at`. Returns its round, or 0 if there is
        none."""
        if self.folder is None:
            raise UsageError("nothing to resume: the run has no folder")
        found = load_checkpoint(self.folder.checkpoints, at)
        if found is None:
            return 0
        if isinstance(self.ledger, LedgerFile):
            mark = Mark(**found.meta["ledger"])
            self.ledger.check_holds(mark, f"the checkpoint of round {found.round}")
        try:
            self.nodes.load(self.state, found.tensors, found.meta, found.round)
        except (KeyError, RuntimeError) as error:
            raise RunError(f"the checkpoint in {self.folder.path} is of another model: {error}") from error
        self.accuracy_by_epoch, self.seconds = found.meta["accuracy_by_epoch"], found.meta["seconds"]
        self.metrics_by_epoch = found.meta.get("metrics_by_epoch", [])
        self.ended_by_callback = found.meta.get("ended_by_callback", False)
        self.log = [RoundLog.from_json(row) for row in found.meta["rounds"]]
        self._safe = found.round
        self.forget_evaluation()
        return found.round


def _check_kinds(*arguments: tuple[str, object, Any, str]) -> None:
    for name, value, kind, remedy in arguments:
        if not isinstance(value, kind):
            given = " ".join(repr(value).split())  # the repr of a model has many lines
            raise UsageError(f"{name} is {given:.80}: give {remedy}")


def _check_count(least: int = 0, **values: Any) -> None:
    for name, value in values.items():
        whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
        if not whole or not least <= int(value) < 1 << 64:
            raise UsageError(f"{name} is {value!r}: it must be a whole number, {least} or more, below 2^64")


def as_device(device: str) -> str:
    """The device of a run. "auto" is a CUDA device if there is one (several processes on a machine take one each), else the CPU.

    Raises:
        UsageError: the device does not exist, or has no float64.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % count}" if count else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device is {device!r}: choose auto, cpu, cuda or cuda:N") from error
    if found.type == "mps":
        raise UsageError(
            f"device is {device!r}, which has no float64, and clipping relies on it: choose cpu or cuda"
        )
    if found.type == "cuda" and (found.index or 0) >= count:
        raise UsageError(
            f"device is {device!r}: this machine and this torch have {count} CUDA devices, numbered from 0; choose cpu or auto"
        )
    return device
