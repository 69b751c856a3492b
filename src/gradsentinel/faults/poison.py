"""One bad number in an activation or in a gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from gradsentinel.faults.damage import locate, set_value, storage
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Arm, Fault, Index, check_index, check_name, check_value
from gradsentinel.faults.names import Names
from gradsentinel.faults.places import in_activation, in_gradient

BAD_NUMBERS = (math.nan, math.inf, -math.inf)


@dataclass(frozen=True, kw_only=True)
class PoisonActivation(Fault):
    """One bad number in what a module returns; gradients pass it as if it were any other value.

    It is written where the value lies, as a device leaves it: no operator and no version of a tensor tells of
    it. What is a weight, a buffer or an input of the module, too, is copied before.

    With activation checkpointing a transient one is in the forward pass and not in its recomputation.
    """

    module: str | None = None
    """Name of the module, or a pattern such as `blocks.*.attn` of which the seed chooses one match; None: the
    seed chooses an innermost module."""
    value: float = math.nan
    """The bad number."""
    path: str | None = None
    """Dotted path of the tensor in what the module returns, such as `0` or `last_hidden_state`; None: the
    first floating tensor."""
    index: Index = None
    """Element: its number in reading order, or one number per dimension; None: the seed chooses."""

    kind: ClassVar[str] = "poison_activation"
    unfired: ClassVar[str] = (
        "the module was not called in that step and micro-batch, or returned no floating tensor"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("module", self.module)
        check_name("path", self.path)
        check_value(self.value)
        check_index(self.index)

    def aim(self, names: Names, dice: Dice) -> Arm:
        """Find the module."""
        where, module = names.module(self.module, dice)
        return partial(in_activation, module, where, self.path, set_value(self.value, self.index, dice))

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> PoisonActivation:
        """Return one with NaN or an infinity in a random innermost module."""
        where, _ = names.module(None, dice)
        return cls(module=where, value=dice.choice(BAD_NUMBERS, "value"), **when)


@dataclass(frozen=True, kw_only=True)
class PoisonGradient(Fault):
    """One bad number in the gradient that one backward pass brings to a parameter.

    It is there before the gradient is accumulated, scaled back, reduced over ranks or clipped.
    """

    parameter: str | None = None
    """Name of the parameter, or a pattern such as `*.bias` of which the seed chooses one match; None: the
    seed chooses a trained parameter."""
    value: float = math.nan
    """The bad number."""
    index: Index = None
    """Element: its number in reading order, or one number per dimension; None: the seed chooses."""

    kind: ClassVar[str] = "poison_gradient"
    unfired: ClassVar[str] = "no backward pass reached the parameter in that step and micro-batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("parameter", self.parameter)
        check_value(self.value)
        check_index(self.index)

    def aim(self, names: Names, dice: Dice) -> Arm:
        """Find the parameter."""
        where, get = names.parameter(self.parameter, dice, trained=True)
        change = set_value(self.value, self.index, dice)
        locate(storage(get()).shape, self.index, dice)  # an impossible index is said now, not in the run
        return lambda shot: in_gradient(get(), where, change, shot)

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> PoisonGradient:
        """Return one with NaN or an infinity in the gradient of a random trained parameter."""
        where, _ = names.parameter(None, dice, trained=True)
        return cls(parameter=where, value=dice.choice(BAD_NUMBERS, "value"), **when)
