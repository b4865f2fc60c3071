"""Steps of the unit record (clipped sums, noise, update) beside Opacus in its fastest mode, all nodes, data in memory.

Claims, as examples per second: the paper's MLP 2.5 times Opacus' fastest of hooks, functorch and ghost clipping, a tanh CNN 1.5
times it and at most 1.5 times the time of plain training, a linear model 2.0, a small transformer, LoRA on it and an LSTM 1.5
times, ResNet-18 with group norm 5 times, the paper's ViT 1.7 times; no row takes more memory; clipped sums are those of plain autograd to 1e-5 of the clip (beyond the margin that both know).
"""

import copy
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measure import Row, Spread, in_fresh_process, main, peak_memory, seconds, spreads, times
from torch import Tensor, nn

import dpps
from dpps.learning import OneByOne, Partition, choose_per_example

CLIP, NOISE, RATE = 1.0, 1.0, 0.1
Step = Callable[[], object]


class Attention(nn.Module):
    """Self-attention over linear layers, which every mode of Opacus can differentiate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        """x is (batch, tokens, width), and so is the output."""
        q, k, v = (f(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """An encoder layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.attention, self.two = nn.LayerNorm(width), Attention(width, 4), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        x = x + self.attention(self.one(x))
        return x + self.mlp(self.two(x))


class Encoder(nn.Module):
    """Tokens, two layers, the mean, ten classes."""

    def __init__(self, width: int = 64, length: int = 64, vocabulary: int = 1000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, 10)
        self.register_buffer("positions", torch.arange(length)[None])

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        # copies, because Opacus' ghost clipping cannot run on an expanded view
        places = self.places(self.positions.repeat(len(x), 1))  # type: ignore[operator]
        return self.head(self.blocks(self.words(x) + places).mean(1))


class LoRA(nn.Module):
    """A frozen layer with a low-rank update that is trained."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Any:
        """The layer, plus the update."""
        return self.base(x) + 2 * self.lora_B(self.lora_A(x))


class Lstm(nn.Module):
    """Tokens, an LSTM, its last state, ten classes."""

    def __init__(self, recurrent: nn.Module, width: int = 64) -> None:
        super().__init__()
        self.words, self.cells, self.head = nn.Embedding(1000, width), recurrent, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        return self.head(self.cells(self.words(x))[0][:, -1])


def lora_encoder() -> nn.Module:
    """Queries and values of both layers adapted, the head trained, the rest frozen."""
    model = Encoder().requires_grad_(False)
    for block in model.blocks:
        attention: Any = block.attention
        attention.q, attention.v = LoRA(attention.q), LoRA(attention.v)
    model.head.requires_grad_(True)
    return model


def cnn() -> nn.Module:
    """The tanh CNN of 26,010 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


