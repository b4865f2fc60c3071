"""One run: the same object for the library, the command line and many processes."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from torch import Tensor

from dpps.errors import RunError, UsageError
from dpps.learning.algorithm import Algorithm, TrainState
from dpps.learning.evaluation import Metric, by_name
from dpps.learning.gradients.batch import EngineName
from dpps.learning.inputs import as_datasets, as_topology, as_unit, check_loaders
from dpps.learning.nodes import Nodes
from dpps.learning.sampling import NodeData, announce, for_every_node
from dpps.noise.source import NoiseSource, fresh_seed
from dpps.privacy.promise import Contract, Privacy
from dpps.privacy.units import Calibration, Unit
from dpps.runs import arguments
from dpps.runs.data_ledger import note_runs
from dpps.runs.deployment import Deployment, Here
from dpps.runs.description import Description, describe
from dpps.runs.log import RoundLog
from dpps.runs.results import Examples, Metrics, Results
from dpps.runs.start import (
    check_data,
    check_epochs,
    check_folder,
    keeps_ledger,
    make_protocol,
    open_ledger,
    promise,
    refuse_unpaid,
    sign_folder,
    source_of_noise,
    warnings,
)
from dpps.runs.stopping import keep_complete_rounds, last_for_all
from dpps.sensitivity import Oracle, Sensitivity
from dpps.topology import Topology

logger = logging.getLogger(__name__)

Callback = Callable[["Run", RoundLog], bool | None]
"""Called after every round; a true answer ends the run early, finished as if it had been planned so."""


class Run(Results):
    """A training run of many nodes.

    Args:
        algorithm: what is computed, with the model: `PartPSP(model, shared=["layer1"])`.
        data: one data set per node held here: map-style, or (inputs, targets). Of a DataLoader its data set is used; settings
            that the run would not follow are refused: it draws its own batches, of the algorithm's `batch_size`.
        topology: who sends to whom; or its name ("exp", "4-out"), on as many nodes as there are data sets.
        privacy: `Record(...)`, `Contribution(...)`, `NodeSwap(...)`, or None for no noise; or the unit's name ("record"), with
            the defaults of `dpps train`. Fixed when the run starts.
        test: a data set, or (inputs, labels), evaluated after every epoch (of more than 64 nodes only 64, and all after the last).
        held_out: one data set per node held here, or (inputs, labels), like the node's own, evaluated at the end.
        metrics: names (accuracy, balanced-accuracy, auroc, f1, calibration, rmse) or functions of (outputs, targets), taken of
            every node after every epoch: on the test set and on what was held out of its own data.
        folder: where ledger, log, checkpoints, models and summary go; None keeps all in memory.
        where: `Here()`, or `TorchDistributed(...)`.
        sync_every: P, the synchronisation period (0 = never).
        mixes: M, gossip steps per released message: free in the units record and contribution, refused in node-swap.
        seed: of noise and sampling in a simulation; None takes one from the operating system.
        secure_noise: noise from a cryptographic keystream that nobody knows, and a ledger that is on disk before a message leaves.
        noise: another source of noise, for studying a run in a simulation.
        declared_sizes: how many examples each node says it holds, one number for all or one per node; by default what it
            holds at the start. Public. The number of rounds and, in the unit record, the sampling rates follow from it, so
            that an example more or less changes nothing else.
        spare_rounds: rounds paid for beyond the plan, so that rounds repeated after a crash stay within a target epsilon.
        checkpoint_every: rounds between checkpoints (0 = only when the run ends before its last round, or its messages left).
        callbacks: called after every round with the run and the round's log. One that has a method `close()` is closed with
            the run.
        watch: sensitivities to evaluate along without using them.
        track_real: record the real sensitivity of every round (simulation).
        engine: how gradients are computed; "auto" decides by the model.
        device: where tensors live; the model is moved there.
        overwrite: replace the run that the folder holds.
        description: the run's settings, where it was made by options; otherwise read off the arguments.
        remarks: what else the summary says.

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

    def __init__(
        self,
        algorithm: Algorithm,
        data: Sequence[Any],
        *,
        topology: Topology | str,
        privacy: Unit | str | None = None,
        test: Examples | None = None,
        held_out: Sequence[tuple[Tensor, Tensor]] = (),
        metrics: str | Metric | Sequence[str | Metric] = (),
        folder: str | Path | None = None,
        where: Deployment | None = None,
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
        remarks: Mapping[str, Any] | None = None,
    ) -> None:
        self.where = where or Here()
        arguments.check_kinds(algorithm, self.where, noise, watch, folder, engine)
        arguments.check_counts(sync_every, mixes, spare_rounds, checkpoint_every)
        unit = as_unit(privacy)
        check_loaders(data, algorithm.batch_size, random=unit is not None and unit.per_example)
        data = as_datasets(data, algorithm.model, algorithm.loss)
        arguments.check_topology(topology, self.where.processes)
        self.algorithm, self.topology = algorithm, as_topology(topology, len(data))
        self.unit = algorithm.unit(unit and unit.for_network(self.topology.nodes))
        self.out = None if folder is None else Path(folder)
        self.folder = None if folder is None else self.where.folder(Path(folder))
        self.sync_every, self.mixes = sync_every if algorithm.synchronises else 0, mixes
        self.seed = fresh_seed() if seed is None else arguments.check_seed(seed)
        arguments.check_device(device)
        self._device = device
        algorithm.model.to(device)  # what is not trained, too: frozen parameters and buffers
        self.secure_noise = secure_noise
        self.checkpoint_every = checkpoint_every
        self.callbacks: list[Callback] = arguments.as_callbacks(callbacks)
        self.overwrite, self.resumed = overwrite, False
        self._data, self._test = data, test
        self._held_out = [self._evaluable(each, f"held-out set {k}") for k, each in enumerate(held_out)]
        arguments.check_held_out(self._held_out, len(data))
        self._metrics, self._undefined = by_name(metrics), set()
        self._noise = source_of_noise(noise, self.where, secure_noise, self.seed)
        self._declared = (
            None if declared_sizes is None else for_every_node(declared_sizes, self.topology.nodes)
        )
        self._planned_for, self._engine = (int(spare_rounds), self.unit), engine
        self._watch = {**(watch or {}), **({"real": Oracle()} if track_real else {})}
        options = {"seed": seed, "sync_every": self.sync_every, "mixes": mixes}
        options |= {"secure_noise": secure_noise, "spare_rounds": spare_rounds}
        self.description = description or describe(algorithm, self.topology, self.unit, options)
        self.remarks = {"split": None, "weights_left_fresh": [], **(remarks or {})}
        self.log: list[RoundLog] = []
        self.accuracy_by_epoch: list[float] = []
        self.metrics_by_epoch: list[Metrics] = []
        self.seconds = {"gradients": 0.0, "protocol": 0.0, "evaluation": 0.0}
        self.ended_by_callback = False
        """Whether a callback chose the last round; what it looked at is not covered by the guarantee."""
        self.stopped = False
        """Whether somebody asked to stop before the last round; such a run can be opened again."""
        self.epochs = 0
        self._stop_asked = self._closed = False
        self._files = ExitStack()
        self._csv: IO[str] | None = None
        self._by_node: list[float] | None = None
        self._clipped, self._advised = (0, 0), False
        self._privacy: tuple[tuple[int, int, bool], Privacy] | None = None
        self._safe = -1  # the round of the checkpoint that was written or taken up last

    @classmethod
    def open(
        cls,
        folder: str | Path,
        algorithm: Algorithm | None = None,
        data: Sequence[Any] | None = None,
        **options: Any,
    ) -> "Run":
        """Go on with the run in a folder: its contract decides what may still be spent.

        A run that `dpps train` started is made again from the options in its folder. One made in Python keeps no code and no
        data there: give algorithm, data and the same arguments as at its first start.
        """
        if algorithm is None and data is None:
            from dpps.runs.configured import reopen

            return reopen(Path(folder), **options)
        if algorithm is None or data is None:
            raise UsageError(f"{folder}: to open a run made in Python give both the algorithm and the data")
        run = cls(algorithm, data, folder=folder, **options)
        run.resumed = True
        return run

    # Start

    @property
    def started(self) -> bool:
        """Whether the contract is made: from then on nothing it rests on can change."""
        return "nodes" in self.__dict__

    def start(self, epochs: int | None = None) -> Self:
        """Check everything that can be checked, then make the run ready. Nothing is written before all checks have passed.

        Args:
            epochs: how many passes over the data are planned, over which a target epsilon is spread; None: what the run's
                options or its first start say, otherwise by the rule, or 12.
        """
        epochs = check_epochs(epochs, self.epochs if self.started else None)
        if self.started:
            return self
        self.resumed, self.overwrite = self.where.settle(self.folder, self.resumed, self.overwrite)
        check_folder(self)
        self._tests = None if self._test is None else self._evaluable(self._test, "the test set")
        fabric = self.where.connect(self)
        data = NodeData(self._data, self._device)
        self._check_data(data, fabric.rows)
        first = self.folder.contract() if self.folder and self.resumed else None
        sizes = announce(self._declared, data.sizes, fabric, first)
        spare, unit = self._planned_for
        self.epochs = epochs or self._planned_epochs() or self.algorithm.epochs(sizes, unit)
        self.plan = self.algorithm.plan(sizes, self.epochs, spare, unit)
        self.contract, calibration = self._promise(first)
        self.protocol = make_protocol(self, calibration, fabric, self._noise, self._watch)
        for warning in warnings(self):
            logger.warning("%s", warning)
        nodes = Nodes(self.algorithm, data, self.protocol, self.plan, calibration, self.seed, self._engine)
        self.state: TrainState = self.algorithm.start(nodes)
        self.protocol.ledger = open_ledger(self)  # last, when nothing can be refused any more
        self.nodes = nodes
        try:
            note_runs(self)  # before it is signed: where that fails, the same command starts afresh
            sign_folder(self)
            self.where.take_up(self)
        except BaseException:
            self.close()
            raise
        return self

    def _planned_epochs(self) -> int | None:
        """What the first start of a resumed run planned, or the options of a run that was made by options."""
        kept = self.folder.read_settings() if self.folder is not None and self.resumed else {}
        found: int | None = kept.get("epochs") or self.description.config.get("epochs")
        return found

    # What a baseline does otherwise

    def _check_data(self, data: NodeData, rows: Sequence[int]) -> None:
        check_data(self, self._data, data.sizes, rows)

    def _promise(self, first: Contract | None) -> tuple[Contract | None, Calibration | None]:
        return promise(self.unit, self.plan, first)

    def _somebody_stops(self) -> bool:
        return last_for_all(self, asked=self._stop_asked)

    # Rounds

    def fit(self, epochs: int | None = None) -> Self:
        """Train to the end (or until a callback answers true) and evaluate; without a number as long as `start` says."""
        for _ in self.rounds(epochs):
            pass
        return self

    def rounds(self, epochs: int | None = None) -> Iterator[RoundLog]:
        """One round after the other, each yielded when it is complete.

        A loop that is left before the last round, by `break` or by an exception, stops the run there: in its folder it leaves
        a checkpoint from which `Run.open` goes on, and no models or summary. `finish()` after the loop writes those as the run
        stands. Of several processes all go on until everybody has heard of it. (After an exception Python ends the loop only
        when nothing refers to it any more; `with run:` around the loop stops the run at once.)
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
        except BaseException:
            keep_complete_rounds(self)
            self.close()
            raise
        self._end(results=not self.stopped)

    def _leave(self, log: RoundLog) -> None:
        """Whoever looks at results and leaves the loop chooses the end, as a callback does. An exception in the loop looks the
        same from here, so neither is taken for the end that was planned: the run is stopped."""
        if self._closed:
            return
        if self.state.round < self.plan.count:
            self.ended_by_callback = self.stopped = True
        if self.protocol.fabric.meets and not self.protocol.fabric.simulation:
            self.stop()
            while not self._ends(log) and self._goes_on():
                log = self.step()
        self._end(results=not self.stopped)

    def _goes_on(self) -> bool:
        """Whether there is a round to come; where nodes come and go, their deployment waits for the others and leaves rounds out."""
        if self.state.round < self.plan.count and not self.where.before_round(self):
            return False
        return self.state.round < self.plan.count

    def _ends(self, log: RoundLog) -> bool:
        enough = [bool(callback(self, log)) for callback in self.callbacks]
        if any(enough):
            self.ended_by_callback = True
            if not self.protocol.fabric.simulation:  # everybody has to end after the same round
                self.stop()
                enough = []
        self.stopped = self._somebody_stops() and self.state.round < self.plan.count
        if self.checkpoint_every and self.state.round % self.checkpoint_every == 0 and not self.stopped:
            self.checkpoint()
        return any(enough) or self.stopped

    def stop(self) -> None:
        """Stop after the current round, at all processes, so that the run can be opened again."""
        self._stop_asked = True

    @property
    def stop_asked(self) -> bool:
        """Whether somebody here wants to stop."""
        return self._stop_asked

    def step(self) -> RoundLog:
        """One round: it completes, or raises and leaves everything as it was. `start` comes first."""
        if not self.started:
            raise UsageError("the run has not started: call start(epochs) first, or use fit or rounds")
        if self._closed:
            raise UsageError("the run is finished and its ledger closed: go on with Run.open(folder)")
        refuse_unpaid(self)
        epoch, within = divmod(self.state.round, self.rounds_per_epoch)
        round_, t0 = self.state.round, time.perf_counter()
        with self.nodes.transaction(self.state):
            if within == 0:
                self.nodes.start_epoch(self.state, epoch + 1)
            self.nodes.start_round(self.state)
            record, losses = self.algorithm.step(self.nodes, self.state)
        spent, exchange = time.perf_counter() - t0, self.nodes.protocol_seconds
        self.seconds["protocol"] += exchange
        self.seconds["gradients"] += spent - exchange
        self.where.after_round(self)
        log = RoundLog.of(round_, record, losses, self.protocol, self.state.shared.s)
        log = replace(log, clipped=self._count_clipped())
        if self.state.round == self.rounds_per_epoch and self._clipped[0] == 0:
            self._advise_on_clip()  # a clip that is far too large shows at once
        self._by_node = None
        if within + 1 == self.rounds_per_epoch:
            log = self._evaluate_epoch(log)
        self.log.append(log)
        if self.state.round == self.rounds_per_epoch:
            self._warn_of_noise()
        self._write_log(log)
        return log

    @property
    def rounds_per_epoch(self) -> int:
        """How many rounds a pass over the data takes."""
        return self.plan.count // self.epochs

    # End

    def finish(self) -> None:
        """Write models and summary of the run as it stands, where there is a folder, and close the ledger.

        `fit` and a loop over `rounds` that comes to its end do this themselves; it is for a run that was stopped before,
        which can still be opened and go on.
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
        """Close the ledger. Before that a checkpoint, if rounds are to come, or if messages really left: whatever happens now,
        nothing has to be sent and paid for again.

        Args:
            results: whether models and summary are written.
        """
        self._advise_on_clip()
        try:
            if not self.stopped and self.state.round >= self.plan.count:
                self.where.conclude(self)
            if self.folder is not None:
                needed = self.state.round < self.plan.count or keeps_ledger(self)
                if needed and self._safe != self.state.round:
                    self.checkpoint()
                if results:
                    self._write_results(self.folder)
                    if self.state.round >= self.plan.count:
                        self.where.stay(self)
        finally:
            self.close()

    def close(self) -> None:
        """Let go of ledger and log, and call `close()` of callbacks that have it. In memory a run can go on afterwards; from a
        folder, with `Run.open`."""
        self.where.close()
        for callback in self.callbacks:
            if hasattr(callback, "close"):
                callback.close()
        try:
            self._files.close()
        except RunError as error:  # of rounds.csv, whose lines are in the checkpoints, too
            logger.warning("%s", error)
        self._csv = None
        if self.started or "protocol" in self.__dict__:
            self.protocol.ledger.close()
        self._closed = self.folder is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.started and not self._closed:
            keep_complete_rounds(self)
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a run holds an open ledger and noise that must not be drawn twice, so it cannot be pickled: pickle run.models(), or give "
            "the run a folder and go on with Run.open(folder, ...)"
        )
