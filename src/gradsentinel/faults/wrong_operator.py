"""An operator that computes something else than it should, forward or backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from gradsentinel.faults.damage import Change, first_change
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Arm, Fault, check_name
from gradsentinel.faults.injection import Hit
from gradsentinel.faults.names import Names
from gradsentinel.faults.places import in_activation, in_input_gradient

Phase = Literal["forward", "backward"]
Operator = Callable[[Tensor], Tensor]


def _uninitialised_rows(tensor: Tensor, dice: Dice) -> Tensor:
    """Fill the last quarter of the rows with random bits, as a kernel that skips the padding does."""
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    skipped = max(1, len(rows) // 4)
    generator = torch.Generator().manual_seed(dice.below(2**63, "memory"))
    size = (skipped, rows.shape[1] * rows.element_size())
    memory = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(rows.dtype)
    memory[0, 0] = math.nan
    return torch.cat([rows[: len(rows) - skipped], memory.to(rows.device)]).reshape(tensor.shape)


_NAMED: dict[str, Callable[[Tensor, Dice], Tensor]] = {
    "uninitialised_rows": _uninitialised_rows,
    "sign_flip": lambda tensor, _: -tensor,
    "zero": lambda tensor, _: torch.zeros_like(tensor),
}


@dataclass(frozen=True, kw_only=True)
class WrongOperator(Fault):
    """A module's operator computes something else in one direction, forward or backward; the other is right.

    The wrong function runs outside autograd, as a faulty kernel does: its derivative plays no part.
    """

    operator: str | Operator
    """What happens to the right result: `uninitialised_rows` (the last quarter of the rows hold random bits,
    NaN among them), `sign_flip`, `zero`, or a function from a tensor to one of the same shape."""
    module: str | None = None
    """Name of the module, or a pattern such as `blocks.*.attn` of which the seed chooses one match; None: the
    seed chooses an innermost module."""
    phase: Phase = "forward"
    """`forward`: what the module returns is wrong; `backward`: the gradient it passes back to its input
    is."""
    path: str | None = None
    """Dotted path of the tensor in what the module returns (backward: in its arguments, by number or
    keyword); None: the first floating tensor (backward: that needs a gradient)."""

    kind: ClassVar[str] = "wrong_operator"
    unfired: ClassVar[str] = (
        "the module was not called in that step and micro-batch, its input needs no gradient (backward), or "
        "the wrong result is the same as the right one"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("module", self.module)
        check_name("path", self.path)
        if not callable(self.operator) and self.operator not in _NAMED:
            raise ValueError(f"operator={self.operator!r}: give a function or one of {', '.join(_NAMED)}")
        if self.phase not in get_args(Phase):
            raise ValueError(f"phase={self.phase!r}: give one of {', '.join(get_args(Phase))}")

    def aim(self, names: Names, dice: Dice) -> Arm:
        """Find the module."""
        where, module = names.module(self.module, dice)
        place = in_activation if self.phase == "forward" else in_input_gradient
        return partial(place, module, where, self.path, self._change(dice))

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> WrongOperator:
        """Return one of the named operators in a random innermost module, forward."""
        operator = dice.choice(tuple(_NAMED), "operator")
        return cls(operator=operator, module=names.module(None, dice)[0], **when)

    def _change(self, dice: Dice) -> Change:
        operator = self.operator
        name = (
            operator if isinstance(operator, str) else getattr(operator, "__name__", type(operator).__name__)
        )

        def change(tensor: Tensor) -> Hit | None:
            if tensor.numel() == 0:
                return None
            right = tensor.clone()
            copy = tensor.clone()
            wrong = _NAMED[operator](copy, dice) if isinstance(operator, str) else operator(copy)
            if not isinstance(wrong, Tensor) or wrong.shape != right.shape:
                got = tuple(wrong.shape) if isinstance(wrong, Tensor) else type(wrong).__name__
                raise ValueError(
                    f"operator {name} returned {got}: it must return a tensor of shape {tuple(right.shape)}"
                )
            tensor.copy_(wrong)
            hit = first_change(right, tensor)
            return None if hit is None else replace(hit, op=name)

        return change
