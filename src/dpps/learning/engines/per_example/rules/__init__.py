"""Rules: how the examples' gradients of a weight follow from what went into a torch function and what came back.

One file per family. To add a rule, subclass `Rule` anywhere and call `register(...)` with it; in this package a new file that is
named in `_FAMILIES` is enough.
"""

from dpps.learning.engines.per_example.rules import (
    conv,
    elementwise,
    embedding,
    linear,
    norm,
    recurrent,
)
from dpps.learning.engines.per_example.rules.base import Rule, register, rule_for

_FAMILIES = (conv, elementwise, embedding, linear, norm, recurrent)

__all__ = ["Rule", "register", "rule_for"]
