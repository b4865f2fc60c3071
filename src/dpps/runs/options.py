"""The options of a run: one dataclass that is the command line of `dpps train`, the TOML file and the `config` of summary.json.

`Options.resolve` checks them and fills in the defaults that depend on each other. `ignored` is the one table of which option
has an effect beside which others: refusals, `dpps plan` and the report all ask it.
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from tyro.conf import arg

from dpps import models
from dpps.data import DATA_SETS
from dpps.errors import UsageError, unknown
from dpps.features import FEATURES
from dpps.learning.algorithm import ALGORITHMS
from dpps.learning.released import Averaging, Momentum
from dpps.learning.sampling import batches, for_every_node, parse_batch, parse_sizes
from dpps.learning.schedules import FORMS as SCHEDULES
from dpps.learning.schedules import parse_schedule
from dpps.learning.suggestion import USUAL_BATCH, USUAL_EPOCHS
from dpps.noise.mechanisms import MECHANISMS
from dpps.privacy.partners import TRUSTS, Pairs
from dpps.privacy.units import UNITS, PrivacyOptions, Unit
from dpps.runs.suggest import by_rule, planned_task
from dpps.runs.summary import fingerprint
from dpps.sensitivity import SENSITIVITIES
from dpps.topology import TOPOLOGIES, Topology, parse

OWN_DATA = "own data"
"""What --data says, in files and titles, of a run on --node-data."""


RETIRED = {"threads": "set the environment variable OMP_NUM_THREADS=N instead"}
"""Options of earlier versions, and what to do instead. They changed how a run was executed, not what it computed, so options
kept in a folder are read without them."""


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

    With no options: ten nodes, MNIST (the embedded part), one shared layer, and every training example protected with
    epsilon 3 in total. Add --out DIR to choose where the results go.

    --config FILE takes defaults from a TOML file with the same names as the options; --print-config writes one and stops.
    """

    data: Annotated[str, _names(*DATA_SETS.names())] = "mnist-mini"
    """Data set. mnist-mini comes with the package; the others are looked for in --data-dir, $DPPS_DATA and the user cache, and downloaded otherwise."""
    data_dir: Annotated[Path | None, _optional("PATH"), Runtime] = None
    """Folder with one sub-folder per data set."""
    split: Annotated[str, _names("iid", "dirichlet:ALPHA", "label:K")] = "iid"
    """How examples are dealt to the nodes."""
    hold_out: Annotated[float | None, _optional("FLOAT")] = None
    """Part of each node's examples kept for testing it on its own data (default: 0 for iid, 0.1 otherwise; with --node-data, where there are no test files, 0.2 for --baselines and --metrics)."""
    features: Annotated[str, _names("none", *FEATURES.names())] = "none"
    """Computed of every image once, before training, with fixed filters (so without a privacy cost), and kept beside the data: wavelet scattering. Best with --model linear."""
    model: Annotated[str, _names(*models.MODELS.names(), "MODULE:CALLABLE")] = "mlp"
    """The paper's models, or linear (softmax regression, on features or columns) or cnn (a small one with tanh), or your own: package.module:callable, called with the shape of an example and the number of classes."""
    norm: Literal["batch", "group"] = "batch"
    """Normalisation of resnet18; the record unit needs group."""
    weights: Annotated[Path | None, _optional("PATH")] = None
    """State dict to start from (.pt or .safetensors, names as torchvision's)."""
    shared: Annotated[str, arg(metavar="{1,2,all,PREFIX,..}")] = "1"
    """Layers shared with the other nodes: the paper's 1 or 2, all, or prefixes of parameter names."""
    algorithm: Annotated[str, _names(*ALGORITHMS.names())] = "partpsp"
    """partpsp; sgp: all shared, no noise; sgpdp: all shared; pedfl: our reading of it (D-PSGD on the whole model, real sensitivity, no synchronisation; not in the unit record)."""
    nodes: int = 10
    """How many nodes."""
    topology: Annotated[str, _names(*TOPOLOGIES.names())] = "exp"
    """Who sends to whom. base-K: K peers a round (the Base-(K+1) graph)."""
    dropouts: float = 0.0
    """Chance that a node is away in a round (simulation)."""
    sync_every: int = 0
    """All nodes average with everybody every so many rounds (0 = never)."""
    unit: Annotated[str, _names(*UNITS.names(), "none")] = "record"
    """Who is protected: one training example (record), all a node contributes (contribution), which node sent a message (node-swap, the paper), or nobody (none)."""
    epsilon: Annotated[float | None, _optional("FLOAT")] = None
    """Total privacy loss allowed; the noise is solved for (default 3, unless noise is given directly). In the unit node-swap: sum of rounds, no guarantee."""
    delta: float = 1e-5
    """Chance that the guarantee fails; well below 1 / (number of examples)."""
    clip: Annotated[float | None, _optional("FLOAT")] = None
    """Clip: L2 per example (record, default 1; with --model linear 0.1), L1 or L2 per gradient (contribution, default 30 or 1), L1 per gradient (node-swap, default none)."""
    records_per_user: int = 1
    """How many examples one person may own at a node (record)."""
    mechanism: Annotated[str, _names(*MECHANISMS.names())] = "laplace"
    """Noise in the unit contribution (node-swap is Laplace, record Gaussian)."""
    noise_multiplier: Annotated[float | None, _optional("FLOAT")] = None
    """Gaussian noise, deviation over sensitivity, instead of --epsilon."""
    trust: Annotated[str, _names(*TRUSTS)] = "nobody"
    """pairs: partners share noise that cancels in the sum, which makes the mean nearly as exact as a trusted server's (record, and contribution with Gaussian noise). nobody: every node's noise is its own."""
    colluders: Annotated[int | None, _optional("C")] = None
    """How many other nodes may pool their secrets with an observer (--trust pairs; default a third of the nodes, rounded down)."""
    mean_variance: Annotated[float | None, _optional("R")] = None
    """Variance of the noise in the network's mean over the least that so many colluders allow, without colluders a trusted server's (--trust pairs; default 1.25). Closer to 1: more pair noise in every message. dpps plan shows the trade."""
    budget: Annotated[float | None, _optional("FLOAT")] = None
    """b of the paper: epsilon of a round is budget / noise rate (node-swap default 5; contribution: instead of --epsilon)."""
    noise_rate: float = 1e-3
    """gamma_n of the paper."""
    sensitivity: Annotated[str, _names(*SENSITIVITIES.names())] = "certified"
    """Where the sensitivity comes from in the unit node-swap. certified has a proof; paper is tuned by --c-prime and --decay; oracle is the real distance (simulation)."""
    c_prime: float = 0.78
    """C' of the paper."""
    decay: float = 0.55
    """lambda of the paper."""
    epochs: Annotated[int | None, _optional("INT")] = None
    """Passes over the data (default 12, in the unit record as many more as make 120 rounds; at least 15 with --model linear)."""
    batch_size: Annotated[int | str | None, _optional("N|N,N,..|1/K")] = None
    """Examples per node and round, in the unit record their expected number: one number for all nodes, one per node with commas between, or a part of every node's examples (default 100, in the unit record at most half of a node's examples; with --model linear there an eighth of them)."""
    declared_sizes: Annotated[str | None, _optional("N|N,N,..")] = None
    """How many examples each node says it holds: one number for all, or one per node with commas between (default: what it holds at the first start). Public; rounds and sampling rates follow from it, whatever a node really holds."""
    lr_shared: Annotated[float | None, _optional("FLOAT")] = None
    """Learning rate of the shared parameters (default 0.1; record: what the rule in docs/recipes.md suggests for its noise, see dpps plan)."""
    lr_local: Annotated[float | None, _optional("FLOAT")] = None
    """Learning rate of the local parameters (default as --lr-shared)."""
    lr_step: int = 0
    """All rates divided by 10 at the start of epochs K, 2K, ... (the authors: 5; 0 = never); restarts the counters of topology and synchronisation."""
    schedule: Annotated[str, _names(*SCHEDULES)] = "constant"
    """Factor on all rates in every round, fixed at the start. step:K: a tenth after each K-th of the run; warm-up:K: growing over K rounds."""
    momentum: Annotated[float | None, _optional("FLOAT")] = None
    """Of released updates, in [0, 1): costs no privacy; choose rates smaller by the factor 1 - momentum (default 0; with --model linear and the unit record 0.8)."""
    averaging: float = 0.0
    """Average what comes out over this part of the rounds at the end (0 = take the last): costs no privacy."""
    mixes: int = 1
    """Gossip steps per released message: more agreement without more privacy loss (not in the unit node-swap)."""
    local_steps: int = 1
    """Gradient steps per round; the clipped total change is what is shared."""
    spare_rounds: int = 0
    """Rounds paid for beyond the plan: rounds repeated after a crash are charged again and must fit the epsilon."""
    seed: int = 0
    """Of the split, the start weights and, in simulation, noise and sampling: the same seed and number of threads (OMP_NUM_THREADS) repeat a run bit for bit."""
    secure_noise: bool = False
    """Noise from a cryptographic keystream on an integer grid, keyed by the operating system: for messages that really leave."""
    track_real: bool = False
    """Record the real sensitivity of every round (simulation; costs nodes^2)."""
    out: Annotated[Path | None, _optional("PATH"), Runtime] = None
    """Folder for the results (default: runs/DATE-TIME)."""
    resume: Annotated[bool, Runtime] = False
    """Go on from the newest checkpoint in --out."""
    overwrite: Annotated[bool, Runtime] = False
    """Delete the run that --out holds and start again."""
    checkpoint_every: Annotated[int, Runtime] = 0
    """Rounds between checkpoints (0: only when stopped by a signal, and at the end of a run whose messages left)."""
    baselines: Annotated[bool, Runtime] = False
    """Afterwards also the same run without noise, and each node alone: what did joining gain, what did privacy cost? Computed on private data without noise, so for your own eyes, and in a simulation only. Three times the work."""
    tensorboard: Annotated[bool, Runtime] = False
    """Also write TensorBoard events (needs dpps[tensorboard])."""
    quiet: Annotated[bool, Runtime] = False
    """No progress display."""
    timeout: Annotated[float, Runtime] = 60.0
    """Distributed: seconds within which a dead or hung process is noticed; longer than the longest round."""
    join_timeout: Annotated[float, Runtime] = 300.0
    """Distributed: seconds to wait at the start until all processes are there."""
    node_data: Annotated[Path | None, _optional("PATH"), Runtime] = None
    """Folder of a node's own examples, such as data/node-{rank}: train.csv (.tsv, .parquet, .npz), and the same for test if wanted; or folders train and test of images, with a sub-folder for every class. {rank} stands for the node's number. Replaces --data; needs --schema, or --classes for plain numbers."""
    schema: Annotated[Path | None, _optional("PATH"), Runtime] = None
    """Public description of the tables or images in --node-data, the same for all nodes: columns, ranges, categories, classes, size (dpps data describe writes one)."""
    classes: Annotated[int | None, _optional("K")] = None
    """Number of classes in --node-data that holds plain numbers, with the label last; --schema names them itself."""
    metrics: Annotated[str | None, _optional("NAME,NAME,.."), Runtime] = None
    """Also measured at the end, at every node, on the test set and its own test file: accuracy, balanced-accuracy, auroc, f1, calibration. Not noised: for the node's own eyes."""
    seeded_noise: bool = False
    """Distributed: noise and sampling from --seed as in a simulation, for tests; nothing is private then."""

    def check(self) -> None:
        """Refuse what is wrong by itself, before anything is read. (Not at construction: the parser would wrap the message.)"""
        _known("data set", self.data, (*DATA_SETS.names(), *([] if self.node_data is None else [OWN_DATA])))
        _known("features", self.features, ("none", *FEATURES.names()))
        if not models.is_own(self.model):
            _known("model", self.model, models.MODELS.names())
        _known("algorithm", self.algorithm, ALGORITHMS)
        _known("unit", self.unit, (*UNITS.names(), "none"))
        _known("sensitivity", self.sensitivity, SENSITIVITIES.names())
        _known("mechanism", self.mechanism, MECHANISMS.names())
        _known("trust", self.trust, TRUSTS)
        for name in ("nodes", "epochs", "local_steps", "mixes"):
            if getattr(self, name) is not None:
                _least(name, getattr(self, name), 2 if name == "nodes" else 1)
        parse_schedule(self.schedule)
        self._optimizer()
        if self.averaging:
            Averaging(self.averaging)
        self._check_batch()
        for name in ("sync_every", "lr_step", "checkpoint_every", "spare_rounds"):
            _least(name, getattr(self, name), 0)
        if not 0 <= self.seed < 1 << 63:
            raise UsageError(f"--seed is {self.seed}: it must be a whole number from 0 to 2^63 - 1")
        if self.hold_out is not None and not 0 <= self.hold_out < 1:
            raise UsageError(f"--hold-out is {self.hold_out}: it must lie in [0, 1)")
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite exclude each other: choose one")
        self._check_options()
        self.sizes()
        for name in ("timeout", "join_timeout"):
            if not 1 <= getattr(self, name) < float("inf"):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} is {getattr(self, name)}: it must be 1 second or more")
        self._check_data()
        for name in self.measures():
            planned_task(self).metric(name)
        if self.seeded_noise and self.secure_noise:
            raise UsageError("--seeded-noise and --secure-noise exclude each other: choose one")

    def _check_batch(self) -> None:
        if self.batch_size is None:
            return
        batch, declared = parse_batch(self.batch_size), self.sizes() or ()
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
        most = None if self.node_data is not None else DATA_SETS[self.data].examples
        if most is not None and self.nodes > most:
            raise UsageError(
                f"--nodes is {self.nodes}: {self.data} has {most} examples, one for each node at most"
            )
        if self.schema is not None and self.classes is not None:
            raise UsageError("--schema names the classes: leave --classes out")
        if (self.node_data is None) != (self.classes is None and self.schema is None):
            raise UsageError(
                "--node-data and --schema (or, for plain numbers, --classes) belong together: the folder, and what its files mean"
            )

    def _check_options(self) -> None:
        """An option that would be ignored is refused: somebody means something by it."""
        noise = ("epsilon", "budget", "noise_multiplier", "clip")
        given = [name.replace("_", "-") for name in noise if getattr(self, name) is not None]
        if not self.noisy and given:
            raise UsageError(
                f"--{given[0]} has no meaning without noise (--unit none, --algorithm sgp): leave it out, or choose a unit"
            )
        if self.unit != "none":
            UNITS[self.unit].check_options(PrivacyOptions.of(self))
        self._check_trust()
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out DIR: the folder of the run to go on with")

    def _check_trust(self) -> None:
        if self.trust == "nobody":
            if self.colluders is not None:
                raise UsageError("--colluders belongs to --trust pairs: add that, or leave it out")
            if self.mean_variance is not None:
                raise UsageError("--mean-variance belongs to --trust pairs: add that, or leave it out")
            return
        why = (
            "without a unit there is no noise to share"
            if self.unit == "none"
            else UNITS[self.unit].no_partners
        )
        if why:
            raise UsageError(
                f"--trust pairs does not go with --unit {self.unit}: {why}; use record, or contribution with --mechanism gaussian"
            )
        # refuses colluders that are too many
        PrivacyOptions.of(self).trusted().partners(self.nodes)

    # What the options mean

    def resolve(self) -> "Options":
        """The same, checked, with the defaults that depend on other options filled in."""
        self.check()
        filled: dict[str, Any] = {
            "batch_size": USUAL_BATCH,
            "epochs": USUAL_EPOCHS,
            "momentum": 0.0,
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
        filled |= by_rule(dataclasses.replace(self, epsilon=self.epsilon or epsilon))
        if self.lr_shared is not None:
            filled["lr_local"] = self.lr_shared
        missing = {k: v for k, v in filled.items() if getattr(self, k) is None}
        return dataclasses.replace(self, data=self.data if self.node_data is None else OWN_DATA, **missing)

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
    def per_example(self) -> bool:
        """Whether the unit protects single examples."""
        return self.unit != "none" and UNITS[self.unit].per_example

    def privacy(self) -> Unit | None:
        """The unit object."""
        if not self.noisy:
            return None
        return UNITS[self.unit].from_options(PrivacyOptions.of(self))

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
        names = ("lr_shared", "lr_local", "lr_step", "batch_size", "local_steps", "averaging")
        schedule = None if self.schedule == "constant" else parse_schedule(self.schedule)
        given = {name: getattr(self, name) for name in names}
        if self.batch_size is not None:
            given["batch_size"] = parse_batch(self.batch_size)
        return given | {"schedule": schedule, "optimizer": self._optimizer()}

    def measures(self) -> tuple[str, ...]:
        """The names in --metrics."""
        return () if self.metrics is None else tuple(name.strip() for name in self.metrics.split(","))

    def _optimizer(self) -> Momentum | None:
        return None if self.momentum in (None, 0) else Momentum(self.momentum)

    # To and from files

    def to_json(self) -> dict[str, Any]:
        """For summary.json: option names, paths as text."""
        return {f.name.replace("_", "-"): _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_toml(self) -> str:
        """A file for --config; options left at None are left out."""
        found = {**self.to_json(), **({} if self.node_data is None else {"data": OWN_DATA})}
        return "".join(
            f"{name} = {json.dumps(value)}\n" for name, value in found.items() if value is not None
        )

    @classmethod
    def from_toml(cls, path: Path) -> "Options":
        """The options in a TOML file; the names are those of the command line."""
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"--config {path} is not TOML: {error}") from error
        hints = {name.replace("_", "-"): hint for name, hint in get_type_hints(Options).items()}
        values: dict[str, Any] = {}
        for name, value in table.items():
            if name in RETIRED:
                raise UsageError(
                    f"{path}: {name} is no longer an option: {RETIRED[name]}, and delete this line"
                )
            if name not in hints:
                raise unknown(f"option in {path}", name, hints)
            values[name.replace("-", "_")] = _typed(path, name, value, hints[name])
        return Options(**values)

    @classmethod
    def from_json(cls, found: Mapping[str, Any], otherwise: str) -> "Options":
        """What `to_json` wrote.

        Raises:
            UsageError: with the message `otherwise`: these are not options of `dpps train`.
        """
        hints = get_type_hints(Options)
        values = {name.replace("-", "_"): value for name, value in found.items() if name not in RETIRED}
        if not set(values) <= set(hints) or "data" not in values:
            raise UsageError(otherwise)
        paths = {name for name, hint in hints.items() if Path in get_args(hint)}
        typed: dict[str, Any] = {n: Path(v) if n in paths and v else v for n, v in values.items()}
        return Options(**typed)

    def common(self) -> dict[str, Any]:
        """What all processes of a distributed run must have alike; files that only one machine has are not among it."""
        return {k: v for k, v in self._computed().items() if k != "weights"}

    def _computed(self) -> dict[str, Any]:
        """The options that say what is computed."""
        hints = get_type_hints(type(self), include_extras=True)
        runtime = {name for name, hint in hints.items() if Runtime in get_args(hint)}
        return {k: v for k, v in self.to_json().items() if k.replace("-", "_") not in runtime}

    def fingerprint(self) -> str:
        """Equal for two configurations that compute the same."""
        return fingerprint(self._computed())


# Which options have an effect


def ignored(options: Options) -> dict[str, str]:
    """The options that have no effect beside the others, by name, and why."""
    found: dict[str, str] = {}
    unit = options.unit if options.noisy else "none"
    units = {name: _names_of(UNITS[name].own_options) for name in UNITS.names()}
    for name in dict.fromkeys(name for own in units.values() for name in own):
        if name not in units.get(unit, ()):
            having = [other for other in units if name in units[other]]
            found[name] = f"it belongs to the unit {' or '.join(having)}, and the unit is {unit}"
    if unit in UNITS and (mechanism := UNITS[unit].fixed_mechanism):
        found.setdefault("mechanism", f"the unit {unit} is defined with {mechanism.title()} noise")
    algorithm, named = ALGORITHMS[options.algorithm], f"--algorithm {options.algorithm}"
    used = () if algorithm.own_sensitivity else _names_of(SENSITIVITIES[options.sensitivity].own_options)
    for sensitivity in SENSITIVITIES.names():
        for name in _names_of(SENSITIVITIES[sensitivity].own_options):
            if name not in used:
                found.setdefault(name, f"it belongs to --sensitivity {sensitivity}")
    own = options.node_data is not None
    rules = {
        "sensitivity": (algorithm.own_sensitivity, f"{named} uses {algorithm.own_sensitivity}"),
        "sync-every": (not algorithm.synchronises, f"{named} does not synchronise"),
        "shared": (algorithm.shares_all, f"{named} shares the whole model"),
        "norm": (
            options.model not in models.MODELS or not models.MODELS[options.model].has_norm,
            f"it belongs to --model {' or '.join(n for n in models.MODELS.names() if models.MODELS[n].has_norm)}",
        ),
        "delta": (not options.noisy, "without noise there is no guarantee that could fail"),
        "secure-noise": (not options.noisy, "there is no noise"),
        "data": (own, "the nodes' own data replaces it"),
        "data-dir": (own, "the nodes' own data replaces it"),
        "split": (own, "the nodes' own data is split already"),
    }
    if not own and DATA_SETS[options.data].embedded:
        rules["data-dir"] = (True, f"{options.data} comes with the package; --data names another")
    for name, (useless, why) in rules.items():
        if useless:
            found.setdefault(name, why)
    return found


def refuse_ignored(arguments: Sequence[str], options: Options) -> None:
    """Refuse an option on the command line that would be ignored: whoever writes one means something by it.

    A configuration file may hold every option (--print-config writes them all), so only the command line counts.
    """
    unit = options.unit if options.noisy else "none"
    anyway = {"shared": "all", "mechanism": UNITS[unit].fixed_mechanism if unit in UNITS else None}
    useless = ignored(options)
    for word in arguments:
        name = word.partition("=")[0].replace("_", "-").removeprefix("--")
        if word.startswith("--") and name in useless:
            if name in anyway and getattr(options, name) == anyway[name]:
                continue
            raise UsageError(f"--{name} would be ignored here ({useless[name]}): leave it out")


def effective(options: Options, chosen: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The options that changed the result, by name. What was switched off (None, no, 0) did not.

    Args:
        options: resolved.
        chosen: what the run chose itself for options left open.
    """
    useless = {*ignored(options), *(("noise-rate",) if options.budget is None else ())}
    return {
        name: value
        for name, value in {**options.common(), **(chosen or {})}.items()
        if name not in useless and (value not in (None, False, "none") or name in ("unit", "seed"))
    }


def _names_of(flags: Sequence[str]) -> tuple[str, ...]:
    return tuple(flag.removeprefix("--") for flag in flags)


# Values


_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text in quotes",
    Path: "a path in quotes",
}


def _typed(path: Path, name: str, value: Any, hint: Any) -> Any:
    """The value of an option in a file, refused if it is of another kind than the option."""
    kinds = get_args(hint) or (hint,)
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) in kinds or value in kinds:  # a literal is its own kind
        return value
    wanted = " or ".join(_KINDS.get(kind, repr(kind)) for kind in kinds if kind is not type(None))
    raise UsageError(f"{path}: {name} is {value!r}: it must be {wanted}")


def _known(kind: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise unknown(kind, value, allowed)


def _least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be {least} or more")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
