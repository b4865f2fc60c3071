"""What `dpps train` can be told: one dataclass that is the command line, the TOML file and the `config` of summary.json."""

import dataclasses
import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro
from tyro.conf import arg

from dpps import models
from dpps.data import NAMES
from dpps.errors import UsageError, unknown
from dpps.fabric import Fabric
from dpps.learning import PartPSP
from dpps.noise import NoiseSource, Seeded
from dpps.privacy.units import UNITS, Contribution, NodeSwap, Record, Unit
from dpps.sensitivity import Certified, Oracle, Paper, Sensitivity, WorstCase
from dpps.topology import Topology, parse

SENSITIVITIES = ("paper", "certified", "worst-case", "oracle")
ALGORITHMS = ("partpsp", "sgp", "sgpdp", "pedfl")

#: Options that say where and how a run is carried out, not what it computes: they may differ when a run is resumed.
_CIRCUMSTANCES = frozenset(
    {
        "data_dir",
        "out",
        "resume",
        "overwrite",
        "checkpoint_every",
        "tensorboard",
        "quiet",
        "timeout",
        "node_data",
    }
)


def _names(*names: str) -> Any:
    return arg(metavar="{" + ",".join(names) + "}")


def _optional(metavar: str) -> Any:
    """An option whose default depends on others: its help text says which."""
    return arg(metavar=metavar, help_behavior_hint="")


