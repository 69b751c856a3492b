"""A number of the optimizer or of the loss scaler that is wrong for a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from gradsentinel.faults.course import Shot
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Arm, Fault, Removable, check_name, check_value
from gradsentinel.faults.injection import Hit
from gradsentinel.faults.names import Names
from gradsentinel.faults.places import Undo


@dataclass(frozen=True, kw_only=True)
class ChangeSetting(Fault):
    """A setting has a wrong value while its step is computed and made, such as an `eps` of 0 in Adam.

    Of an optimizer it is changed in every parameter group. Where somebody else changed it meanwhile, as a
    loss scaler does, it is left as it is then.
    """

    owner: Any = field(repr=False)
    """An optimizer, whose groups have the setting, or any object that has it as an attribute."""
    name: str
    """Its name, such as `eps`, `lr` or `weight_decay`."""
    value: float
    """The wrong value."""

    kind: ClassVar[str] = "change_setting"
    unfired: ClassVar[str] = "the step was not computed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("name", self.name)
        check_value(self.value)
        if not self._places():
            raise ValueError(f"{type(self.owner).__name__} has no setting {self.name!r}")

    def aim(self, names: Names, dice: Dice) -> Arm:
        """Nothing has to be found."""

        def arm(shot: Shot) -> list[Removable]:
            if not shot.live():
                return []
            places = self._places()
            before = [get() for get, _ in places]
            for _, put in places:
                put(self.value)
            shot.record("setting", self.name, Hit((), before[0], self.value, elements=len(places)))

            def undo() -> None:
                for (get, put), value in zip(places, before, strict=True):
                    if get() == self.value:
                        put(value)

            return [Undo(undo)]

        return arm

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> ChangeSetting:
        """Say that a model does not know its optimizer."""
        raise NotImplementedError("ChangeSetting needs owner=: leave it out of kinds=")

    def _places(self) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
        groups = getattr(self.owner, "param_groups", None)
        if groups is not None:
            return [
                (lambda g=g: g[self.name], lambda v, g=g: g.__setitem__(self.name, v))  # type: ignore[misc]
                for g in groups
                if self.name in g
            ]
        if not hasattr(self.owner, self.name):
            return []
        return [(lambda: getattr(self.owner, self.name), lambda v: setattr(self.owner, self.name, v))]
