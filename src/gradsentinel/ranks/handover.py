"""What a rank hands to its tensor-parallel peers, looked at before the exchange that spreads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.again.model_calls import OwnHooks
from gradsentinel.measures.inspection import local
from gradsentinel.state.tree import tensors_in
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

_EXCHANGING = ("torch.distributed.tensor", "torch.distributed._tensor")
"""Where the hooks come from with which `parallelize_module` and `distribute_module` exchange values."""
_DEEPEST = 4
"""Containers in a module's arguments are looked into so deep."""

Note = Callable[[str, Tensor], None]
"""Takes note of what is handed over: in words, and this rank's own part of it."""


class Handovers:
    """Hooks on tensor-parallel modules (DTensor): the ranks add up their outputs and input gradients there.

    One rank's NaN is on all of them one such exchange later. What counts is this rank's part, from before
    it: an output or the gradient of an input that is to be added up, or a part of a sequence that is to be
    gathered. Nothing is looked at where nothing is exchanged, in compiled code, and in evaluation. The
    exchanges come in the same order on all ranks, so the first bad one tells where it began.
    """

    def __init__(self, note: Note) -> None:
        self._note = note
        self._handles: list[Any] = []
        self.mesh: Any = None
        """The mesh over which activations are distributed, once one was seen."""

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Watch the tensor-parallel modules among these roots and the modules in them."""
        for prefix, root in modules:
            for path, module in root.named_modules():
                if any(_exchanges(hook) for hook in (*_values(module, "pre_"), *_values(module, ""))):
                    name = ".".join(part for part in (prefix, path) if part)
                    self._handles += _Watch(self, name or "the model").hooks(module)

    def detach(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def quietly(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return the hook as one that never harms the training: if it fails, all hooks are taken off.

        Compiled code leaves it out.
        """

        def hook(*args: Any) -> None:
            if torch.compiler.is_compiling():
                return
            try:
                function(*args)
            except Exception as error:
                logger.exception("what tensor-parallel ranks exchange cannot be looked at any more")
                record_swallowed(error)
                self.detach()

        return hook

    def see(self, what: str, own: Tensor) -> None:
        """Take note of a tensor that is about to be exchanged."""
        mesh = getattr(own, "device_mesh", None)
        self.mesh = self.mesh if mesh is None else mesh
        self._note(what, own)


class _Watch:
    """One module: what it was given before and after its own exchange, what it made before and after that."""

    def __init__(self, handovers: Handovers, name: str) -> None:
        self._see, self._quietly = handovers.see, handovers.quietly
        self._words = {
            "in": f"the input of {name}",
            "out": f"the output of {name}",
            "in back": f"the gradient of the input of {name}",
            "out back": f"the gradient of the output of {name}",
        }
        self._given: list[Tensor] | None = None
        self._taken: list[Tensor] = []
        self._made: list[Tensor] = []

    def hooks(self, module: nn.Module) -> list[Any]:
        """Put the hooks around those that exchange values; returns their handles."""
        quietly = self._quietly
        return [
            module.register_forward_pre_hook(quietly(self._enter), prepend=True, with_kwargs=True),
            module.register_forward_pre_hook(quietly(self._entered), with_kwargs=True),
            module.register_forward_hook(quietly(self._leave), prepend=True),
            module.register_forward_hook(quietly(self._left)),
        ]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        wanted = module.training or torch.is_grad_enabled()
        self._given = _tensors((args, kwargs)) if wanted else None

    def _entered(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._given is None:
            return
        self._taken = _tensors((args, kwargs))
        for given, taken in zip(self._given, self._taken, strict=False):
            if _exchanged(given, taken):
                self._see(self._words["in"], given)
            if taken.requires_grad and hasattr(taken, "device_mesh"):
                self._look_back("in back", taken, given)

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self._made = [] if self._given is None else _tensors(output)

    def _left(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._given is None:
            return
        for made, final in zip(self._made, _tensors(output), strict=False):
            if _exchanged(made, final) or _sharded(final):
                self._see(self._words["out"], made)
            if final.requires_grad and _shape(made) != _shape(final):
                self._look_back("out back", final, made)
        self._given, self._taken, self._made = None, [], []

    def _look_back(self, what: str, inner: Tensor, outer: Tensor) -> None:
        """See the gradient of `inner` before it becomes that of `outer`, if it is exchanged on the way."""
        shape = _shape(outer)

        def look(gradient: Tensor) -> None:
            if _partial(gradient) or _shape(gradient) != shape:
                self._see(self._words[what], gradient)

        inner.register_hook(self._quietly(look))  # type: ignore[no-untyped-call]
        OwnHooks.registered += 1


def _values(module: nn.Module, kind: str) -> Sequence[Any]:
    return tuple(getattr(module, f"_forward_{kind}hooks").values())


def _exchanges(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith(_EXCHANGING)


def _tensors(values: Any) -> list[Tensor]:
    return [tensor for _, tensor in tensors_in(values, max_depth=_DEEPEST)]


def _exchanged(before: Tensor, after: Tensor) -> bool:
    """True if the ranks put their parts together between the two."""
    if before is after:
        return False
    gathered = type(after).__name__ == "AsyncCollectiveTensor" and type(before) is not type(after)
    return gathered or _shape(before) != _shape(after) or (_partial(before) and not _partial(after))


def _partial(tensor: Tensor) -> bool:
    return any(place.is_partial() for place in getattr(tensor, "placements", ()))


def _sharded(tensor: Tensor) -> bool:
    """True if it leaves as a distributed tensor whose parts differ: whoever uses it may exchange them."""
    return any(not place.is_replicate() for place in getattr(tensor, "placements", ()))


@torch.no_grad()
def _shape(tensor: Tensor) -> torch.Size:
    return local(tensor).shape
