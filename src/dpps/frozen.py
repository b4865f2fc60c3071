"""What a promise rests on is set once: noise is calibrated to it, so changing it later would void the promise silently."""

from typing import ClassVar

from dpps.errors import UsageError


class Frozen:
    """An object whose attributes named in `fixed` can be set once and never again."""

    fixed: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse_fixed(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_fixed(name)  # or it could be set again
        super().__delattr__(name)

    def _refuse_fixed(self, name: str) -> None:
        if name in self.fixed and name in self.__dict__:
            raise UsageError(
                f"{name} of {type(self).__name__} is fixed: privacy was promised for the value it was made with; "
                "for rates that change give lr_step at the start, for anything else start a new run"
            )
