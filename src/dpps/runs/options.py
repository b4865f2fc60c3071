"""The options of a run: one dataclass that is the command line of `dpps train`, the TOML file and the `config` of summary.json.

`Options.resolve` checks them and fills in the defaults that depend on each other. `ignored` is the one table of which option
has an effect beside which others: refusals, `dpps plan` and the report all ask it.
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from tyro.conf import arg

from dpps import models
from dpps.data import DATA_SETS
from dpps.data.schema import read_schema
from dpps.errors import UsageError, unknown
from dpps.features import FEATURES, output_shape, with_checksum
from dpps.learning.algorithms import ALGORITHMS
from dpps.learning.nodes import check_record
from dpps.learning.preflight import refuse_mixing
from dpps.learning.released import Momentum
from dpps.learning.sampling import batches, for_every_node, parse_batch, parse_sizes
from dpps.learning.suggestion import MOMENTUM, USUAL_BATCH, USUAL_EPOCHS, Suggestion, suggest, suggested_clip
from dpps.noise.mechanisms import MECHANISMS, Gaussian
from dpps.privacy.partners import TRUSTS, Pairs
from dpps.privacy.units import UNITS, Plan, PrivacyOptions, Unit, no_known_cost
from dpps.registry import Registry, is_own
from dpps.runs.summary import fingerprint
from dpps.sensitivity import SENSITIVITIES
from dpps.tasks import Classification, Task
from dpps.topology import TOPOLOGIES, Topology, parse

OWN_DATA = "own data"
"""What --data says, in files and titles, of a run on --node-data."""


@dataclass(frozen=True)
class Retired:
    """An option of an earlier version.

    Attributes:
        instead: what to do.
        default: what it was where nobody gave it: options with this value are read without it. None: it has no default.
        runtime: it said how a run was executed, not what was computed: options kept in a folder are read without it.
    """

    instead: str
    default: Any = None
    runtime: bool = False


RETIRED = {
    "threads": Retired("set the environment variable OMP_NUM_THREADS=N instead", runtime=True),
    "join-timeout": Retired("leave it out, processes wait 300 seconds for each other", 300.0, runtime=True),
    "share-metrics": Retired("read each process's own summary", False),
    "schedule": Retired("use --lr-step K instead", "constant"),
    "averaging": Retired("use it in Python, dpps.PartPSP(..., averaging=0.5)", 0.0),
}
"""Options of earlier versions."""
NEW = ("class-weights", "absentees")
"""Options that runs of 0.2 did not have: left at None they change nothing, so such runs can be continued."""


def refuse_retired(kept: Mapping[str, Any], where: str) -> None:
    """Refuse options of an earlier version that asked for something this one does not do."""
    for name, retired in RETIRED.items():
        if not retired.runtime and kept.get(name, retired.default) != retired.default:
            raise UsageError(
                f"{where} has {name} = {kept[name]!r}, which this version of dpps cannot do: use the version that made it"
            )


class Runtime:
    """Marks an option that says how a run is executed, not what it computes: it may differ when a run is resumed."""


def _names(*names: str) -> Any:
    return arg(metavar="{" + ",".join(names) + "}")


def _optional(metavar: str) -> Any:
    """An option whose default depends on others: its help text says which."""
    return arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class Options:
    """Train a model privately over many nodes, without a server.

    With no options: ten nodes, part of MNIST, one shared layer, and every training example protected with epsilon 3 in
    total.
    """

    groups: ClassVar[Mapping[str, str]] = {
        "data": "data",
        "model": "model",
        "algorithm": "training",
        "unit": "privacy",
        "out": "run",
        "timeout": "distributed (torchrun)",
        "sensitivity": "the paper's own",
    }
    """The groups of --help: the first option of each, and its title."""
    also: ClassVar[Mapping[str, tuple[str, str]]] = {
        "--config": ("FILE", "Take defaults from a TOML file with these names"),
        "--print-config": ("", "Print the options as such a file, and exit"),
    }
    """Words of the command line that are no option of a run: what follows, and their help."""

    data: Annotated[str, _names(*DATA_SETS.names())] = "mnist-mini"
    """Data set.

    mnist-mini comes with the package. The others are read from --data-dir, $DPPS_DATA or the user cache. If they are not
    there, they are downloaded.
    """
    data_dir: Annotated[Path | None, _optional("PATH"), Runtime] = None
    """Folder of the data sets [$DPPS_DATA, or user cache].

    It has one sub-folder for each data set.
    """
    node_data: Annotated[Path | None, _optional("PATH"), Runtime] = None
    """Folder of each node's own data: data/node-{rank}.

    {rank} stands for the node's number. The folder holds train.csv (.tsv, .parquet, .npz) and optionally a test file of
    the same kind, or folders train and test of images with one sub-folder per class. Replaces --data. Needs --schema, or
    --classes for plain numbers.
    """
    schema: Annotated[Path | None, _optional("PATH"), Runtime] = None
    """Public schema of --node-data (dpps data describe).

    It is the same for all nodes: columns, ranges, categories and classes of tables, or classes and size of images.
    """
    classes: Annotated[int | None, _optional("K")] = None
    """Number of classes, for --node-data without --schema.

    The files then hold plain numbers, with the label in the last column.
    """
    split: Annotated[str, _names("iid", "dirichlet:ALPHA", "label:K")] = "iid"
    """How examples are split over the nodes.

    iid assigns them at random. dirichlet:ALPHA gives every node its own mix of labels, more uneven for a smaller ALPHA.
    label:K gives every node K labels.
    """
    hold_out: Annotated[float | None, _optional("FLOAT")] = None
    """Fraction of examples held out for tests [iid: 0].

    By default 0 for iid and 0.1 otherwise. With --node-data but without test files, 0.2 for --baselines and --metrics.
    """
    features: Annotated[str, _names("none", *FEATURES.names(), "MODULE:CALLABLE")] = "none"
    """Fixed features, at no privacy cost.

    scattering is a wavelet transform of every image, colour-scattering a variant for colour images. For features of your
    own, package.module:callable names a function without arguments that returns a frozen module, or a pair (module,
    preprocessing). Features are computed before training and stored next to the data. Best with --model linear.
    """
    declared_sizes: Annotated[str | None, _optional("N|N,N,..")] = None
    """Public number of examples of each node [all].

    One number for all nodes, or one per node. The number of rounds and the sampling rates follow from it, however many
    examples a node really holds.
    """
    model: Annotated[str, _names(*models.MODELS.names(), "MODULE:CALLABLE")] = "mlp"
    """Model.

    linear is a softmax regression on features or columns, cnn a small convolutional network with tanh; the others are
    the paper's. For a model of your own, package.module:callable names a function that takes the shape of an example and
    the number of classes.
    """
    norm: Literal["batch", "group"] | None = None
    """Normalisation of resnet18 [by unit].

    The default is group in the unit record, because batch normalisation mixes examples, and batch in the other units.
    """
    weights: Annotated[Path | None, _optional("PATH")] = None
    """State dict to start from (.pt, .safetensors).

    Parameter names are those of torchvision.
    """
    shared: Annotated[str, _names("1", "2", "all", "PREFIX,..")] = "1"
    """Layers shared with the other nodes.

    The paper's 1 or 2 layers, all of them, or prefixes of parameter names.
    """
    algorithm: Annotated[str, _names(*ALGORITHMS.names())] = "partpsp"
    """Learning algorithm.

    partpsp is the paper's. sgp shares all layers without noise, sgpdp shares all layers with noise. pedfl is our reading
    of its publication: D-PSGD on the whole model, real sensitivity, no synchronisation, not in the unit record.
    """
    nodes: int = 10
    """Number of nodes."""
    topology: Annotated[str, _names(*TOPOLOGIES.names())] = "exp"
    """Who sends to whom.

    base-K is the Base-(K+1) graph, with K peers per round.
    """
    epochs: Annotated[int | None, _optional("INT")] = None
    """Passes over the data [12; record: 120 rounds].

    In the unit record, the default is the number of passes that makes 120 rounds, and at least 15 with --model linear.
    """
    batch_size: Annotated[int | str | None, _optional("N|N,N,..|1/K")] = None
    """Examples per node and round [100].

    One number for all nodes, one per node, or a fraction of every node's examples. In the unit record this is the expected
    number, and the default is at most half of a node's examples, or an eighth of them with --model linear.
    """
    lr_shared: Annotated[float | None, _optional("FLOAT")] = None
    """Learning rate, shared part [0.1; record: a rule].

    In the unit record the default follows from the noise. dpps plan prints it.
    """
    lr_local: Annotated[float | None, _optional("FLOAT")] = None
    """Learning rate, local part [as --lr-shared]."""
    lr_step: int = 0
    """Divide rates by 10 every so many epochs [0: never].

    At the start of epochs K, 2K, ... (the authors use 5). This restarts the cycles of topology and synchronisation.
    """
    momentum: Annotated[float | None, _optional("FLOAT")] = None
    """Momentum of released updates, below 1 [0].

    It costs no privacy. Multiply your learning rates by 1 - momentum. With --model linear in the unit record the default
    is 0.8, except for tables with a schema.
    """
    class_weights: Annotated[str | None, _optional("W,W,..")] = None
    """Weight of an example of each class [1 each].

    For rare classes: one number per class, in the order of the classes. In the unit record the weights apply after the
    clip, which would undo them otherwise. They cost no privacy, and they are public.
    """
    local_steps: int = 1
    """Gradient steps per round.

    Their total change is clipped and shared.
    """
    mixes: int = 1
    """Exchanges with neighbours per message.

    Nodes agree better, at no privacy cost. Not in the unit node-swap.
    """
    sync_every: int = 0
    """Rounds between exact global averages [0: never]."""
    dropouts: float = 0.0
    """Probability that a node is absent in a round.

    This simulates absences; it does not handle crashes.
    """
    seed: int = 0
    """Seed of split, weights and simulated noise.

    In a simulation it also seeds the sampling. The same seed and number of threads (OMP_NUM_THREADS) repeat a run bit for
    bit.
    """
    unit: Annotated[str, _names(*UNITS.names(), "none")] = "record"
    """Who is protected.

    One training example (record), all that a node contributes (contribution), which node sent a message (node-swap, the
    paper's), or nobody (none).
    """
    epsilon: Annotated[float | None, _optional("FLOAT")] = None
    """Total epsilon; in the unit node-swap sum of rounds, no guarantee [3, unless noise is given].

    The noise is chosen to meet it.
    """
    delta: float = 1e-5
    """Probability that the guarantee fails.

    Choose it well below 1 / (number of examples).
    """
    clip: Annotated[float | None, _optional("FLOAT")] = None
    """Largest norm of a gradient [by unit].

    Unit record: L2 norm of each example's gradient (default 1; with --model linear 0.1, or a rule for tables with a
    schema). Unit contribution: norm of the node's gradient, L1 for Laplace noise (default 30) or L2 for Gaussian noise
    (default 1). Unit node-swap: L1 norm of the node's gradient (default: no clipping).
    """
    noise_multiplier: Annotated[float | None, _optional("FLOAT")] = None
    """Gaussian noise multiplier, instead of --epsilon.

    The standard deviation of the noise, divided by the sensitivity.
    """
    mechanism: Annotated[str, _names(*MECHANISMS.names())] = "laplace"
    """Noise in the unit contribution.

    The unit node-swap always uses Laplace noise, the unit record always Gaussian noise.
    """
    records_per_user: int = 1
    """Examples that one person may have at a node.

    In the unit record: all of them are protected together.
    """
    trust: Annotated[str, _names(*TRUSTS)] = "nobody"
    """Whether partners share noise that cancels.

    With pairs, partners share noise that cancels in the sum, so the mean is nearly as exact as with a trusted server (units
    record, and contribution with Gaussian noise). With nobody, each node draws its noise independently.
    """
    colluders: Annotated[int | None, _optional("C")] = None
    """Nodes that may pool secrets (pairs) [a third].

    How many other nodes may pool their secrets with an observer. The default is rounded down.
    """
    mean_variance: Annotated[float | None, _optional("R")] = None
    """Averaged noise over its minimum (pairs) [1.25].

    Variance of the averaged noise, as a multiple of the minimum possible against that many colluders. With no colluders, 1
    equals a trusted server. Closer to 1 means more pair noise in every message. dpps plan shows the trade-off.
    """
    absentees: Annotated[int | None, _optional("A")] = None
    """Members that may be lost for good (pairs) [1].

    Between organisations. If more are lost, the noise they shared stays in the model. The noise is calibrated as if there
    were this many more colluders.
    """
    secure_noise: bool = False
    """Noise that nobody can repeat, for real messages.

    It is drawn on an integer grid, from a keystream keyed by the operating system.
    """
    spare_rounds: int = 0
    """Extra rounds in the budget, in case of crashes.

    Rounds repeated after a crash are charged again. Without spare rounds they would exceed the epsilon.
    """
    out: Annotated[Path | None, _optional("PATH"), Runtime] = None
    """Folder for the results [runs/DATE-TIME]."""
    overwrite: Annotated[bool, Runtime] = False
    """Delete the run in --out and start again."""
    resume: Annotated[bool, Runtime] = False
    """Continue the run in --out (dpps resume is shorter)."""
    checkpoint_every: Annotated[int, Runtime] = 0
    """Rounds between checkpoints [0: when stopped].

    A run that really sends messages also writes one at its end.
    """
    device: Annotated[str, _names("auto", "cpu", "cuda", "cuda:N"), Runtime] = "auto"
    """Where model, data and noise live.

    auto uses CUDA if it is available, otherwise the CPU.
    """
    metrics: Annotated[str | None, _optional("NAME,NAME,.."), Runtime] = None
    """Also measure auroc, f1, ... at the end.

    Classes: accuracy, balanced-accuracy, log-loss, brier, auroc, f1, calibration, calibration-slope. Numbers: rmse, mae, r2.
    Times: c-index, log-loss. Measured at every node, on the test set and on its own test data. They carry no noise and are
    for the node's own eyes.
    """
    baselines: Annotated[bool, Runtime] = False
    """Compare with no noise, and with each node alone.

    Shows what joining gained and what privacy cost. Only in a simulation. The results are computed from private data
    without noise, so they are for your own eyes. The command takes three times as long.
    """
    tensorboard: Annotated[bool, Runtime] = False
    """Also write TensorBoard events (dpps[tensorboard])."""
    quiet: Annotated[bool, Runtime] = False
    """No progress display."""
    timeout: Annotated[float, Runtime] = 60.0
    """Seconds until a dead process is noticed.

    Choose at least twice the longest round.
    """
    seeded_noise: bool = False
    """Noise from --seed, for tests: nothing is private.

    Noise and sampling are then the same as in a simulation.
    """
    sensitivity: Annotated[str, _names(*SENSITIVITIES.names())] = "certified"
    """Sensitivity (node-swap).

    certified is a proven bound. paper is an estimate tuned by --c-prime and --decay. oracle is the real distance (simulation
    only). worst-case is a bound that publishes the norms of the noise.
    """
    budget: Annotated[float | None, _optional("FLOAT")] = None
    """b: a round's epsilon is b / noise rate [5].

    In the unit contribution it replaces --epsilon.
    """
    noise_rate: float = 1e-3
    """gamma_n, which multiplies the noise."""
    c_prime: float = 0.78
    """C' of the paper's estimate."""
    decay: float = 0.55
    """lambda of the paper's estimate."""
    track_real: bool = False
    """Record the real sensitivity of every round.

    Only in a simulation; it computes nodes^2 distances.
    """

    def check(self) -> None:
        """Refuse what is wrong by itself, before anything is read. (Not at construction: the parser would wrap the message.)"""
        own, sets = "package.module:callable", DATA_SETS.names()
        for kind, value, allowed in (
            ("data set", self.data, sets if self.node_data is None else (*sets, OWN_DATA)),
            (
                "features",
                "none" if is_own(self.features) else self.features,
                ("none", *FEATURES.names(), own),
            ),
            ("model", own if is_own(self.model) else self.model, (*models.MODELS.names(), own)),
            ("algorithm", self.algorithm, ALGORITHMS.names()),
            ("unit", self.unit, (*UNITS.names(), "none")),
            ("sensitivity", self.sensitivity, SENSITIVITIES.names()),
            ("mechanism", self.mechanism, MECHANISMS.names()),
            ("trust", self.trust, tuple(TRUSTS)),
        ):
            if value not in allowed:
                raise unknown(kind, value, allowed)
        for name, value in self.to_json().items():
            if name in _LEAST and value is not None and value < _LEAST[name]:
                raise UsageError(f"--{name} is {value}: it must be {_LEAST[name]} or more")
        for flag, number, right, range_ in (
            ("seed", self.seed, 0 <= self.seed < 1 << 63, "be a whole number from 0 to 2^63 - 1"),
            ("hold-out", self.hold_out, 0 <= (self.hold_out or 0) < 1, "lie in [0, 1)"),
            ("timeout", self.timeout, self.timeout < float("inf"), "be 1 second or more"),
        ):
            if not right:
                raise UsageError(f"--{flag} is {number}: it must {range_}")
        self._optimizer()
        self._check_batch()
        for one, other in (("resume", "overwrite"), ("seeded_noise", "secure_noise")):
            if getattr(self, one) and getattr(self, other):
                flags = [f"--{name.replace('_', '-')}" for name in (one, other)]
                raise UsageError(f"{flags[0]} and {flags[1]} exclude each other: choose one")
        useless, fixed = ignored(self), self._unit and self._unit.fixed_mechanism
        for name in _NEVER_IGNORED:
            value = getattr(self, name.replace("-", "_"))
            if name in useless and value not in (getattr(Options, name.replace("-", "_")), fixed):
                refuse_given([f"--{name}"], useless)
        self._check_trust()
        self._check_data()
        if self.schema is None:  # what a schema says is read later
            check_task(self)

    def _check_batch(self) -> None:
        declared = self.sizes() or ()
        if self.batch_size is None:
            return
        batch = parse_batch(self.batch_size)
        if isinstance(batch, Sequence) and len(batch) != self.nodes:
            raise UsageError(
                f"--batch-size has {len(batch)} numbers for {self.nodes} nodes: give one per node, or one for all"
            )
        if isinstance(batch, int) and any(n < batch for n in declared):
            raise UsageError(
                f"--batch-size is {batch}, larger than the {min(declared)} examples that a node declares: use at most so many"
            )
        if declared:
            batches(batch, declared)  # refuses a number that is larger than its node
        if isinstance(batch, Sequence) and not self.per_example:
            able = " or ".join(name for name in UNITS.names() if UNITS[name].per_example)
            raise UsageError(
                f"--batch-size {self.batch_size} differs from node to node, which only the unit {able} can do: give one number for all"
            )

    def _check_data(self) -> None:
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out DIR: the folder of the run to continue")
        most = None if self.node_data is not None else DATA_SETS[self.data].examples
        if most is not None and self.nodes > most:
            raise UsageError(
                f"--nodes is {self.nodes}: {self.data} has {most} examples, one for each node at most"
            )
        if self.schema is not None and self.classes is not None:
            raise UsageError("--schema names the classes: leave --classes out")
        if (self.node_data is None) != (self.classes is None and self.schema is None):
            raise UsageError(
                "--node-data names the files and --schema says what their columns mean, so give both; dpps data describe drafts "
                "a schema, and for files of plain numbers --classes K is enough"
            )

    def _check_trust(self) -> None:
        trust, unit = PrivacyOptions.of(self).trusted(), None if self.unit == "none" else UNITS[self.unit]
        why = unit.no_partners if unit else "without a unit there is no noise to share"
        if unit and not unit.fixed_mechanism and self.mechanism != Gaussian.name:
            why = why or no_known_cost(self.mechanism)
        if why and isinstance(trust, Pairs):
            raise UsageError(
                f"--trust pairs does not go with --unit {self.unit} --mechanism {self.mechanism}: {why}; use record, or "
                "contribution with --mechanism gaussian"
            )
        trust.partners(self.nodes)  # refuses colluders that are too many

    # What the options mean

    def resolve(self) -> "Options":
        """The same, checked, with the defaults that depend on other options filled in."""
        self.check()
        if (features := with_checksum(self.features)) != self.features:
            return replace(self, features=features).resolve()
        filled: dict[str, Any] = {
            "batch_size": USUAL_BATCH,
            "epochs": USUAL_EPOCHS,
            "momentum": 0.0,
            "norm": "group" if self.per_example and self.has_norm else "batch",
            "lr_shared": 0.1,
            "lr_local": 0.1,
            **({} if self.unit == "none" else UNITS[self.unit].defaults(PrivacyOptions.of(self))),
            "hold_out": self._held_out(),
        }
        epsilon = filled.get("epsilon")
        trust = PrivacyOptions.of(self).trusted()
        if isinstance(trust, Pairs):  # so that statements name the number
            filled |= {"colluders": trust.coalition(self.nodes), "mean_variance": trust.mean_variance}
        if not self.noisy:
            filled |= {"clip": None, "epsilon": None, "budget": None}
        filled |= by_rule(replace(self, epsilon=self.epsilon or epsilon))
        if self.lr_shared is not None:
            filled["lr_local"] = self.lr_shared
        missing = {k: v for k, v in filled.items() if getattr(self, k) is None}
        return replace(self, data=self.data if self.node_data is None else OWN_DATA, **missing)

    @property
    def has_norm(self) -> bool:
        """Whether the model has a normalisation to choose."""
        return self.model in models.MODELS and models.MODELS[self.model].has_norm

    def _held_out(self) -> float:
        """The default: baselines and metrics of own data need something to be measured on."""
        if self.node_data is not None:
            return 0.2 if self.baselines or self.metrics else 0.0
        return 0.0 if self.split == "iid" else 0.1

    @property
    def noisy(self) -> bool:
        """Whether messages carry noise."""
        return self.unit != "none" and ALGORITHMS[self.algorithm].noisy

    @property
    def _unit(self) -> type[Unit] | None:
        return UNITS[self.unit] if self.noisy else None

    @property
    def per_example(self) -> bool:
        """Whether the unit protects single examples."""
        return self.unit != "none" and UNITS[self.unit].per_example

    def privacy(self) -> Unit | None:
        """The unit object."""
        return None if self._unit is None else self._unit.from_options(PrivacyOptions.of(self))

    def network(self) -> Topology:
        """The topology object, validated."""
        topology = parse(self.topology, self.nodes)
        topology.validate()
        return topology.with_dropouts(self.dropouts, seed=self.seed) if self.dropouts else topology

    def sizes(self) -> tuple[int, ...] | None:
        """The declared size of every node; None: what it holds."""
        if self.declared_sizes is None:
            return None
        return for_every_node(parse_sizes(self.declared_sizes), self.nodes)

    def rates(self) -> dict[str, Any]:
        """The arguments of the algorithm beside model and shared layers."""
        names = ("lr_shared", "lr_local", "lr_step", "batch_size", "local_steps")
        given = {name: getattr(self, name) for name in names}
        if self.batch_size is not None:
            given["batch_size"] = parse_batch(self.batch_size)
        return given | {"optimizer": self._optimizer(), "pretrained": is_own(self.features)}

    def measures(self) -> tuple[str, ...]:
        """The names in --metrics."""
        return () if self.metrics is None else tuple(name.strip() for name in self.metrics.split(","))

    def _optimizer(self) -> Momentum | None:
        return None if self.momentum in (None, 0) else Momentum(self.momentum)

    # To and from files

    def to_json(self) -> dict[str, Any]:
        """For summary.json: option names, paths as text."""
        found = {f.name.replace("_", "-"): getattr(self, f.name) for f in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}

    def to_toml(self) -> str:
        """A file for --config; options left at None are left out."""
        found = {**self.to_json(), **({} if self.node_data is None else {"data": OWN_DATA})}
        return "".join(
            f"{name} = {json.dumps(value)}\n" for name, value in found.items() if value is not None
        )

    @classmethod
    def from_toml(cls, path: Path) -> "Options":
        """The options in a TOML file; the names are those of the command line."""
        table = read_config(path)
        for name in [name for name in table if name in RETIRED]:
            if table.pop(name) != RETIRED[name].default:
                raise UsageError(
                    f"{path}: {name} is no longer an option: {RETIRED[name].instead}, and delete this line"
                )
        return Options(**typed_options(table, Options, path))

    @classmethod
    def from_json(cls, found: Mapping[str, Any], where: str, otherwise: str) -> "Options":
        """What `to_json` wrote; `where` it was found, and what to say `otherwise`, if these are not options of `dpps train`.

        Raises:
            UsageError: they are no options, or those of another version.
        """
        refuse_retired(found, where)
        values = {name: value for name, value in found.items() if name not in RETIRED}
        if "data" not in values:
            raise UsageError(otherwise)
        if strange := sorted(set(values) - set(Options().to_json())):
            raise UsageError(
                f"{where} was made by another version of dpps (this one has no option {strange[0]}): use that version"
            )
        typed = typed_options(values, Options, where)
        # 3 and 3.0 have other fingerprints: numbers stay as they were written
        return Options(
            **{k: values[k.replace("_", "-")] if type(v) is float else v for k, v in typed.items()}
        )

    def common(self) -> dict[str, Any]:
        """What all processes of a distributed run must have alike; files that only one machine has are not among it."""
        return {k: v for k, v in self._computed().items() if k != "weights"}

    def _computed(self) -> dict[str, Any]:
        """The options that say what is computed."""
        hints = get_type_hints(type(self), include_extras=True)
        runtime = {name for name, hint in hints.items() if Runtime in get_args(hint)}
        new = {k for k in NEW if getattr(self, k.replace("-", "_")) is None}
        return {
            k: v for k, v in self.to_json().items() if k.replace("-", "_") not in runtime and k not in new
        }

    def fingerprint(self) -> str:
        """Equal for two configurations that compute the same. The options of 0.2 count as it had them by default, so that
        its runs can be continued."""
        before = {name: retired.default for name, retired in RETIRED.items() if not retired.runtime}
        return fingerprint(before | self._computed())