class OpacusViT(nn.Module):
    """`dpps.models.ViT` out of layers that Opacus knows: it refuses parameters outside layers and attention's joint projection."""

    def __init__(self, width: int = 128, mlp: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token, self.places = nn.Embedding(1, width), nn.Embedding(65, width)
        self.blocks = nn.Sequential(*(OpacusBlock(width, mlp) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 10)
        self.register_buffer("positions", torch.arange(65)[None])

    def forward(self, x: Tensor) -> Any:
        """Logits."""
        # copies, because Opacus' ghost clipping cannot run on an expanded view
        positions = self.positions.repeat(len(x), 1)  # type: ignore[operator]
        token = self.token(positions[:, :1])
        h = torch.cat([token, self.patches(x).flatten(2).transpose(1, 2)], 1) + self.places(positions)
        return self.head(self.norm(self.blocks(h))[:, 0])


class OpacusBlock(nn.Module):
    """An encoder layer of the same sizes, its three projections in one linear layer as ours are."""

    def __init__(self, width: int, mlp: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.one, self.two = heads, nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, mlp), nn.GELU(), nn.Linear(mlp, width))

    def forward(self, x: Tensor) -> Any:
        """The same shape."""
        q, k, v = self.qkv(self.one(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.two(x))


def opacus_lstm() -> nn.Module:
    """Opacus needs a layer of its own for the same function."""
    from opacus.layers import DPLSTM

    return Lstm(DPLSTM(64, 64, batch_first=True))


@dataclass(frozen=True)
class Case:
    """One row: a model, and the same for Opacus where that needs another module."""

    nodes: int
    batch: int
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    target: float
    theirs: Callable[[], nn.Module] | None = None
    tokens: bool = False

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and classes of all nodes."""
        torch.manual_seed(0)
        rows = self.nodes, self.batch
        x = torch.randint(0, 1000, (*rows, *self.shape)) if self.tokens else torch.randn(*rows, *self.shape)
        return x, torch.randint(0, 10, rows)


CASES = {
    "MLP 784-10-784-10, 10 x 100": Case(10, 100, dpps.models.MLP, (1, 28, 28), 2.5),
    "tanh CNN, 10 x 200": Case(10, 200, cnn, (1, 28, 28), 1.5),
    "linear, 3,969 features, 10 x 750": Case(10, 750, lambda: nn.Linear(3969, 10), (3969,), 2.0),
    "transformer, 4 x 64": Case(4, 64, Encoder, (64,), 1.5, tokens=True),
    "LoRA on it, 4 x 64": Case(4, 64, lora_encoder, (64,), 1.5, tokens=True),
    "LSTM, 4 x 64": Case(
        4, 64, lambda: Lstm(nn.LSTM(64, 64, batch_first=True)), (64,), 1.5, opacus_lstm, tokens=True
    ),
    "ResNet-18, group norm, 2 x 32": Case(
        2, 32, lambda: dpps.models.ResNet18(norm="group"), (3, 32, 32), 5.0
    ),
    "ViT, 2 x 32": Case(2, 32, lambda: dpps.models.ViT(dropout=0.0), (3, 32, 32), 1.7, OpacusViT),
}
QUICK = {
    "MLP": Case(2, 4, lambda: dpps.models.MLP((784, 3, 5, 10)), (1, 28, 28), 2.5),
    "tanh CNN": Case(2, 3, cnn, (1, 28, 28), 1.5),
}
MODES = ("hooks", "functorch", "ghost")


def ours(case: Case, check: bool = False) -> Step:
    """Clipped sums of all nodes, noise, update."""
    torch.manual_seed(0)
    x, target = case.data()
    partition = Partition(case.make(), "all")
    y = partition.initial()[0].repeat(case.nodes, 1)
    local = y.new_zeros(case.nodes, 0)
    mask = torch.ones(case.nodes, case.batch, dtype=torch.bool)
    example = x[0, 0], target[0, 0]
    way = choose_per_example(partition, F.cross_entropy, example, clip=CLIP, batch=case.batch)
    if check:
        few = mask.clone()
        few[:, 16:] = False
        _, found, _ = way.sums(y[:1], local[:1], x[:1], target[:1], few[:1])
        _, expected, _ = OneByOne(partition, F.cross_entropy, CLIP, case.batch).sums(
            y[:1], local[:1], x[:1], target[:1], few[:1]
        )
        error = float((found - expected).abs().max())
        assert error <= 1e-5 * CLIP, f"clipped sums differ from plain autograd's by {error}"

    def step() -> None:
        _, total, _ = way.sums(y, local, x, target, mask)
        noise = torch.randn(y.shape)
        y.add_(total.add_(noise, alpha=NOISE * CLIP), alpha=-RATE / case.batch)

    return step


def opacus(case: Case, mode: str) -> Step:
    """The same with one wrapped module per node."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    torch.manual_seed(0)
    x, target = case.data()
    first = (case.theirs or case.make)()
    steps: list[Callable[[Tensor, Tensor], None]] = []
    for _ in range(case.nodes):
        model: Any = copy.deepcopy(first).train()
        options = {"noise_multiplier": NOISE, "max_grad_norm": CLIP, "expected_batch_size": case.batch}
        if mode == "ghost":
            model = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP, use_ghost_clipping=True)
            optimizer: Any = DPOptimizerFastGradientClipping(_sgd(model), **options)
            loss: Any = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())
        else:
            model = GradSampleModule(model, force_functorch=mode == "functorch")
            optimizer, loss = DPOptimizer(_sgd(model), **options), F.cross_entropy

        def one(
            x: Tensor, t: Tensor, model: Any = model, optimizer: Any = optimizer, loss: Any = loss
        ) -> None:
            optimizer.zero_grad()
            loss(model(x), t).backward()
            optimizer.step()

        steps.append(one)

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for k, own in enumerate(steps):
                own(x[k], target[k])

    return step


