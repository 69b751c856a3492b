"""What one call hands to collectives, seen as it does: torch asks a mode before it adds up over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradsentinel.integrations.wraps import Wraps

_HANDED = {
    "all_reduce": (0, "tensor"),
    "reduce_scatter_tensor": (1, "input"),
    "reduce_scatter_single": (1, "input"),
}
"""Collectives that put the ranks' values together, with the place and name of what a rank gives."""


class Handed(TorchFunctionMode):
    """Sees each tensor that is added up over ranks within the block, before it is; changes nothing."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function, and see what it is given if it is such a collective."""
        kwargs = kwargs or {}
        entry = _HANDED.get(getattr(func, "__name__", ""))
        if entry is not None:
            place, name = entry
            given = args[place] if len(args) > place else kwargs.get(name)
            if isinstance(given, Tensor):
                self._see(given)
        return func(*args, **kwargs)


def watch_collectives(owner: Any, method: str, see: Callable[[Tensor], None]) -> Wraps:
    """Have what one object's method hands to collectives seen; returns the wrap. Not in compiled code."""

    def make(plain: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return plain(*args, **kwargs)
            with Handed(see):
                return plain(*args, **kwargs)

        return watched

    wraps = Wraps()
    wraps.wrap(owner, method, make)
    return wraps
