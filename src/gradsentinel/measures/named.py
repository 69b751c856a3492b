"""Parameters with their names, and which of them have a gradient now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any

from torch import Tensor

GRADIENT: Callable[[Tensor], Tensor | None] = attrgetter("grad")
_TRAINED: Callable[[Tensor], bool] = attrgetter("requires_grad")


class Named:
    """Parameters and their names, apart, so that a step takes no line of Python for each of them."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        pairs = list(named)
        self.names = tuple(name for name, _ in pairs)
        self.parameters = [parameter for _, parameter in pairs]
        self._pattern: list[bool] = []
        """Which of them had a gradient when that was asked last."""
        self._present: tuple[str, ...] = ()

    def having(self, gradients: Sequence[Tensor | None]) -> tuple[tuple[str, ...], list[Tensor]]:
        """Return the names of those that have a gradient, and the gradients; `gradients` has all `.grad`.

        As long as they are the same parameters, the names are the same object.
        """
        pattern = list(map(is_not, gradients, repeat(None)))
        missing = compress(self.parameters, map(is_, gradients, repeat(None)))
        if any(map(_is_elsewhere, filter(_TRAINED, missing))):
            gradients = [gradient_of(parameter) for parameter in self.parameters]
            pattern = list(map(is_not, gradients, repeat(None)))
        if pattern != self._pattern:
            self._pattern, self._present = pattern, tuple(compress(self.names, pattern))
        found: list[Any] = list(compress(gradients, pattern))
        return self._present, found


def _is_elsewhere(parameter: Tensor) -> bool:
    """Return True for a parameter whose gradient a framework keeps in another place than `.grad`."""
    return isinstance(getattr(parameter, "main_grad", None), Tensor)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return a parameter's gradient: `.grad`, or the `.main_grad` that some frameworks accumulate into."""
    if parameter.grad is not None:
        return parameter.grad
    main_grad = getattr(parameter, "main_grad", None)
    return main_grad if isinstance(main_grad, Tensor) else None
