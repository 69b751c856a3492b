"""What a narrow type lost before the operator that shows it: an overflow, or a small number that became 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.diagnosis.memory import FINE, Badness
from gradsentinel.diagnosis.record import Event
from gradsentinel.diagnosis.swap import NARROW, wider
from gradsentinel.diagnosis.trace import Trace, is_allocation

_COPIED = 1 << 24
"""Elements of an argument up to which it is copied."""


class NarrowTrace(Trace):  # type: ignore[no-untyped-call]
    """Also computes each operator of a narrow type in float32, up to the one that is to blame, and compares.

    What float16 turns into Inf, or into 0, is often seen only later, where float32 divides by it.

    Args:
        modules: the module tree's roots with their prefixes.
        parameters: with their names.
        until: number of the event at which to stop looking.
    """

    def __init__(self, modules: Any, parameters: Any, *, until: int) -> None:
        super().__init__(modules, parameters)
        self.overflow: Event | None = None
        """The first operator of the forward pass whose result float32 would hold."""
        self.underflow: Event | None = None
        """The last one that makes 0 of what is not 0 in float32."""
        self._until = until

    @property
    def lost(self) -> Event | None:
        """The operator to blame, None if there is none."""
        return self.overflow or self.underflow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and look at what a wider type would have made of it."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.events) <= self._until and not self.in_backward and _comparable(func, result):
            self._compare(func, args, kwargs or {}, result)
        return result

    def _compare(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        wide_args, wide_kwargs = tree_map(wider, (args, dict(kwargs)))
        try:
            with torch.no_grad():
                wide = func(*wide_args, **wide_kwargs)
        except (RuntimeError, TypeError, NotImplementedError):
            return  # it has no float32 form
        for narrow, kept in zip(_tensors(result), _tensors(wide), strict=False):
            if narrow.dtype not in NARROW or narrow.shape != kept.shape:
                continue
            got, should = narrow.float(), kept.float()
            if self.overflow is None and bool((torch.isinf(got) & torch.isfinite(should)).any()):
                self.overflow = self._event(func, args, kwargs, narrow, Badness(inf=True))
            if bool(((got == 0) & (should != 0)).any()):
                self.underflow = self._event(func, args, kwargs, narrow, FINE)

    def _event(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor, badness: Badness
    ) -> Event:
        given = tree_map(_kept, (tuple(args), dict(kwargs)))
        return Event(
            index=len(self.events),
            op=str(func),
            function=func,
            call=self.here(),
            backward=False,
            recomputed=False,
            node=None,
            sequence=-1,
            custom=None,
            first=False,
            in_no_grad=False,
            badness=badness,
            edges=(),
            fresh=True,
            args=given[0],
            kwargs=given[1],
            results=(result,),
            argument_origins=(0,) * len(_tensors((args, kwargs))),
        )


@torch.no_grad()
def _kept(value: Any) -> Any:
    """Copy a tensor, if it is no giant: the program may write to it later."""
    small = isinstance(value, Tensor) and value.numel() <= _COPIED
    return value.detach().clone() if small else value


@torch.no_grad()
def lost_index(event: Event) -> tuple[int, ...] | None:
    """Return the first element that a narrow type lost: Inf, or 0 where float32 has another number."""
    args, kwargs = tree_map(wider, (event.args, event.kwargs))
    try:
        wide = _tensors(event.function(*args, **kwargs))
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    result = event.results[0]
    kept = next((tensor.float() for tensor in wide if tensor.shape == result.shape), None)
    if kept is None:
        return None
    lost = torch.isinf(result) & torch.isfinite(kept) if event.badness else (result == 0) & (kept != 0)
    if not bool(lost.any()):
        return None
    place = lost.flatten().to(torch.uint8).argmax().cpu()
    return tuple(int(i) for i in torch.unravel_index(place, lost.shape)) if lost.dim() else ()


def _comparable(func: Any, result: Any) -> bool:
    """Leave out what writes in place, hands out views or memory, or draws random numbers."""
    if func.namespace != "aten":  # what an operator of the user's own does beside its result is not known
        return False
    if func._schema.is_mutable or is_allocation(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if any(r.alias_info is not None for r in func._schema.returns):
        return False
    return any(tensor.dtype in NARROW and tensor.layout is torch.strided for tensor in _tensors(result))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
