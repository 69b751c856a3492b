"""What one call hands to collectives, seen as it does: torch asks a mode before it adds up over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode

from gradsentinel.integrations.wraps import Wraps

_HANDED = {
    "all_reduce": (0, "tensor"),
    "reduce_scatter_tensor": (1, "input"),
    "reduce_scatter_single": (1, "input"),
}
"""Collectives that put the ranks' values together, with the place and name of what a rank gives."""
_MADE = frozenset({Tensor.contiguous, Tensor.__setitem__, torch.max, Tensor.max, torch.sum, Tensor.sum})
"""One of these makes whatever Megatron's modules hand over."""


def asks_modes(collective: Any) -> bool:
    """Return True if a collective asks function modes before it does anything; those of torch 2.6 do not."""
    code = getattr(inspect.unwrap(collective), "__code__", None)
    return code is not None and "has_torch_function" in code.co_names


class Handed(TorchFunctionMode):
    """Sees each tensor that is added up over ranks within the block, before it is; changes nothing.

    Args:
        see: takes such a tensor.
        asked: whether the collectives ask modes; if not, what may be handed over is seen as it is made, in
            the same order on all ranks.
    """

    def __init__(self, see: Callable[[Tensor], None], *, asked: bool = True) -> None:
        super().__init__()
        self._see = see
        self._asked = asked
        self._last: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and see what it is given if it is such a collective."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        entry = _HANDED.get(getattr(func, "__name__", ""))
        if entry is not None:
            place, name = entry
            self._hand(args[place] if len(args) > place else kwargs.get(name))
        made = func(*args, **kwargs)
        if not self._asked and func in _MADE:
            value = args[0] if func is Tensor.__setitem__ else made
            self._hand(value[0] if isinstance(value, tuple) else value)
        return made

    def _hand(self, value: Any) -> None:
        if isinstance(value, Tensor) and value is not self._last:
            self._last = value
            self._see(value)

    def forget(self) -> None:
        """Keep no tensor alive."""
        self._last = None

    def __exit__(self, *error: object) -> None:
        self.forget()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


@contextmanager
def unwound() -> Iterator[None]:
    """Leave no mode behind that was entered within the block.

    Torch calls no hook after a module that is interrupted (Ctrl-C, an exit), so nobody else would leave it.
    """
    depth = _len_torch_function_stack()
    try:
        yield
    finally:
        while _len_torch_function_stack() > depth:
            left = _pop_mode()  # type: ignore[no-untyped-call]
            if isinstance(left, Handed):
                left.forget()


def watch_collectives(owner: Any, method: str, see: Callable[[Tensor], None]) -> Wraps:
    """Have what one object's method hands to collectives seen; returns the wrap. Not in compiled code."""
    asked = asks_modes(torch.distributed.all_reduce)

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(*args, **kwargs)
            with Handed(see, asked=asked):
                return plain(*args, **kwargs)

        return watched

    wraps = Wraps()
    wraps.wrap(owner, method, make)
    return wraps


def watch_collectives_of(module: nn.Module, see: Callable[[Tensor], None]) -> list[Any]:
    """Have what a module's forward pass hands to collectives seen; returns the hooks' handles.

    By hooks and no wrap: a copy of the module must compute with its own weights.
    """
    asked = asks_modes(torch.distributed.all_reduce)
    entered: list[Handed] = []

    def enter(_module: nn.Module, _given: Any) -> None:
        if not torch.compiler.is_compiling():
            entered.append(Handed(see, asked=asked))
            entered[-1].__enter__()  # type: ignore[no-untyped-call]

    def leave(_module: nn.Module, _given: Any, _made: Any) -> None:
        if entered and not torch.compiler.is_compiling():
            entered.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, prepend=True, always_call=True),
    ]