def plain(case: Case) -> Step:
    """Training without privacy, node by node."""
    x, target = case.data()
    models = [case.make().train() for _ in range(case.nodes)]
    optimizers = [_sgd(model) for model in models]

    def step() -> None:
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(model(x[k]), target[k]))
            optimizer.step()

    return step


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)


def fastest(case: Case) -> tuple[str, Step]:
    """Opacus' fastest mode that runs this model."""
    found: dict[str, tuple[float, Step]] = {}
    for mode in MODES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = opacus(case, mode)
            step()
        except (RuntimeError, NotImplementedError, ValueError, KeyError, AttributeError, TypeError) as error:
            # not every mode knows every layer; which one does not is told, so that nobody is handicapped in silence
            print(f"Opacus, {mode}, cannot run this model: {error!r:.200}", file=sys.stderr)
            continue
        found[mode] = min(seconds(step) for _ in range(3)), step
    mode = min(found, key=lambda name: found[name][0])
    return mode, found[mode][1]


def rows(quick: bool) -> Iterator[Row]:
    """Times, then memory."""
    for name, case in (QUICK if quick else CASES).items():
        own = ours(case, check=True)
        own()
        try:
            mode, theirs = fastest(case)
        except ImportError:
            yield Row(name, note="Opacus is not installed: pip install dpps[benchmarks]")
            continue
        works = [own, theirs, plain(case)]
        works[2]()
        measured = times(works, 2 if quick else 15)
        first, second, ratio = spreads(measured[0], measured[1])
        count = case.nodes * case.batch
        note = f"{count / first:,.0f} against {count / second:,.0f} examples/s"
        yield Row(name, first, f"Opacus, {mode}", second, ratio, 1 / case.target, note=note)
        _, training, beside = spreads(measured[0], measured[2])
        limit = 1.5 if "CNN" in name else None
        yield Row(name, first, "plain training", training, beside, limit)
        if not quick:
            yield memory(name, mode)
    if not quick and "tanh CNN, 10 x 200" in CASES:
        threads = torch.get_num_threads()
        peak = in_fresh_process(__file__, "memory", "tanh CNN, 10 x 200", "ours", threads, 2000)
        yield Row("peak memory, tanh CNN, one batch of 2,000", Spread.of([peak["gb"]]), target=1.5, unit="GB")


def memory(name: str, mode: str) -> Row:
    """Of processes started for it alone."""
    threads = torch.get_num_threads()
    sides = [in_fresh_process(__file__, "memory", name, side, threads)["gb"] for side in ("ours", mode)]
    own, theirs = ([gb] for gb in sides)
    first, second, ratio = spreads(own, theirs)
    return Row(f"peak memory, {name}", first, f"Opacus, {mode}", second, ratio, 1.0, unit="GB")


def held(name: str, side: str, batch: int | None) -> None:
    """Three steps in this process; prints the memory it held at most."""
    case = CASES[name]
    if batch is not None:
        case = Case(1, batch, case.make, case.shape, case.target, case.theirs, case.tokens)
    step = ours(case) if side == "ours" else opacus(case, side)
    for _ in range(3):
        step()
    print(json.dumps({"gb": peak_memory()}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        torch.set_num_threads(int(sys.argv[4]))
        held(sys.argv[2], sys.argv[3], int(sys.argv[5]) if len(sys.argv) > 5 else None)
    else:
        if "--only" in sys.argv:  # a word of the names of rows
            at = sys.argv.index("--only")
            CASES = {name: case for name, case in CASES.items() if sys.argv[at + 1] in name}
            del sys.argv[at : at + 2]
        main(rows)
