"""Nodes in threads: the same numbers as one after the other, and only where nothing unknown runs."""

import copy
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.learning import Loop, Partition
from dpps.learning.gradients import workers as workers_module
from dpps.learning.gradients.workers import Workers, draws_nothing, keeps_nothing


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def convolutional(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), *extra, nn.Flatten(), nn.Linear(4 * 16, 3)
    )


@pytest.mark.usefixtures("two_threads")
def test_threads_have_their_own_models_and_leave_ours_alone():
    model, seen, gate = convolutional(), [], threading.Barrier(2, timeout=300)

    def work(own: nn.Module, k: int) -> None:
        gate.wait()  # nobody passes unless two work at once
        seen.append((k, own, torch.get_num_threads()))

    Workers(model).each(work, 4, 2)
    assert sorted(k for k, _, _ in seen) == [0, 1, 2, 3]
    assert {threads for _, _, threads in seen} == {1}
    assert len({id(own) for _, own, _ in seen} - {id(model)}) == 2
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_a_failure_is_raised_when_all_have_ended():
    ended = []

    def work(_: nn.Module, k: int) -> None:
        if k == 0:
            raise ValueError("node 0")
        ended.append(k)

    workers = Workers(convolutional())
    with pytest.raises(ValueError, match="node 0"):
        workers.each(work, 4, 2)
    assert sorted(ended) == [1, 2, 3]
    workers.each(lambda _, k: ended.append(k), 2, 2)  # and the models are back


@pytest.mark.usefixtures("two_threads")
def test_an_interrupt_leaves_nobody_at_work(monkeypatch):
    started, ended, go = threading.Semaphore(0), [], threading.Event()

    def work(_: nn.Module, k: int) -> None:
        started.release()
        go.wait(300)
        ended.append(k)

    def interrupted(futures, real=workers_module.wait):
        if go.is_set():
            return real(futures)
        started.acquire()
        started.acquire()  # two are at work, the others wait
        go.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(workers_module, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Workers(convolutional()).each(work, 8, 2)
    before = list(ended)
    assert len(before) < 8
    threading.Event().wait(0.2)
    assert ended == before


@pytest.mark.usefixtures("two_threads")
def test_copies_have_buffers_of_their_own_and_share_the_parameters():
    model, seen, gate = convolutional(), [], threading.Barrier(2, timeout=300)

    def work(own: nn.Module, _: int) -> None:
        gate.wait()
        seen.append(own)

    Workers(model).each(work, 2, 2)
    assert all(a is b for own in seen for a, b in zip(own.parameters(), model.parameters(), strict=True))
    assert all(a is not b for own in seen for a, b in zip(own.buffers(), model.buffers(), strict=True))


def test_they_follow_the_number_of_threads():
    workers, before = Workers(convolutional()), torch.get_num_threads()
    try:
        for threads, expected in ((2, 2), (3, 3), (2, 2)):
            torch.set_num_threads(threads)
            names = set()
            gate = threading.Barrier(expected, timeout=300)

            def work(_: nn.Module, __: int, names=names, gate=gate) -> None:
                gate.wait()
                names.add(threading.current_thread().name)

            count = workers.count(torch.empty(8, 1))
            workers.each(work, expected, count)
            assert count == len(names) == expected
        assert workers.count(torch.empty(1, 1)) == 1
        with torch.autocast("cpu", torch.bfloat16, enabled=True):  # belongs to the thread that asks for it
            assert workers.count(torch.empty(8, 1)) == 1
    finally:
        torch.set_num_threads(before)
        workers.close()


NODES = 5


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shared", [["0", "1"], [], "all"])
def test_a_loop_gives_the_same_together_and_one_after_the_other(shared):
    torch.manual_seed(0)
    together = Loop(Partition(convolutional().double(), shared), F.cross_entropy, range(NODES))
    alone = Loop(together.partition, lambda o, t: 1.0 * F.cross_entropy(o, t), range(NODES))  # not known
    s, l = (part.repeat(NODES, 1) for part in together.partition.initial())
    x, target = torch.rand(NODES, 8, 1, 6, 6).double(), torch.randint(0, 3, (NODES, 8))
    rows = {together: (s, l), alone: (s, l)}
    for round_ in range(3):
        results = []
        for engine, (y, local) in rows.items():
            engine.away = frozenset({2}) if round_ == 1 else frozenset()

            def update(gradient, own, local=local):
                return local[own] - 0.1 * gradient

            step = engine.step(y, local, x + round_, target, update, round_)
            results.append([part.clone() for part in step])
            rows[engine] = (y - 0.1 * step[2], step[1].clone())
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(together.state(), alone.state(), rtol=1e-9, atol=1e-12)
    (y, local), test = rows[alone], torch.rand(9, 1, 6, 6).double()
    seen = together.outputs(y[0], local, test)
    assert not seen.requires_grad
    torch.testing.assert_close(seen, alone.outputs(y[0], local, test), rtol=1e-9, atol=1e-12)
    assert together._workers._pool is not None
    assert alone._workers._pool is None
    twin = copy.deepcopy(together)  # has threads of its own
    torch.testing.assert_close(seen, twin.outputs(y[0], local, test))
    assert twin._workers._pool not in (None, together._workers._pool)


@pytest.mark.usefixtures("two_threads")
def test_a_seeded_run_repeats_bit_by_bit():
    def run() -> torch.Tensor:
        torch.manual_seed(1)
        algorithm = dpps.PartPSP(convolutional(), ["0", "1"], batch_size=4)
        x, target = torch.rand(NODES, 8, 1, 6, 6), torch.randint(0, 3, (NODES, 8))
        sets = [torch.utils.data.TensorDataset(*pair) for pair in zip(x, target, strict=True)]
        return dpps.Run(algorithm, sets, topology=dpps.Exponential(NODES), seed=3).fit(epochs=2).local.clone()

    assert torch.equal(run(), run())


class Own(nn.Conv2d):
    """What a user wrote: nobody knows what it does."""


def heard() -> nn.Module:
    model = convolutional()
    model[0].register_full_backward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (convolutional(), True),
        (dpps.models.ResNet18(), True),
        (convolutional(nn.Dropout(0.0)), True),
        (convolutional(nn.Dropout(0.1)), False),
        (convolutional(nn.RReLU()), False),
        (nn.Sequential(Own(1, 4, 3)), False),
        (heard(), False),
    ],
)
def test_only_code_that_draws_nothing_runs_in_a_loop_at_once(model, expected):
    assert draws_nothing(model) is expected


