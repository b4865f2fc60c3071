"""Where the time of a round goes, by the profiler of torch: matrix products and convolutions, other arithmetic, noise, the rest.

Other arithmetic is everything else that touches numbers, copies included. The rest is what is not arithmetic: Python, autograd's
bookkeeping, views, memory. The profiler itself adds to it, a microsecond or two per operation, so the time without it stands
beside the shares. Not part of `make bench`.

    python benchmarks/profiling.py [--quick] [--top 8]
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from learners import learner
from measure import amount, seconds, text_table
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from dpps.noise import Mechanism, Outgoing, Seeded

PRODUCTS = re.compile(r"aten::(\w*mm|mv|dot|\w*conv\w*)$")
BOOKKEEPING = re.compile(
    r"aten::(empty\w*|as_strided\w*|view\w*|_unsafe_view|_reshape_alias|reshape|t|transpose|permute|detach\w*|alias|expand\w*"
    r"|unsqueeze|squeeze|select|slice|split\w*|unbind|narrow|flatten|unflatten|linear|matmul|resize_|set_|to|_to_copy|lift_fresh"
    r"|contiguous|result_type|is_\w+|item|_local_scalar_dense)$"
)
SHARES = ("products", "arithmetic", "noise", "rest")
NOISE = "noise of the round"


@dataclass(frozen=True)
class Case:
    """What is profiled."""

    model: str
    nodes: int
    batch: int
    unit: str = "node-swap"
    rounds: int = 10


CASES = (
    Case("mlp", 10, 100),
    Case("mlp", 100, 20),
    Case("mlp", 1000, 20, rounds=2),
    Case("mlp", 10, 100, "contribution"),
    Case("mlp", 10, 100, "record"),
    Case("resnet18", 10, 100, rounds=1),
    Case("vit", 10, 100, rounds=1),
)
QUICK = (Case("mlp", 2, 4, rounds=2), Case("mlp", 2, 4, "record", rounds=2), Case("vit", 2, 2, rounds=1))


@contextmanager
def marked_noise() -> Iterator[None]:
    """Drawing noise carries a mark, so that all inside it counts as noise."""
    release = Seeded.release

    def marked(self: Seeded, mechanism: Mechanism, scale: float, out: Outgoing) -> Tensor:
        with record_function(NOISE):
            return release(self, mechanism, scale, out)

    with patch.object(Seeded, "release", marked):
        yield


def kind(event: FunctionEvent) -> str:
    """Which of SHARES an event's own time belongs to."""
    above: FunctionEvent | None = event
    while above is not None:
        if above.name == NOISE:
            return "noise"
        above = above.cpu_parent
    if PRODUCTS.match(event.name):
        return "products"
    arithmetic = event.name.startswith("aten::") and not BOOKKEEPING.match(event.name)
    return "arithmetic" if arithmetic else "rest"


def profiled(case: Case) -> tuple[float, Counter[str], Counter[str]]:
    """Seconds of a round without the profiler; then, with it, the time of every kind and of every operation."""
    run = learner(case.nodes, case.batch, 3 * case.batch, model=case.model, unit=case.unit)
    run.step()
    plain = seconds(lambda: [run.step() for _ in range(case.rounds)]) / case.rounds
    with marked_noise(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(case.rounds):
            with record_function("Python of the round"):
                run.step()
    kinds: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    for event in profiler.events():
        kinds[kind(event)] += event.self_cpu_time_total
        operations[event.name] += event.self_cpu_time_total
    return plain, kinds, operations


def main() -> None:
    """A table of shares, and the operations that take longest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="smallest sizes, only to see that it runs")
    parser.add_argument("--top", type=int, default=8, help="so many operations of every case")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.quick else 2)
    table: list[Sequence[str]] = [("model", "N", "batch", "unit", "a round", *SHARES)]
    for case in QUICK if options.quick else CASES:
        plain, kinds, operations = profiled(case)
        total = kinds.total()
        shares = (f"{kinds[name] / total:.0%}" for name in SHARES)
        named = (case.model, str(case.nodes), str(case.batch), case.unit)
        table.append((*named, amount(plain, "s"), *shares))
        print(" ".join((named[0], f"N={named[1]}", f"batch {named[2]}", named[3])), flush=True)
        for name, microseconds in operations.most_common(options.top):
            print(f"  {microseconds / total:5.1%}  {name}")
    print(f"\n{text_table(table)}")


if __name__ == "__main__":
    main()
