"""How a change gets to where it belongs: hooks on one module or one parameter, there for one micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.faults.course import Shot
from gradsentinel.faults.damage import (
    Change,
    damage,
    damage_gradient,
    damage_where_it_is,
    is_its_own,
    storage,
)
from gradsentinel.faults.fault import Removable
from gradsentinel.faults.tree import listing, pick, replaced
from gradsentinel.state.tree import tensors_in


class Undo:
    """A handle made of a function."""

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Call it."""
        self._undo()


def eagerly() -> list[Removable]:
    """Let compiled modules run as written until removed: compiled code misses hooks added after it."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import is slow
        return []
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return [Undo(lambda: stance.__exit__(None, None, None))]


def in_activation(
    module: nn.Module, where: str, path: str | None, change: Change, shot: Shot
) -> list[Removable]:
    """Change what a module returns: the first floating tensor, or the one at a dotted path."""

    def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not shot.live():
            return None
        found = _floating(output, path, f"the output of {where or 'the model'}")
        if found is None:
            return None
        at, tensor = found
        strike = _strike(change, shot, "activation", where)
        stays = (*module.parameters(), *module.buffers(), *(t for _, t in tensors_in((args, kwargs))))
        if is_its_own(tensor, stays):
            damage_where_it_is(tensor, strike)
            return None
        return replaced(output, at, damage(tensor, strike))

    # First in line: every other hook, of a tracer for example, sees the fault as this module's work.
    return [module.register_forward_hook(hook, prepend=True, with_kwargs=True), *eagerly()]


def in_input_gradient(
    module: nn.Module, where: str, path: str | None, change: Change, shot: Shot
) -> list[Removable]:
    """Change the gradient that a module passes back to one of its inputs: the first, or that at a path."""

    def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not shot.live():
            return None
        given = {**dict(enumerate(args)), **kwargs}
        found = _floating(given, path, f"the input of {where or 'the model'}", trained=True)
        if found is None:
            return None
        strike = _strike(change, shot, "gradient", where)
        at, tensor = found
        given = replaced(given, at, damage_gradient(tensor, lambda t: shot.live() and strike(t)))
        return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}

    return [module.register_forward_pre_hook(hook, with_kwargs=True), *eagerly()]


def in_gradient(parameter: Tensor, where: str, change: Change, shot: Shot) -> list[Removable]:
    """Change the gradient of one backward pass to a parameter, before it is accumulated or reduced."""
    if not parameter.requires_grad:
        return []

    def hook(gradient: Tensor) -> Tensor | None:
        return damage(gradient, _strike(change, shot, "gradient", where)) if shot.live() else None

    return [parameter.register_hook(hook)]  # type: ignore[no-untyped-call]


def in_parameter(parameter: Tensor, where: str, change: Change, shot: Shot) -> list[Removable]:
    """Change a parameter itself, now; nothing is left to undo."""
    if shot.live():
        with torch.no_grad():
            _strike(change, shot, "parameter", where)(storage(parameter.detach()))
    return []


def _strike(change: Change, shot: Shot, target: str, where: str) -> Callable[[Tensor], None]:
    def strike(tensor: Tensor) -> None:
        hit = change(tensor)
        if hit is not None:
            shot.record(target, where, hit)

    return strike


def _floating(
    tree: Any, path: str | None, what: str, *, trained: bool = False
) -> tuple[tuple[Any, ...], Tensor] | None:
    def fits(tensor: Tensor) -> bool:
        return (tensor.is_floating_point() or tensor.is_complex()) and (tensor.requires_grad or not trained)

    found = pick(tree, path, fits, what=what)
    if not found and path is not None and not trained:
        raise LookupError(f"{what} has no floating tensor at {path!r}; it has: {listing(tree)}")
    return found[0] if found else None