# Code that is known to keep nothing may run in several threads; whatever cannot be read may not

_COUNT = 0
_SCALE = (2.0, "a text")


def counted(x):
    global _COUNT  # noqa: PLW0603  (what is to be found)
    _COUNT += 1
    return x


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.factor, self.sizes, self.activation = nn.Linear(3, 3), 2.0, (3, 3), F.gelu
        self.seen = []

    @property
    def half(self):
        self.last = 0.5
        return 0.5

    def helper(self, x):
        self.last = x
        return x

    def forward(self, x):
        parts = [F.gelu(self.activation(self.inner(x))) * math.sqrt(self.factor) for _ in range(2)]
        return torch.stack(parts).sum(0).reshape(-1, self.sizes[0]) * _SCALE[0]


class Keeps(Reads):
    def forward(self, x):
        self.last = x
        return self.inner(x)


class CallsAFunction(Reads):
    def forward(self, x):
        return counted(self.inner(x))


class CallsUp(Reads):
    def forward(self, x):
        return super().forward(x)  # a closure: not read


class CallsAMethod(Reads):
    def forward(self, x):
        return self.helper(self.inner(x))


class ReadsAProperty(Reads):
    def forward(self, x):
        return self.inner(x) * self.half


class KeepsInAList(Reads):
    def forward(self, x):
        self.seen.append(x)
        return self.inner(x)


class KeepsByName(Reads):
    def forward(self, x):
        setattr(self, "last", x)  # noqa: B010  (what is to be found)
        return self.inner(x)


class CallsAnObject(Reads):
    def __init__(self):
        super().__init__()
        self.activation = print


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Reads, True),
        (lambda: nn.Sequential(Reads(), nn.TransformerEncoderLayer(4, 2, 8, 0.0)), True),
        (dpps.models.MLP, True),
        *((kind, False) for kind in (Keeps, CallsAFunction, CallsUp, CallsAMethod, ReadsAProperty)),
        *((kind, False) for kind in (KeepsInAList, KeepsByName, CallsAnObject)),
        (lambda: nn.Sequential(Reads(), nn.Dropout(0.1)), False),
    ],
)
def test_only_models_whose_code_writes_nothing_are_known(make, expected):
    assert keeps_nothing(make()) is expected


def test_a_hook_or_a_patched_forward_is_not_known():
    hooked, patched = Reads(), Reads()
    hooked.inner.register_forward_hook(lambda *_: None)
    patched.inner.forward = lambda x: x
    assert not keeps_nothing(hooked)
    assert not keeps_nothing(patched)
