"""What a rule is, and where rules are kept."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dpps.learning.engines.per_example.calls import Call, Key
from dpps.learning.engines.per_example.contributions import Contribution


class Rule(ABC):
    """How the examples' gradients follow for one family of torch functions.

    A rule is about *functions* (`torch.conv2d`), not modules: whatever module calls the function has the rule.
    """

    functions: tuple[str, ...]
    """The names of the torch functions (`torch.conv2d.__name__`)."""
    arguments: tuple[str, ...] = ()
    """What the functions call their positional arguments, in order."""

    def suits(self, call: Call) -> bool:
        """Whether the rule covers a call with such arguments; others go the general way."""
        return True

    def run(self, call: Call) -> Any:
        """The function's result, every tensor of it watched whose gradient the rule needs."""
        return call.watch(call.run())

    @abstractmethod
    def gradients(self, call: Call, back: Sequence[Tensor]) -> dict[Key, Contribution]:
        """The examples' contributions to every weight in `call.weights`.

        Args:
            call: what `run` was given.
            back: the gradients that came back to what `run` watched, in that order.
        """


_RULES: dict[str, Rule] = {}


def register(rule: Rule) -> None:
    """Make a rule known; a later one for the same function takes the place of an earlier one."""
    for name in rule.functions:
        _RULES[name] = rule


def rule_for(function: str) -> Rule | None:
    """The rule for a torch function, or None."""
    return _RULES.get(function)
