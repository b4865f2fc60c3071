"""The command line: one tree of commands, whose modules are imported when they are called."""

from typing import TYPE_CHECKING

from dpps.cli.main import (
    COMMANDS,
    DONE,
    FAILED,
    STOPPED,
    WRONG,
    commands,
    main,
    parse_options,
    stopped_by_signals,
)
from dpps.lazy import lazy_imports

if TYPE_CHECKING:  # imported when first asked for
    from dpps.cli.federation import Shown
    from dpps.cli.plan import PlanConfig, answer
    from dpps.cli.train import say_outcome
else:
    __getattr__, __dir__, __all__ = lazy_imports(__name__)
