"""A low-precision matrix product that overflows: really computed, no infinity is planted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradsentinel.faults.course import Shot
from gradsentinel.faults.dice import Dice
from gradsentinel.faults.fault import Arm, Fault, Removable, check_name
from gradsentinel.faults.injection import Hit
from gradsentinel.faults.names import Names
from gradsentinel.faults.places import Undo, eagerly

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_aten = torch.ops.aten
_FACTORS = {  # operator: positions of the two factors among its arguments
    _aten.mm.default: (0, 1),
    _aten.bmm.default: (0, 1),
    _aten.mv.default: (0, 1),
    _aten.dot.default: (0, 1),
    _aten.addmm.default: (1, 2),
    _aten.addmv.default: (1, 2),
    _aten.baddbmm.default: (1, 2),
    _aten._addmm_activation.default: (1, 2),
    _aten.convolution.default: (0, 1),
    _aten.linear.default: (0, 1),  # these two arrive whole in inference mode only
    _aten.matmul.default: (0, 1),
}


@dataclass(frozen=True, kw_only=True)
class MatmulOverflow(Fault):
    """A matrix product inside a module overflows because it is computed in low precision.

    The product is computed in `dtype` with both factors scaled up, still inside its range, so that its own
    result leaves the range: the operator gets finite numbers and returns infinities. A recomputation in which
    the factors have a wider dtype than the first time comes out right, as it would after a real overflow.
    Products inside fused attention kernels do not overflow like this; those of linear layers, convolutions
    and attention written out do.
    """

    module: str | None = None
    """Name of the module, or a pattern such as `blocks.*.attn` of which the seed chooses one match; None: the
    seed chooses a linear layer, a convolution or an attention."""
    dtype: torch.dtype = torch.float16
    """Dtype of the product: float16, bfloat16 or float32."""
    nth: int = 0
    """Which matrix product in the module, in order of computation; if it cannot overflow (a factor is all
    zero, say) the next that can."""

    kind: ClassVar[str] = "matmul_overflow"
    unfired: ClassVar[str] = (
        "the module was not called in that step and micro-batch, or no such product in it overflows"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("module", self.module)
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype}: give one of {', '.join(map(str, _DTYPES))}")
        if not isinstance(self.nth, int) or self.nth < 0:
            raise ValueError(f"nth={self.nth!r}: matrix products are counted from 0")

    def aim(self, names: Names, dice: Dice) -> Arm:
        """Find the module."""
        where, module = names.module(self.module, dice, suits=_multiplies)
        product = _Product(self.dtype, self.nth)

        def arm(shot: Shot) -> list[Removable]:
            entered: list[_Overflow | None] = []  # one for each call of the module that is under way

            def enter(_module: nn.Module, _args: Any) -> None:
                mode = _Overflow(product, where, shot) if shot.live() else None
                entered.append(mode)
                if mode is not None:
                    mode.__enter__()  # type: ignore[no-untyped-call]

            def leave(*_: Any) -> None:
                mode = entered.pop() if entered else None
                if mode is not None:
                    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

            def close() -> None:  # after an interrupt, which skips the hooks
                while entered:
                    leave()

            return [
                module.register_forward_pre_hook(enter),
                module.register_forward_hook(leave, always_call=True, prepend=True),
                Undo(close),
                *eagerly(),
            ]

        return arm

    @classmethod
    def draw(cls, names: Names, dice: Dice, when: dict[str, Any]) -> MatmulOverflow:
        """Return one in float16 in a random linear layer, convolution or attention."""
        return cls(module=names.module(None, dice, suits=_multiplies)[0], **when)


@dataclass
class _Product:
    """The product that overflows, and what is known about it from one computation to the next."""

    dtype: torch.dtype
    nth: int
    native: torch.dtype | None = None
    """Dtype in which the run itself computed it when it overflowed first."""

    def rescued(self, factor: Tensor) -> bool:
        """Return whether the run now computes in a wider dtype than it did."""
        if self.native is None:
            return False
        now, then = torch.finfo(factor.dtype), torch.finfo(self.native)
        return now.bits > then.bits or (now.bits == then.bits and now.max > then.max)


class _Overflow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active during one call of the module; below autograd, which records the same operators as ever."""

    def __init__(self, product: _Product, where: str, shot: Shot) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._product = product
        self._where = where
        self._shot = shot
        self._seen = 0
        self._done = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        factors = _FACTORS.get(func)
        if self._done or factors is None or not out.is_floating_point():
            return out
        self._seen += 1
        if self._seen <= self._product.nth or self._product.rescued(args[factors[0]]):
            return out
        low = self._overflown(func, factors, args, kwargs or {}, out)
        if low is None:
            return out
        self._done = True
        self._product.native = args[factors[0]].dtype
        bad = ~low.isfinite()
        place = tuple(int(i) for i in bad.nonzero()[0])
        hit = Hit(place, out[place].item(), low[place].item(), elements=int(bad.sum()), op=str(func))
        self._shot.record("activation", self._where, hit)
        return low.to(out.dtype)

    def _overflown(
        self, func: Any, factors: tuple[int, int], args: Any, kwargs: Any, right: Tensor
    ) -> Tensor | None:
        """Return the product with its factors scaled up until it overflows; None if it does not."""
        dtype = self._product.dtype
        limit = _exponent(torch.finfo(dtype).max)
        sizes = [_exponent(_largest(args[i])) for i in factors]
        product = _exponent(_largest(right))
        if product is None or limit is None or sizes[0] is None or sizes[1] is None:
            return None
        given = [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
        # 2**just is the size of both factors that brings the largest result past the limit.
        just = (limit + 2 - product + sizes[0] + sizes[1] + 1) // 2
        for size in (min(just, limit - 1), limit - 1):  # the second in case the rest of the result was a bias
            for i, now in zip(factors, sizes, strict=True):
                assert now is not None
                wide = args[i].float() if args[i].element_size() < 4 else args[i]
                given[i] = (wide * 2.0 ** max(-126, min(size - now, 126))).to(dtype)
            low: Tensor = func(*given, **kwargs)
            if not low.isfinite().all():
                return low
        return None


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _exponent(number: float) -> int | None:
    """Return the n with number < 2**n <= 2 * number; None if there is none."""
    return math.frexp(number)[1] if math.isfinite(number) and number != 0 else None


def _multiplies(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    matrix = isinstance(weight, Tensor) and weight.dim() >= 2
    return isinstance(module, nn.MultiheadAttention) or (
        matrix and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    )