def read_config(path: Path, named: str = "--config") -> dict[str, Any]:
    """What a TOML file of options holds; `named` is what messages call it."""
    remedy = "--print-config of dpps train or dpps stats prints such a file"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{named} {path} cannot be read ({error.strerror}): {remedy}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{named} {path} is not TOML ({error}): {remedy}") from error


# Which options have an effect


def ignored(options: Options, *, together: bool = True) -> dict[str, str]:
    """The one table of which option applies when: those that have no effect beside the others, by name, and why.

    Args:
        options: all of them.
        together: whether it is a run of several processes.
    """
    unit, algorithm = options._unit, ALGORITHMS[options.algorithm]
    named, own = f"--algorithm {options.algorithm}", options.node_data is not None
    sensitivity = None if algorithm.own_sensitivity else SENSITIVITIES[options.sensitivity]
    mechanism = unit.fixed_mechanism if unit is not None else None
    if unit is not None and "--mechanism" in unit.own_options:
        mechanism = mechanism or options.mechanism
    pure = MECHANISMS[mechanism].pure if mechanism else None
    free = " or ".join(
        name
        for name in UNITS.names()
        if "--mechanism" in UNITS[name].own_options and not UNITS[name].fixed_mechanism
    )
    with_norm = " or ".join(name for name in models.MODELS.names() if models.MODELS[name].has_norm)
    found = _of_others(UNITS, unit, f", and the unit is {options.unit if unit else 'none'}")
    for names, useless, why in (
        (
            "mechanism",
            unit and unit.fixed_mechanism,
            f"the unit {options.unit} is defined with {str(mechanism).title()} noise; --unit {free} has a choice",
        ),
        (
            "epsilon budget noise-multiplier clip delta secure-noise",
            unit is None,
            "without noise (--unit none, --algorithm sgp) it has no meaning; choose a unit to have some",
        ),
        ("noise-multiplier", pure is True, "it belongs to Gaussian noise; here --budget or --epsilon set it"),
        ("budget", pure is False, "it belongs to Laplace noise; here --noise-multiplier or --epsilon set it"),
        ("colluders mean-variance absentees", options.trust == "nobody", "it belongs to --trust pairs"),
        ("sensitivity", algorithm.own_sensitivity, f"{named} uses {algorithm.own_sensitivity}"),
        ("sync-every", not algorithm.synchronises, f"{named} does not synchronise"),
        ("shared", algorithm.shares_all, f"{named} shares the whole model"),
        ("norm", not options.has_norm, f"it belongs to --model {with_norm}"),
        ("data data-dir split", own, "the nodes' own data replaces it"),
        (
            "data-dir",
            not own and DATA_SETS[options.data].embedded,
            f"{options.data} comes with the package; --data names another",
        ),
        ("timeout seeded-noise", not together, "it is for several processes, torchrun -m dpps train"),
    ):
        if useless:
            found = dict.fromkeys(names.split(), why) | found
    return _of_others(SENSITIVITIES, sensitivity) | found


