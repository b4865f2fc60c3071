"""What has come out of a run so far: parameters, models, accuracy, privacy; and how it is put on disk and taken up again."""

import copy
import csv
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from dpps.disk import private_folder, write_private, writing
from dpps.errors import RunError, UsageError
from dpps.frozen import Frozen
from dpps.learning.algorithm import Algorithm, TrainState
from dpps.learning.clipping import advice, hopeless
from dpps.learning.evaluation import (
    EVALUATED,
    Metric,
    accuracies,
    accuracies_of_some,
    are_classes,
    by_class,
    measured,
    own_accuracies,
    right_of,
    unless_it_fails,
)
from dpps.learning.gradients.calling import move
from dpps.learning.inputs import Batch, as_examples, check_examples
from dpps.learning.nodes import Nodes
from dpps.privacy.ledger import Ledger
from dpps.privacy.ledger_file import LedgerFile, Mark
from dpps.privacy.promise import Privacy, account, charges_ahead, planned_charges
from dpps.privacy.units import Plan, Unit
from dpps.protocol import DPPS
from dpps.runs.checkpoint import load_checkpoint, save_checkpoint
from dpps.runs.deployment import Deployment
from dpps.runs.folder import RunFolder, model_name
from dpps.runs.log import RoundLog
from dpps.runs.saved import about
from dpps.runs.summary import summarise

if TYPE_CHECKING:
    from dpps.runs.run import Run

logger = logging.getLogger(__name__)

_CHOSEN_PAUSE = (
    "A callback, or the program whose loop the run was, chose a round at which it paused: if it looked at losses or "
    "other results of private data, that choice is not covered either."
)

Examples = Dataset[Any] | tuple[Any, Tensor]
Metrics = dict[str, dict[str, list[float | None]]]
"""By data ("test", "own"), name and node."""


class NotStartedError(UsageError, AttributeError):
    """Asked too early. It counts as an attribute that is missing, so that `hasattr(run, "state")` is False."""


