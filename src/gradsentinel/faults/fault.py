"""What every fault has: when and on which ranks it is due, and how a plan puts it into a model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Protocol

from gradsentinel.faults.course import Shot
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.names import Names

Steps = Collection[int] | Callable[[int], bool]
Index = int | tuple[int, ...] | None


class Removable(Protocol):
    """Anything that undoes itself: the handle of a hook, for example."""

    def remove(self) -> None:
        """Undo it."""


Arm = Callable[[Shot], list[Removable]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong at given steps on given ranks; the base of all faults.

    One that sits in the model overrides `aim`, one that sits in the batch overrides `poison`.
    """

    steps: Steps
    """Steps it is due at, counted from 0: a collection such as `(3,)` or `range(10, 20)`, or a function of
    the step."""
    ranks: Collection[int] | None = None
    """Ranks it happens on; None: every rank."""
    persistent: bool = False
    """False: once per listed step, so a recomputation of the step is clean. True: at every computation of a
    listed step, replays included."""
    microbatch: int | None = None
    """Micro-batch of the step it happens in, counted from 0; None: the first that can be hit, or all of them
    if persistent."""

    kind: ClassVar[str] = "fault"
    """Name of this family in the log."""
    needs_model: ClassVar[bool] = True
    """Whether it can only happen in a model that the plan is attached to."""
    unfired: ClassVar[str] = "what it aims at was not computed"
    """The usual reason why it does not happen, for the warning."""

    def __post_init__(self) -> None:
        if not callable(self.steps):
            object.__setattr__(self, "steps", _numbers("steps", self.steps))
        if self.ranks is not None:
            object.__setattr__(self, "ranks", _numbers("ranks", self.ranks))
        if self.microbatch is not None and not is_count(self.microbatch):
            raise ValueError(
                f"microbatch={self.microbatch!r}: give a number from 0 on, or None for any micro-batch"
            )

    def due_at(self, *, step: int, rank: int) -> bool:
        """Return whether it is due in some micro-batch of this step on this rank."""
        return self.concerns(rank) and (self.steps(step) if callable(self.steps) else step in self.steps)

    def concerns(self, rank: int) -> bool:
        """Return whether it can ever happen on this rank."""
        return self.ranks is None or rank in self.ranks

    def aim(self, names: Names, dice: Dice) -> Arm:
        """Find its place in the model, and return what arms it there for one micro-batch.

        Raises:
            ValueError: there is no such place; the message names the nearest.
        """
        raise NotImplementedError(f"{type(self).__name__} has no place in a model")

    def poison(self, batch: Any, shot: Shot) -> Any:
        """Return the batch as the model gets it; never changes the batch that was passed in."""
        del shot
        return batch

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> Fault:
        """Return a fault of this kind at a random place; `when` holds the fields common to all faults."""
        raise NotImplementedError(f"{cls.__name__} cannot be drawn at random: leave it out of kinds=")


def check_index(index: Index) -> None:
    """Raise a ValueError unless this can be the place of an element."""
    indices = index if isinstance(index, tuple) else (0 if index is None else index,)
    if not all(is_count(i) for i in indices):
        raise ValueError(
            f"index={index!r}: give a number from 0 on (the element in reading order), a tuple of them (one "
            "per dimension), or None to let the seed choose"
        )


def check_value(value: object) -> None:
    """Raise a ValueError unless this can be written into a tensor."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"value={value!r}: give a number, such as math.nan, math.inf or 1e30")  # noqa: TRY004


def check_name(field: str, name: object) -> None:
    """Raise a ValueError unless this can name a module, a parameter or a place in a batch."""
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{field}={name!r}: give a name, a pattern such as 'blocks.*.attn', or None")


def is_count(number: object) -> bool:
    """Return whether this is a whole number from 0 on."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _numbers(field: str, given: object) -> Collection[int]:
    """Check a collection of steps or ranks and freeze it."""
    if is_count(given):
        raise ValueError(f"{field}={given}: give a collection, {field}=({given},)")
    if isinstance(given, str) or not isinstance(given, Collection):
        raise ValueError(f"{field}={given!r}: give a collection of numbers such as (3,) or range(10, 20)")  # noqa: TRY004
    if not given:
        raise ValueError(f"{field} is empty, so the fault could never happen: list at least one")
    if isinstance(given, range):
        lowest = min(given[0], given[-1])
        if lowest < 0:
            raise ValueError(f"{field} contains {lowest}: they count from 0")
        return given
    for number in given:
        if not is_count(number):
            raise ValueError(f"{field} contains {number!r}: they are whole numbers from 0 on")
    return frozenset(given)