def _of_others(registry: Registry[Any], used: Any, remark: str = "") -> dict[str, str]:
    """The options that belong only to other entries of a registry than the one that is used."""
    found: dict[str, list[str]] = {}
    for name in registry.names():
        for flag in registry[name].own_options:
            if used is None or flag not in used.own_options:
                found.setdefault(flag.removeprefix("--"), []).append(name)
    return {
        flag: f"it belongs to --{registry.kind} {' or '.join(names)}{remark}" for flag, names in found.items()
    }


def refuse_ignored(arguments: Sequence[str], options: Options, *, together: bool = True) -> None:
    """Refuse an option on the command line that would be ignored: whoever writes one means something by it.

    A configuration file may hold every option (--print-config writes them all), so only the command line counts.
    """
    useless = ignored(options, together=together)
    for name, value in (("shared", "all"), ("mechanism", options._unit and options._unit.fixed_mechanism)):
        if getattr(options, name) == value:  # what it is anyway
            useless.pop(name, None)
    refuse_given(arguments, useless)


def refuse_given(arguments: Sequence[str], useless: Mapping[str, str]) -> None:
    """Refuse words of a command line that name one of these options, which would be ignored for these reasons."""
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-").removeprefix("--")
        if word.startswith("--") and name in useless:
            raise UsageError(f"--{name} would be ignored here ({useless[name]}): leave it out")