class Results(Frozen):
    """The part of a run that looks at where it stands; `Run` is the part that moves it."""

    algorithm: Algorithm
    unit: Unit | None
    where: Deployment
    folder: RunFolder | None
    out: Path | None
    plan: Plan
    protocol: DPPS
    nodes: Nodes
    state: TrainState
    log: list[RoundLog]
    seconds: dict[str, float]
    accuracy_by_epoch: list[float]
    ended_by_callback: bool
    metrics_by_epoch: list[Metrics]
    _device: str
    _tests: tuple[Any, Tensor] | None
    _held_out: Sequence[tuple[Any, Tensor]]
    _metrics: Mapping[str, Metric]
    _undefined: set[tuple[str, int]]
    _by_node: list[float] | None
    _privacy: tuple[tuple[int, int, bool], Privacy] | None
    _clipped: tuple[int, int]
    _advised: bool
    _csv: IO[str] | None
    _files: ExitStack
    _safe: int

    def __getattr__(self, name: str) -> Any:
        """Asked for what there is none of yet: an attribute, or a property that needs one."""
        early = name in ("_tests", "state", "protocol", "nodes", "plan")
        if early or ("nodes" not in self.__dict__ and isinstance(getattr(type(self), name, None), property)):
            raise NotStartedError(
                "the run has not started: call fit(epochs), rounds(epochs) or start(epochs) first"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _run(self) -> "Run":
        return cast("Run", self)

    @property
    def ledger(self) -> Ledger:
        """All that was released so far and what it cost."""
        return self.protocol.ledger

    @property
    def privacy(self) -> Privacy:
        """What is guaranteed, and what has been spent so far, from the ledger, in numbers and in words.

        Before the last planned round the guarantee is what was promised for all of them: whoever ends the run then may have looked
        at its results, so what was spent so far is none.
        """
        messages, done = self.ledger.messages, self.state.round
        paused = self.ended_by_callback and done == self.plan.count
        if self._privacy is None or self._privacy[0] != (messages, done, paused):
            calibration = self.nodes.calibration
            ahead = charges_ahead(calibration, self.plan, done, messages) if calibration else []
            found = account(
                self.unit,
                self.ledger,
                private_noise=self.protocol.noise.private,
                distance=self.nodes.noise_distance(messages + sum(charge.count for charge in ahead)),
                ahead=ahead,
                promised=self.unit.epsilon if self.unit else None,
                preface=self.where.preface,
                remarks=[*self.where.remarks(self._run()), *([_CHOSEN_PAUSE] if paused else [])],
            )
            self._privacy = ((messages, done, paused), found)
        return self._privacy[1]

    @property
    def shared(self) -> Tensor:
        """The averaged s."""
        return self.nodes.mean_shared(self.state)

    @property
    def local(self) -> Tensor:
        """Every node's l, one row each: a copy, which later rounds leave as it is."""
        return self.state.local.clone()

    def evaluate(self, data: Examples | None = None) -> list[float]:
        """Percent right of each node's model (the averaged s with its own l) on the test set, or on other data."""
        tests = self._tests if data is None else self._evaluable(data, "the data to evaluate on")
        if tests is None:
            raise UsageError("no test set was given to the run: evaluate(data) with one")
        if not are_classes(tests[1]):
            raise UsageError(
                "the targets are no class numbers, so there is no accuracy: name metrics=['rmse'] or a "
                "function of (outputs, targets)"
            )
        t0 = time.perf_counter()
        by_node = accuracies(self.nodes.engine, self.shared, self.state.local, *tests)
        self.seconds["evaluation"] += time.perf_counter() - t0
        return by_node

    def _accuracy_now(self, last: bool) -> float:
        """Percent on the test set: mean over the nodes held here; of many, and before the last epoch, over some of them."""
        assert self._tests is not None
        self._by_node = None
        if last or len(self.state.local) <= EVALUATED:
            self._by_node = self.evaluate()
            return fmean(self._by_node)
        t0 = time.perf_counter()
        found = accuracies_of_some(self.nodes.engine, self.shared, self.state.local, *self._tests)
        self.seconds["evaluation"] += time.perf_counter() - t0
        return fmean(found)

    def forget_evaluation(self) -> None:
        """The parameters have changed since the last round: whoever asks for accuracies gets new ones."""
        self._by_node = None

    @property
    def accuracy_by_node(self) -> list[float]:
        """Percent on the test set, by node; empty without a test set."""
        if self._by_node is None and self._tests is not None and are_classes(self._tests[1]):
            self._by_node = self.evaluate()
        return self._by_node or []

    @property
    def accuracy(self) -> float | None:
        """Percent: the averaged s with each node's own l on the whole test set, mean over nodes."""
        return fmean(self.accuracy_by_node) if self.accuracy_by_node else None

    @property
    def own_accuracy_by_node(self) -> list[float]:
        """Percent: each node on examples held out of its own data."""
        classes = all(are_classes(targets) for _, targets in self._held_out)
        held_out = self._held_out if classes else ()
        parts = self.nodes.engine, self.shared, self.state.local, held_out
        return unless_it_fails(partial(own_accuracies, *parts), [], hidden=self.protocol.hides_failures)

    @property
    def own_accuracy(self) -> float | None:
        """The mean of `own_accuracy_by_node`."""
        found = self.own_accuracy_by_node
        return fmean(found) if found else None

    @property
    def metrics_by_node(self) -> Metrics:
        """The metrics asked for: by data ("test", "own"), name and node; without noise, so for the node's own eyes."""
        if not self._metrics:
            return {}
        parts = self.nodes.engine, self.shared, self.state.local, self._metrics, self._undefined
        hidden, found = self.protocol.hides_failures, Metrics()
        for which, data in self._sets().items():
            found[which] = unless_it_fails(partial(measured, *parts, data), {}, hidden=hidden)
        return {which: metrics for which, metrics in found.items() if metrics}

    def _sets(self) -> dict[str, Sequence[tuple[Any, Tensor]]]:
        """What every node held here is tested on: the test set ("test"), and what was held out of its own data ("own")."""
        test = [self._tests] * len(self.state.local) if self._tests else []
        return {which: data for which, data in (("test", test), ("own", self._held_out)) if data}

    def right_answers(self) -> dict[str, list[Tensor]]:
        """By data ("test", "own") and node: for every example whether the node's model is right; without noise, for the node's own eyes."""
        engine, shared, local = self.nodes.engine, self.shared, self.local
        found = {}
        for which, data in self._sets().items():
            if not all(are_classes(targets) for _, targets in data):
                continue
            if which == "test" and not local.shape[1] and not engine.state():  # all nodes have the same model
                found[which] = [right_of(engine, 0, shared, local[0], *data[0])] * len(data)
            else:
                found[which] = [right_of(engine, k, shared, local[k], *each) for k, each in enumerate(data)]
        return found

    @property
    def by_class(self) -> dict[str, list[dict[str, Any]]]:
        """By data ("test", "own"): a row for every class, of the nodes held here together.
        Where metrics are asked for; without noise, for their own eyes."""
        if not self._metrics:
            return {}
        found = {}
        names = (self._run().description.input or {}).get("classes")
        for which, data in self._sets().items():
            if all(are_classes(targets) for _, targets in data):
                parts = self.nodes.engine, self.shared, self.state.local, data
                hidden = self.protocol.hides_failures
                rows = unless_it_fails(partial(by_class, *parts), None, hidden=hidden) or []
                found[which] = [
                    {"class": str(names[row.label] if names else row.label), **row.to_json()} for row in rows
                ]
        return found

    def _evaluate_epoch(self, log: RoundLog) -> RoundLog:
        """After the last round of an epoch: the metrics asked for, and accuracy where there is such."""
        self._by_node = None
        if self._metrics:
            self.metrics_by_epoch.append(self.metrics_by_node)
        if self._tests is None or not are_classes(self._tests[1]):
            return log
        self.accuracy_by_epoch.append(self._accuracy_now(last=self.state.round == self.plan.count))
        return replace(log, accuracy=self.accuracy_by_epoch[-1])

    @property
    def own_statistics(self) -> bool:
        """Whether nodes keep statistics of their own data (buffers, as BatchNorm has them), without noise, in their models."""
        return bool(self.nodes.engine.state())

    def models(self) -> list[nn.Module]:
        """Each node's ready model: the averaged shared parameters with its own local ones and buffers."""
        made = []
        for state in self._state_dicts():
            model = copy.deepcopy(self.algorithm.model)
            model.load_state_dict(state, strict=False)
            made.append(model.eval())
        return made

    def state_dict(self, k: int) -> dict[str, Tensor]:
        """Parameters and buffers of the k-th node held here."""
        return next(islice(self._state_dicts(), k, None))

    def _state_dicts(self) -> Iterator[dict[str, Tensor]]:
        """Of every node held here; what they have in common is averaged once.
        Buffers that a model does not save itself are left out."""
        shared, saved = self.shared, self.algorithm.model.state_dict().keys()
        kept = {n: b for n, b in self.nodes.engine.state().items() if n.partition(".")[2] in saved}
        for k in range(len(self.state.local)):
            named = self.algorithm.partition.views(shared, self.state.local[k])
            prefix = f"{k}."
            buffers = {n.removeprefix(prefix): b for n, b in kept.items() if n.startswith(prefix)}
            yield {name: tensor.detach().clone().contiguous() for name, tensor in (named | buffers).items()}

    def save(self, folder: str | Path) -> list[Path]:
        """Write every node's model as `node-K.safetensors`, with what is needed to use it; `dpps.load(folder)` reads them."""
        from safetensors.torch import save

        folder = Path(folder)
        private_folder(folder)
        paths = []
        for node, state in zip(self.nodes.rows, self._state_dicts(), strict=True):
            paths.append(folder / model_name(node))
            write_private(paths[-1], save(state, about(self._run(), node)))
        return paths

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json says, of the nodes held here."""
        return summarise(self._run())

    def report(self, path: str | Path | None = None) -> Path:
        """One self-contained HTML page about this run; without a path it is report.html in the run's folder."""
        import importlib

        path = path or (self.folder.report if self.folder else None)
        if path is None:
            raise UsageError("nowhere to put the page: report(path), or give the run a folder")
        page: Path = importlib.import_module("dpps.report").from_run(self, path)
        return page

    def _evaluable(self, data: Any, whose: str) -> tuple[Any, Tensor]:
        """Examples to evaluate on, which must suit the model as those to train on do."""
        x, target = as_examples(data, whose, self.algorithm.model, self.algorithm.loss)
        examples = TensorDataset(x, target) if isinstance(x, Tensor) else Batch(x, target)
        check_examples([examples], [whose], self.algorithm.model, self.algorithm.loss)
        device = torch.device(self._device)
        return move(x, device), move(target, device)

    @property
    def clipped(self) -> float | None:
        """Share of the examples drawn since this object started that were clipped (unit record), not noised:
        for the node's own eyes."""
        return self._clipped[0] / self._clipped[1] if self._clipped[1] else None

    def _count_clipped(self) -> float | None:
        if self.nodes.clipping is None:
            return None
        clipped, seen = self.nodes.clipping[1].take()
        self._clipped = (self._clipped[0] + clipped, self._clipped[1] + seen)
        return clipped / seen if seen else None

    def _advise_on_clip(self) -> None:
        told = advice(self.nodes.clipping[0], *self._clipped) if self.nodes.clipping else None
        if told and not self._advised:
            self._advised = True
            logger.warning("%s", told)

    @property
    def update_to_noise(self) -> float | None:
        """Norm of a node's update over that of the noise of its message, mean over the rounds since this object started;
        it is computed of what was not noised: for the node's own eyes."""
        known = [log.update_to_noise for log in self.log if log.update_to_noise is not None]
        return fmean(known) if known else None

    def _warn_of_noise(self) -> None:
        """After an epoch. Not of partners: most of the noise they share does not stay in the mean."""
        ratio, calibration = self.update_to_noise, self.nodes.calibration
        if ratio is None or calibration is None or calibration.partners is not None:
            return
        if told := hopeless(ratio, self.protocol.topology.nodes, self.plan.count):
            logger.warning("%s", told)

    # On disk

    def _write_log(self, log: RoundLog) -> None:
        if self.folder is None:
            return
        if self._csv is None:
            self._csv = self._files.enter_context(self.folder.log(self.log[:-1]))
        with writing(self.folder.rounds):
            csv.writer(self._csv).writerow(log.row())

    def _write_results(self, folder: RunFolder) -> None:
        self.save(folder.models)
        self.told = self.summary
        """What may be told to the user here: that of the nodes here."""
        folder.write_summary(self.told)
        everybody = self.where.summary(self.told, self._run())
        if everybody is not None and self.out is not None:
            RunFolder(self.out).write_summary(everybody)

    def checkpoint(self) -> None:
        """Put everything on disk that a resumed run needs; the ledger first."""
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
        """Take up the newest whole checkpoint, or that of round `at`; the round it stands at (0 when there is none)."""
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
        return found.round

    def affords_rest(self, position: int) -> bool:
        """Whether a run that goes on from round `position` can be paid to its end: replays are charged again."""
        left, calibration = self.plan.after(position), self.nodes.calibration
        if calibration is None or not left.count:
            return True
        return self.ledger.affords(planned_charges(calibration, left))
