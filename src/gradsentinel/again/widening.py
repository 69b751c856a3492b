"""Lets modules compute in a wider dtype than they would: autocast off, narrow weights and inputs widened."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradsentinel.state.tree import map_tensors


@dataclass(eq=False)
class Wide:
    """Stands in for one module's `forward` and computes in `dtype`; gradients arrive in the weights' own.

    Weights stay the leaves they are: what is computed with is a cast of them, so that DDP, FSDP2 and tied
    weights work as ever, and so does activation checkpointing as long as this stays in place until the
    backward pass is over. Copies of the module get a stand-in of their own.
    """

    module: nn.Module
    dtype: torch.dtype
    outermost: bool
    """False for a module inside another wide one, which hands on what it computes as it is."""
    keeps: bool = False
    """True if the outermost hands its results on in the wider dtype, too."""
    original: Callable[..., Any] | None = None
    """What stood in for the module's forward before, as frameworks do; None: the forward of its class."""
    saw_narrow: bool = False
    """True once autocast, a weight or an input would have made it compute in a narrower dtype."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        kind = _device_type(self.module)
        autocast = torch.is_autocast_enabled(kind)
        narrow = self._narrow_in(args, kwargs)
        self.saw_narrow = self.saw_narrow or autocast or narrow is not None
        wide_args, wide_kwargs = map_tensors(self._widen, (args, kwargs))
        with torch.autocast(kind, enabled=False), self._wide_weights():
            forward = self.original or partial(type(self.module).forward, self.module)
            result = forward(*wide_args, **wide_kwargs)
        # Under autocast what comes next casts its inputs anyway, and where a value does not fit, later.
        if narrow is None or not self.outermost or self.keeps or autocast:
            return result
        return map_tensors(lambda tensor: tensor.to(narrow) if tensor.dtype is self.dtype else tensor, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Wide:
        module = memo.get(id(self.module), self.module)
        return Wide(module, self.dtype, self.outermost, self.keeps, copy.deepcopy(self.original, memo))

    def _is_narrow(self, tensor: object) -> bool:
        return (
            isinstance(tensor, Tensor)
            and tensor.is_floating_point()
            and 2 <= tensor.dtype.itemsize < self.dtype.itemsize
        )

    def _widen(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if self._is_narrow(tensor) else tensor

    def _narrow_in(self, *given: Any) -> torch.dtype | None:
        """Return the narrow dtype of the inputs, or else of the weights, if there is one."""
        found: list[torch.dtype] = []
        map_tensors(lambda t: found.append(t.dtype) if self._is_narrow(t) else None, given)
        if not found:
            found = [p.dtype for p in self.module.parameters() if self._is_narrow(p)]
        return found[0] if found else None

    @contextmanager
    def _wide_weights(self) -> Iterator[None]:
        """Let the module hold wide casts of its weights; of those inside it too, if they are all there."""
        modules = list(self.module.modules()) if self.outermost else [self.module]
        swapped: list[tuple[dict[str, Any], str, Tensor]] = []
        flat: list[tuple[nn.RNNBase, list[Any]]] = []
        for module in modules:
            for holder in cast(list[dict[str, Any]], [module._parameters, module._buffers]):
                for name, tensor in list(holder.items()):
                    # FSDP2 has the weights of another module in this one's forward as shards only.
                    if self._is_narrow(tensor) and not hasattr(tensor, "to_local"):
                        swapped.append((holder, name, tensor))
                        holder[name] = tensor.to(self.dtype)
            if swapped and isinstance(module, nn.RNNBase):  # it keeps its weights in a list of its own
                flat.append((module, module._flat_weights))
                module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        try:
            yield
        finally:
            for holder, name, tensor in swapped:
                if not isinstance(tensor, nn.Parameter):
                    _write_back(tensor, holder[name])
                holder[name] = tensor
            for recurrent, weights in flat:
                recurrent._flat_weights = weights


@torch.no_grad()
def _write_back(buffer: Tensor, wide: Tensor | None) -> None:
    """Keep what the forward pass wrote to a buffer, such as running statistics."""
    if wide is not None and wide.shape == buffer.shape and not torch.equal(buffer, wide.to(buffer.dtype)):
        buffer.copy_(wide)


def widen(module: nn.Module, dtype: torch.dtype, *, keeps: bool = False) -> list[Wide]:
    """Let a module, with all that is inside it, compute in `dtype` until `narrow` is called.

    Scripted modules are left as they are, and so is what is wide already.
    """
    made = []
    for inner in module.modules():
        own = getattr(type(inner), "forward", None)
        if isinstance(inner, torch.jit.ScriptModule) or own is None or own is nn.Module.forward:
            continue
        original = inner.__dict__.get("forward")
        if isinstance(original, Wide) and original.dtype.itemsize >= dtype.itemsize:
            continue
        stand_in = Wide(inner, dtype, inner is module, keeps, original)
        inner.forward = stand_in
        made.append(stand_in)
    return made


def narrow(made: Iterable[Wide]) -> None:
    """Let modules compute as they did before `widen`."""
    for stand_in in made:
        if stand_in.module.__dict__.get("forward") is not stand_in:
            continue
        del stand_in.module.forward
        if stand_in.original is not None:
            stand_in.module.forward = stand_in.original


@contextmanager
def widened(modules: Iterable[nn.Module], dtype: torch.dtype, *, keeps: bool = False) -> Iterator[list[Wide]]:
    """Let modules compute in a wider dtype in the block, as they are written where they are compiled."""
    made = [stand_in for module in modules for stand_in in widen(module, dtype, keeps=keeps)]
    try:
        with as_written():
            yield made
    finally:
        narrow(made)


def as_written() -> AbstractContextManager[Any]:
    """Return a context in which compiled code runs as it is written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return nullcontext()
    stance: Callable[[str], AbstractContextManager[Any]] = torch.compiler.set_stance
    return stance("force_eager")


def _device_type(module: nn.Module) -> str:
    parameter = next(module.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type
