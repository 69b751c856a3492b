"""One flipped bit, as a cosmic ray, a bad cell or a bad lane leaves it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn

from gradsentinel.faults.course import Shot
from gradsentinel.faults.damage import bit_is_set, bit_of, bits_of, flip_bit, locate, storage
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Arm, Fault, Index, Removable, check_index, check_name
from gradsentinel.faults.injection import Hit
from gradsentinel.faults.names import Names
from gradsentinel.faults.places import eagerly, in_activation, in_gradient, in_parameter

Target = Literal["parameter", "gradient", "activation"]


@dataclass(frozen=True, kw_only=True)
class FlipBit(Fault):
    """One flipped bit in a parameter, in a gradient or in an activation.

    A parameter is changed in place before the forward pass. That is real damage: it stays when the plan is
    detached, until something restores or overwrites the value. With `persistent` the bit of a parameter is
    stuck: put back to its flipped state whenever a listed step is computed. Any floating or complex dtype.
    """

    target: Target
    """What is hit: `parameter`, `gradient` (of one backward pass, before it is accumulated or reduced) or
    `activation` (what a module returns)."""
    name: str | None = None
    """Name of the parameter or module, or a pattern of which the seed chooses one match; None: the seed
    chooses."""
    bit: int | None = None
    """Bit, 0 being the lowest of the mantissa; the highest is the sign, below it lies the exponent (float32:
    23-30, bfloat16: 7-14, float16: 10-14). Of complex numbers the lower half is the real part. None: the seed
    chooses."""
    index: Index = None
    """Element: its number in reading order, or one number per dimension; None: the seed chooses."""
    path: str | None = None
    """Only for activations: dotted path of the tensor in what the module returns; None: the first floating
    tensor."""

    kind: ClassVar[str] = "flip_bit"
    unfired: ClassVar[str] = "what it aims at was not computed in that step and micro-batch, or is empty"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in get_args(Target):
            raise ValueError(f"target={self.target!r}: give one of {', '.join(get_args(Target))}")
        check_name("name", self.name)
        check_name("path", self.path)
        check_index(self.index)
        if self.bit is not None and not (isinstance(self.bit, int) and 0 <= self.bit < 128):
            raise ValueError(
                f"bit={self.bit!r}: give a number from 0 on; 30 is the highest exponent bit of float32"
            )
        if self.path is not None and self.target != "activation":
            raise ValueError(f"path={self.path!r} has no meaning for target={self.target!r}: leave it out")

    def aim(self, names: Names, dice: Dice) -> Arm:
        """Find the module or parameter."""
        flip = flip_bit(self.bit, self.index, dice)
        if self.target == "activation":
            where, module = names.module(self.name, dice)
            return partial(in_activation, module, where, self.path, flip)
        where, get = names.parameter(self.name, dice, trained=self.target == "gradient")
        locate(storage(get()).shape, self.index, dice)  # what is impossible is said now, not in the run
        highest = bits_of(get().dtype) - 1
        if self.bit is not None and self.bit > highest:
            raise ValueError(f"bit={self.bit}: parameter {where!r} is {get().dtype} with bits 0 to {highest}")
        if self.target == "gradient":
            return lambda shot: in_gradient(get(), where, flip, shot)
        if not self.persistent:
            return lambda shot: in_parameter(get(), where, flip, shot)
        stuck = _StuckBit(self.bit, self.index, dice)

        def arm(shot: Shot) -> list[Removable]:
            def hold(_module: nn.Module, _args: Any) -> None:
                if shot.live():
                    shot.settle()
                    in_parameter(get(), where, stuck.hold, shot)

            hold(names.model, ())
            return [names.model.register_forward_pre_hook(hold), *eagerly()]

        return arm

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> FlipBit:
        """Return one with a random target, place and bit."""
        target = dice.choice(get_args(Target), "target")
        if target == "activation":
            return cls(target=target, name=names.module(None, dice)[0], **when)
        where, get = names.parameter(None, dice, trained=target == "gradient")
        return cls(target=target, name=where, bit=dice.below(bits_of(get().dtype), "bit"), **when)


class _StuckBit:
    """A bit that keeps the state its first flip gave it."""

    def __init__(self, bit: int | None, index: Index, dice: Dice) -> None:
        self._bit = bit
        self._index = index
        self._dice = dice
        self._state: bool | None = None

    def hold(self, tensor: Tensor) -> Hit | None:
        place = locate(tensor.shape, self._index, self._dice)
        if place is None:
            return None
        number, word, width = bit_of(tensor, place, self._bit, self._dice)
        now = bit_is_set(word, number, width)
        if self._state is None:
            self._state = not now
        return None if now == self._state else flip_bit(number, place, self._dice)(tensor)