def effective(options: Options, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The (resolved) options that changed the result, by name, with what the run chose itself for those left open. What was switched
    off (None, no, 0) did not."""
    useless = {*ignored(options), *(("noise-rate",) if options.budget is None else ())}
    return {
        name: value
        for name, value in {**options.common(), **chosen}.items()
        if name not in useless and (value not in (None, False, "none") or name in ("unit", "seed"))
    }


# Values


_LEAST = {"nodes": 2, **dict.fromkeys(("epochs", "local-steps", "mixes", "timeout"), 1)}
_LEAST |= dict.fromkeys(("sync-every", "lr-step", "checkpoint-every", "spare-rounds"), 0)
_NEVER_IGNORED = (
    *("epsilon", "budget", "noise-multiplier", "clip", "mechanism"),
    *("colluders", "mean-variance", "absentees"),
)
"""Refused wherever they come from if they would be ignored; of the others a file may hold values."""
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text in quotes",
    Path: "a path in quotes",
}


def typed_options(table: Mapping[str, Any], kind: type[Any], where: Path | str) -> dict[str, Any]:
    """The options in a file by the names of the fields of `kind`, refused if there is no such option, or it is of another type."""
    hints, values = get_type_hints(kind), dict[str, Any]()
    named = {field.name.replace("_", "-"): hints[field.name] for field in fields(kind)}
    for name, value in table.items():
        if name not in named:
            raise unknown(f"option in {where}", name, named)
        kinds = get_args(named[name]) or (named[name],)
        kinds = tuple(part for each in kinds for part in (get_args(each) or (each,)))  # those of a literal
        key = name.replace("-", "_")
        if Path in kinds and isinstance(value, str):
            values[key] = Path(value)
        elif float in kinds and type(value) is int:
            values[key] = float(value)
        elif type(value) in kinds or value in kinds:
            values[key] = value
        else:
            wanted = " or ".join(_KINDS.get(each, repr(each)) for each in kinds if each is not type(None))
            raise UsageError(f"{where}: {name} is {value!r}: it must be {wanted}")
    return values


# What options that are left open become: by the rule if there is one


def sizes(options: Options) -> tuple[int, ...] | None:
    """What every node holds, as far as options and published facts say: declared sizes, or equal shares of a named data set.
    None: not known before the files are read."""
    declared = options.sizes()
    if declared is not None or options.node_data is not None:
        return declared
    examples = DATA_SETS[options.data].examples
    if examples is None:
        return None
    held = options._held_out() if options.hold_out is None else options.hold_out
    return (int(examples / options.nodes * (1 - held)),) * options.nodes


def shape(options: Options) -> tuple[int, ...] | None:
    """Of what a model reads of one example of a named data set or by a schema; None: not known before the files are read."""
    stored: tuple[int, ...] | None
    read: tuple[int, ...] | None
    if options.node_data is None:
        stored, read = DATA_SETS[options.data].shape, DATA_SETS[options.data].input_shape
    else:
        stored = read = None if options.schema is None else read_schema(options.schema).shape
    return read if stored is None or options.features == "none" else output_shape(options.features, stored)


def length(options: Options) -> float | None:
    """How long the inputs of tables are by their schema; None: not known."""
    if options.node_data is None or options.schema is None or options.features != "none":
        return None
    return read_schema(options.schema).length


def planned_task(options: Options) -> Task:
    """What a run with these options predicts."""
    if options.schema is not None:
        return weighted(options, read_schema(options.schema).task)
    classes = DATA_SETS[options.data].classes if options.node_data is None else options.classes
    return weighted(options, Classification(tuple(map(str, range(classes or 0)))))


def check_task(options: Options) -> None:
    """Refuse metrics and weights of classes that do not suit what is predicted."""
    if options.measures() or options.class_weights is not None:
        task = planned_task(options)
        for name in options.measures():
            task.metric(name)


def weighted(options: Options, task: Task) -> Task:
    """The task with the weights of classes that the options say."""
    if options.class_weights is None:
        return task
    if not isinstance(task, Classification):
        raise UsageError(f"--class-weights: {task.name} has no classes: leave it out")
    try:
        weights = tuple(float(part) for part in options.class_weights.split(","))
    except ValueError as error:
        raise UsageError(
            f"--class-weights is {options.class_weights!r}: give one number for each of {len(task.classes)} classes, such as 1,6"
        ) from error
    return replace(task, weights=weights)


def build_arguments(options: Options, shape: tuple[int, ...], task: Task) -> dict[str, Any]:
    """The arguments of `dpps.models.build`."""
    shared, dropout = (
        ALGORITHMS[options.algorithm].shares(options.shared),
        0.0 if options.per_example else 0.1,
    )
    named = {"name": options.model, "shared": shared, "shape": shape, "classes": task.outputs}
    return {**named, "norm": options.norm, "dropout": dropout}


def planned(options: Options) -> tuple[Plan, int]:
    """The plan of a run with these (resolved) options, and how many parameters it shares, before any data is read."""
    held, read = sizes(options), shape(options)
    if options.node_data is None and read is None:
        raise UsageError(
            f"--data {options.data}: its recipe does not say what it holds, so there is nothing to plan with; give the recipe "
            "examples=N and shape=(channels, height, width)"
        )
    if read is None:
        raise UsageError(
            f"--classes {options.classes} does not say how many columns the files have, and a plan reads none of them: give "
            "--schema FILE instead (dpps data describe writes one)"
        )
    if held is None:
        raise UsageError(
            "--declared-sizes is missing: a plan reads no files, so say how many examples each node holds, such as "
            "--declared-sizes 35,90,180"
        )
    assert options.epochs is not None
    algorithm = ALGORITHMS[options.algorithm]
    task = planned_task(options)
    network, prefixes = models.build(**build_arguments(options, read, task))
    model, prefixes = task.head(network), task.shared(prefixes)
    made = algorithm(model, prefixes, task=task, input_length=length(options), **options.rates())
    unit = made.unit(options.privacy())
    if unit is not None and options.mixes > 1 and not unit.has_total:
        raise UsageError(
            f"--mixes is {options.mixes}: the unit {unit.name} hides rows, and more steps would send them without noise; use 1, "
            "or the unit record or contribution"
        )
    if unit is not None and unit.per_example:
        check_record(made)
        refuse_mixing(model)
    plan = made.plan(held, options.epochs, options.spare_rounds, unit)
    return plan, made.partition.shared_size


def by_rule(options: Options) -> dict[str, Any]:
    """What the rule fills in for options left open. Of data that nobody has described, epochs, batch and rates stay open: the run
    chooses them when it has read its files and all nodes have announced their sizes."""
    found = suggestion(options)
    if found is not None:
        part = isinstance(found.batch_size, float)
        chosen = {
            "batch_size": f"{found.batch_size:g}" if part else found.batch_size,
            "epochs": found.epochs,
            "clip": found.clip,
            "momentum": found.momentum,
        }
        return chosen | {"lr_shared": found.rate, "lr_local": found.rate}
    if not _has_rule(options):
        return {}
    rates = {} if options.lr_shared is not None else {"batch_size": None, "lr_shared": None, "lr_local": None}
    softmax = _softmax(options)
    long = length(options) if softmax else None
    momentum = MOMENTUM if softmax and long is None else 0.0
    return {"epochs": None, "clip": suggested_clip(long, softmax=softmax), "momentum": momentum, **rates}


def _has_rule(options: Options) -> bool:
    names = ("batch_size", "epochs", "clip", "momentum", "lr_shared")
    return options.per_example and options.noisy and None in (getattr(options, name) for name in names)


def _softmax(options: Options) -> bool:
    """Whether the model is a softmax regression, for which the rule is finer."""
    return options.model in models.MODELS and models.MODELS[options.model].softmax_regression


def suggestion(options: Options) -> Suggestion | None:
    """What the rule says of options with an epsilon or a noise multiplier; None where it says nothing: for other units, data nobody
    has described, or when all is given."""
    if not _has_rule(options):
        return None
    softmax = _softmax(options)
    held, read = sizes(options), shape(options) if softmax else ()
    if held is None or read is None:
        return None
    task, partners = planned_task(options), PrivacyOptions.of(options).trusted().partners(options.nodes)
    return suggest(
        held,
        prod(read) if softmax else None,
        epsilon=options.epsilon,
        delta=options.delta,
        noise_multiplier=options.noise_multiplier,
        records_per_user=options.records_per_user,
        spare_rounds=options.spare_rounds,
        mean_noise=1.0 if partners is None else partners.shares().independent,
        batch_size=None if options.batch_size is None else parse_batch(options.batch_size),
        epochs=options.epochs,
        clip=options.clip,
        momentum=options.momentum,
        length=length(options) if softmax else None,
        output_noise=task.output_noise,
        steepest=task.steepest,
        pretrained=is_own(options.features),
        local=not softmax and ALGORITHMS[options.algorithm].shares(options.shared) != "all",
    )
