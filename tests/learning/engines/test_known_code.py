"""Code that is known to keep nothing may run in several threads; whatever cannot be read may not."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpps
from dpps.learning import keeps_nothing

_MEMORY: list[float] = []
_COUNT = 0


def scaled(x):
    return F.gelu(x) * math.sqrt(2)


def counted(x):
    global _COUNT  # noqa: PLW0603  (what is to be found)
    _COUNT += 1
    return x


def remembered(x):
    _MEMORY.append(float(x.sum()))
    return x


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        parts = [scaled(self.inner(x)) for _ in range(2)]
        return torch.stack(parts).sum(0)


class Keeps(Reads):
    def forward(self, x):
        self.last = x
        return self.inner(x)


class Counts(Reads):
    def forward(self, x):
        return counted(self.inner(x))


class Remembers(Reads):
    def forward(self, x):
        return self.inner(remembered(x))


class CallsUp(Reads):
    def forward(self, x):
        return super().forward(x)  # a closure: not read


class Helped(Reads):
    """Methods and attributes of its own that only read."""

    def __init__(self):
        super().__init__()
        self.factor, self.shape, self.activation = 2.0, (3, 3), F.gelu

    @property
    def half(self):
        return self.factor / 2

    def helper(self, x):
        return self.activation(self.inner(x)) * self.half

    def forward(self, x):
        return self.helper(x).reshape(-1, self.shape[0])


class KeepsInAMethod(Helped):
    def helper(self, x):
        self.last = x
        return self.inner(x)


class KeepsInAMethodOfAMethod(Helped):
    def store(self, x):
        self.last = x

    def helper(self, x):
        self.store(x)
        return self.inner(x)


class KeepsInAProperty(Helped):
    @property
    def half(self):
        self.last = 0.5
        return 0.5


class KeepsInAList(Helped):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return self.inner(x)


class KeepsByName(Helped):
    def forward(self, x):
        setattr(self, "last", x)  # noqa: B010  (what is to be found)
        return self.inner(x)


class CallsAnObject(Helped):
    def __init__(self):
        super().__init__()
        self.activation = print


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (Reads, True),
        (Helped, True),
        (KeepsInAMethod, False),
        (KeepsInAMethodOfAMethod, False),
        (KeepsInAProperty, False),
        (KeepsInAList, False),
        (KeepsByName, False),
        (CallsAnObject, False),
        (lambda: nn.Sequential(Reads(), nn.TransformerEncoderLayer(4, 2, 8, 0.0)), True),
        (dpps.models.MLP, True),
        (Keeps, False),
        (Counts, False),
        (Remembers, False),
        (CallsUp, False),
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