@dataclass(frozen=True)
class TrainConfig:
    """Train a model privately over many nodes, without a server.

    With no options: ten nodes, MNIST (the embedded part), one shared layer, and every training example protected with
    epsilon 3 in total. Add --out DIR to choose where the results go.

    --config FILE takes defaults from a TOML file with the same names as the options; --print-config writes one and stops.
    """

    data: Annotated[str, _names(*NAMES)] = "mnist-mini"
    """Data set. mnist-mini comes with the package; the others are looked for in --data-dir, $DPPS_DATA and the user cache, and downloaded otherwise."""
    data_dir: Annotated[Path | None, _optional("PATH")] = None
    """Folder with one sub-folder per data set."""
    split: Annotated[str, _names("iid", "dirichlet:ALPHA", "label:K")] = "iid"
    """How examples are dealt to the nodes."""
    hold_out: Annotated[float | None, _optional("FLOAT")] = None
    """Part of each node's examples kept for testing it on its own kind of data (default: 0 for iid, 0.1 otherwise)."""
    model: Annotated[str, _names("mlp", "mlp-residual", "resnet18", "vit")] = "mlp"
    """The paper's models."""
    norm: Literal["batch", "group"] = "batch"
    """Normalisation of resnet18; the record unit needs group."""
    weights: Annotated[Path | None, _optional("PATH")] = None
    """State dict to start from (.pt or .safetensors, names as torchvision's)."""
    shared: Annotated[str, arg(metavar="{1,2,all,PREFIX,..}")] = "1"
    """Layers shared with the other nodes: the paper's 1 or 2, all, or prefixes of parameter names."""
    algorithm: Annotated[str, _names(*ALGORITHMS)] = "partpsp"
    """partpsp; sgp: all shared, no noise; sgpdp: all shared; pedfl: our reading of it (whole model, real sensitivity, no synchronisation)."""
    nodes: int = 10
    """How many nodes."""
    topology: Annotated[str, _names("exp", "K-out", "ring", "complete", "base-K", "random")] = "exp"
    """Who sends to whom. base-K: K peers a round (the Base-(K+1) graph)."""
    dropouts: float = 0.0
    """Chance that a node is away in a round (simulation)."""
    sync_every: int = 0
    """All nodes average with everybody every so many rounds (0 = never)."""
    unit: Annotated[str, _names(*UNITS)] = "record"
    """Who is protected: one training example (record), all a node contributes (contribution), which node sent a message (node-swap, the paper), or nobody (none)."""
    epsilon: Annotated[float | None, _optional("FLOAT")] = None
    """Total privacy loss allowed; the noise is solved for (default 3, unless noise is given directly)."""
    delta: float = 1e-5
    """Chance that the guarantee fails; well below 1 / (number of examples)."""
    clip: Annotated[float | None, _optional("FLOAT")] = None
    """Clip: L2 per example (record, default 1), L1 or L2 per gradient (contribution, default 30 or 1), L1 per gradient (node-swap, default none)."""
    records_per_user: int = 1
    """How many examples one person may own at a node (record)."""
    mechanism: Annotated[str, _names("laplace", "gaussian")] = "laplace"
    """Noise in the unit contribution (node-swap is Laplace, record Gaussian)."""
    noise_multiplier: Annotated[float | None, _optional("FLOAT")] = None
    """Gaussian noise, deviation over sensitivity, instead of --epsilon."""
    budget: Annotated[float | None, _optional("FLOAT")] = None
    """b of the paper: epsilon of a round is budget / noise rate (node-swap default 5; contribution: instead of --epsilon)."""
    noise_rate: float = 1e-3
    """gamma_n of the paper."""
    sensitivity: Annotated[str, _names(*SENSITIVITIES)] = "certified"
    """Where the sensitivity comes from in the unit node-swap. certified has a proof; paper is tuned by --c-prime and --decay; oracle is the real distance (simulation)."""
    c_prime: float = 0.78
    """C' of the paper."""
    decay: float = 0.55
    """lambda of the paper."""
    epochs: int = 12
    """Passes over the data."""
    batch_size: int = 100
    """Examples per node and round (their expected number in the unit record)."""
    lr_shared: Annotated[float | None, _optional("FLOAT")] = None
    """Learning rate of the shared parameters (default 0.1; record: 1)."""
    lr_local: Annotated[float | None, _optional("FLOAT")] = None
    """Learning rate of the local parameters (default 0.1; record: 1)."""
    lr_step: int = 0
    """All rates divided by 10 at the start of epochs K, 2K, ... (the authors: 5; 0 = never); restarts the counters of topology and synchronisation."""
    local_steps: int = 1
    """Gradient steps per round; the clipped total change is what is shared."""
    spare_rounds: int = 0
    """Rounds paid for beyond the plan: rounds repeated after a crash are charged again and must fit the epsilon."""
    seed: int = 0
    """Of the split, the start weights and, in simulation, noise and sampling: the same seed repeats a run bit for bit."""
    secure_noise: bool = False
    """Noise from a cryptographic keystream on an integer grid, keyed by the operating system: for messages that really leave."""
    track_real: bool = False
    """Record the real sensitivity of every round (simulation; costs nodes^2)."""
    out: Annotated[Path | None, _optional("PATH")] = None
    """Folder for the results (default: runs/DATE-TIME)."""
    resume: bool = False
    """Go on from the newest checkpoint in --out."""
    overwrite: bool = False
    """Delete what --out holds and start again."""
    checkpoint_every: int = 0
    """Rounds between checkpoints (0: only when stopped by a signal)."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs dpps[tensorboard])."""
    quiet: bool = False
    """No progress display."""
    timeout: float = 60.0
    """Distributed: seconds within which a dead or hung process is noticed; longer than the longest round."""
    node_data: Annotated[Path | None, _optional("PATH")] = None
    """Folder of a node's own examples, such as data/node-{rank}: train.npz or train.csv, and test.npz or test.csv if wanted. {rank} stands for the node's number. Replaces --data; needs --classes."""
    classes: int | None = None
    """Number of classes in --node-data."""
    share_metrics: bool = False
    """Distributed: tell the other nodes losses and accuracies (not covered by the guarantee), for one common summary."""
    seeded_noise: bool = False
    """Distributed: noise and sampling from --seed as in a simulation, for tests; nothing is private then."""

    def check(self) -> None:
        """Refuse what is wrong by itself, before anything is read. (Not at construction: the parser would wrap the message.)"""
        _known("data set", self.data, NAMES)
        _known("model", self.model, models.SHARED)
        _known("algorithm", self.algorithm, ALGORITHMS)
        _known("unit", self.unit, UNITS)
        _known("sensitivity", self.sensitivity, SENSITIVITIES)
        _known("mechanism", self.mechanism, ("laplace", "gaussian"))
        for name in ("nodes", "epochs", "batch_size", "local_steps"):
            _least(name, getattr(self, name), 2 if name == "nodes" else 1)
        for name in ("sync_every", "lr_step", "checkpoint_every", "spare_rounds"):
            _least(name, getattr(self, name), 0)
        if self.hold_out is not None and not 0 <= self.hold_out < 1:
            raise UsageError(f"--hold-out is {self.hold_out}: it must lie in [0, 1)")
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite exclude each other: choose one")
        self._check_options()
        if not 1 <= self.timeout < float("inf"):
            raise UsageError(f"--timeout is {self.timeout}: it must be 1 second or more")
        if (self.node_data is None) != (self.classes is None):
            raise UsageError(
                "--node-data and --classes belong together: the folder, and how many classes its labels have"
            )
        if self.seeded_noise and self.secure_noise:
            raise UsageError("--seeded-noise and --secure-noise exclude each other: choose one")

    def _check_options(self) -> None:
        """An option that would be ignored is refused: somebody means something by it."""
        given = {
            n: getattr(self, n)
            for n in ("epsilon", "budget", "noise_multiplier", "clip")
            if getattr(self, n) is not None
        }
        if (self.unit == "none" or self.algorithm == "sgp") and given:
            name = next(iter(given)).replace("_", "-")
            raise UsageError(
                f"--{name} has no meaning without noise (--unit none, --algorithm sgp): leave it out, or choose a unit"
            )
        laplace = self.unit == "node-swap" or (self.unit == "contribution" and self.mechanism == "laplace")
        if laplace and self.noise_multiplier is not None:
            raise UsageError("--noise-multiplier belongs to Gaussian noise: use --budget or --epsilon here")
        if not laplace and self.budget is not None:
            raise UsageError("--budget belongs to Laplace noise: use --noise-multiplier or --epsilon here")
        if self.unit == "node-swap" and self.mechanism == "gaussian":
            raise UsageError(
                "--mechanism gaussian: the unit node-swap is defined with Laplace noise; use the unit contribution or record"
            )
        if self.unit == "contribution" and self.budget is not None and not self.noise_rate > 0:
            raise UsageError(
                f"--noise-rate is {self.noise_rate}: with --budget it must be positive (epsilon of a round is budget / rate)"
            )
        if self.resume and self.out is None:
            raise UsageError("--resume needs --out DIR: the folder of the run to go on with")

    # What the options mean

    def resolved(self) -> "TrainConfig":
        """The same, checked, with the defaults that depend on other options filled in."""
        self.check()
        gaussian = self.unit == "contribution" and self.mechanism == "gaussian"
        clip = {"record": 1.0, "contribution": 1.0 if gaussian else 30.0}.get(self.unit)
        given = self.noise_multiplier is not None or self.budget is not None
        epsilon = 3.0 if self.unit in ("record", "contribution") and not given else None
        rate = 1.0 if self.unit == "record" else 0.1
        filled: dict[str, Any] = {
            "clip": clip,
            "epsilon": epsilon,
            "budget": 5.0 if self.unit == "node-swap" and self.epsilon is None else None,
            "lr_shared": rate,
            "lr_local": rate,
            "hold_out": 0.0 if self.split == "iid" else 0.1,
        }
        if self.unit == "none" or self.algorithm == "sgp":
            filled |= {"clip": None, "epsilon": None, "budget": None}
        return dataclasses.replace(self, **{k: v for k, v in filled.items() if getattr(self, k) is None})

    def privacy(self) -> Unit | None:
        """The unit object."""
        if self.unit == "none" or self.algorithm == "sgp":
            return None
        if self.algorithm == "pedfl" and self.unit == "node-swap":
            return NodeSwap(self.budget, self.noise_rate, Oracle(), self.clip, self.epsilon)
        if self.unit == "node-swap":
            return NodeSwap(self.budget, self.noise_rate, self._sensitivity(), self.clip, self.epsilon)
        if self.unit == "record":
            assert self.clip is not None
            return Record(self.epsilon, self.delta, self.clip, self.noise_multiplier, self.records_per_user)
        assert self.clip is not None
        round_epsilon = None if self.budget is None else self.budget / self.noise_rate
        laplace = self.mechanism == "laplace"
        return Contribution(
            self.clip,
            self.epsilon,
            self.delta,
            "laplace" if laplace else "gaussian",
            round_epsilon if laplace else None,
            self.noise_multiplier,
        )

    def _sensitivity(self) -> Sensitivity:
        if self.sensitivity == "paper":
            return Paper(self.c_prime, self.decay)
        if self.sensitivity == "certified":
            return Certified(self.delta)
        return WorstCase() if self.sensitivity == "worst-case" else Oracle()

    def network(self) -> Topology:
        """The topology object, validated."""
        topology = parse(self.topology, self.nodes)
        topology.validate()
        return topology.with_dropouts(self.dropouts, seed=self.seed) if self.dropouts else topology

    def shared_names(self) -> str:
        """What --shared means under the chosen algorithm."""
        return self.shared if self.algorithm == "partpsp" else "all"

    def algorithm_object(
        self, model: Any, prefixes: tuple[str, ...], noise: NoiseSource | None, fabric: Fabric | None = None
    ) -> PartPSP:
        """PartPSP as configured; the baselines are special cases of it."""
        assert self.lr_shared is not None
        assert self.lr_local is not None
        return PartPSP(
            model,
            prefixes,
            self.network(),
            self.privacy(),
            lr_shared=self.lr_shared,
            lr_local=self.lr_local,
            lr_step=self.lr_step,
            spare_rounds=self.spare_rounds,
            batch_size=self.batch_size,
            local_steps=self.local_steps,
            sync_every=0 if self.algorithm == "pedfl" else self.sync_every,
            seed=self.seed,
            noise=noise or Seeded(self.seed),
            track_real=self.track_real,
            fabric=fabric,
        )

    # To and from files

    def to_json(self) -> dict[str, Any]:
        """For summary.json: option names, paths as text."""
        return {f.name.replace("_", "-"): _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def to_toml(self) -> str:
        """A file for --config; options left at None are left out."""
        lines = [
            f"{name} = {json.dumps(value)}" for name, value in self.to_json().items() if value is not None
        ]
        return "\n".join(lines) + "\n"

    def common(self) -> dict[str, Any]:
        """What all processes of a distributed run must have alike; files that only one machine has are not among it."""
        private = _CIRCUMSTANCES | {"weights"}
        return {k: v for k, v in self.to_json().items() if k.replace("-", "_") not in private}

    def fingerprint(self) -> str:
        """Equal for two configurations that compute the same."""
        what = {k: v for k, v in self.to_json().items() if k.replace("-", "_") not in _CIRCUMSTANCES}
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def from_toml(path: Path) -> TrainConfig:
    """The configuration in a TOML file; the names are those of the options."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"--config {path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {path} is not TOML: {error}") from error
    hints = {name.replace("_", "-"): hint for name, hint in get_type_hints(TrainConfig).items()}
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in hints:
            raise unknown(f"option in {path}", name, hints)
        values[name.replace("-", "_")] = _typed(path, name, value, hints[name])
    return TrainConfig(**values)


def _typed(path: Path, name: str, value: Any, hint: Any) -> Any:
    """The value of an option in a file, refused if it is of another kind than the option."""
    kinds = get_args(hint) or (hint,)
    if Path in kinds and isinstance(value, str):
        return Path(value)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) in kinds or value in kinds:  # a literal is its own kind
        return value
    wanted = " or ".join(getattr(kind, "__name__", repr(kind)) for kind in kinds if kind is not type(None))
    raise UsageError(f"{path}: {name} is {value!r}: expected {wanted.replace('Path', 'a path in quotes')}")


def parse_arguments(arguments: list[str], prog: str, default: TrainConfig | None = None) -> TrainConfig:
    """The command line over `default`."""
    return tyro.cli(TrainConfig, args=arguments, prog=prog, default=default or TrainConfig())


def _known(kind: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise unknown(kind, value, allowed)


def _least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"--{name.replace('_', '-')} is {value}: it must be {least} or more")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
