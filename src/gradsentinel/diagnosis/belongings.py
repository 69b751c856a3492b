"""Keeps what modules hold beside parameters and buffers: counters, containers, meters, generators, arrays."""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.measures.inspection import stored

_CONTAINERS = (list, dict, set, deque)
_CLONED = 1 << 24
"""Elements up to which a tensor or an array is copied."""
_DEEPEST = 6
_MOST = 4096
"""Objects that are looked into, for all modules together."""
_NOT_OURS = (
    "accelerate",
    "asyncio",
    "concurrent",
    "deepspeed",
    "gradsentinel",
    "io",
    "lightning",
    "logging",
    "megatron",
    "multiprocessing",
    "numpy",
    "pytorch_lightning",
    "queue",
    "socket",
    "threading",
    "torch",
    "_io",
    "_thread",
)
"""Packages whose objects other threads may change, or that lead to the whole program: left alone."""
_NO_STATE = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    nn.Module,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
)


class Belongings:
    """Small Python state as it was, with what lies inside of it, up to a depth and a number of objects."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # holds on to the objects: the key is their address
        self._restores: list[Callable[[], object]] = []

    def keep(self, value: Any, depth: int = 0) -> None:
        """Remember a value, and what it holds."""
        if isinstance(value, _NO_STATE) or id(value) in self._seen or len(self._seen) >= _MOST:
            return
        self._seen[id(value)] = value
        restore = _restore_of(value)
        if restore is not None:
            self._restores.append(restore)
            return
        if depth < _DEEPEST:
            for inside in self._inside(value):
                self.keep(inside, depth + 1)

    def restore(self) -> None:
        """Put back what has changed; the objects are the same ones."""
        for restore in self._restores:
            restore()

    def _inside(self, value: Any) -> Iterator[Any]:
        if isinstance(value, _CONTAINERS):
            content = list(value.items()) if isinstance(value, dict) else list(value)
            self._restores.append(lambda: _refill(value, content))
            if len(content) <= _MOST:  # longer ones are put back as they were, not what they hold
                yield from (v for _, v in content) if isinstance(value, dict) else content
        elif isinstance(value, (tuple, frozenset)):
            yield from value
        elif type(value).__module__.partition(".")[0] not in _NOT_OURS:
            held = getattr(value, "__dict__", None)
            if isinstance(held, dict):
                before = dict(held)
                self._restores.append(lambda: _refill(held, list(before.items())))
                yield from before.values()
            slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
            if slots:
                self._restores.append(lambda: _reset(value, slots))
                yield from slots.values()


def _slots(value: Any) -> Iterator[str]:
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if not name.startswith("__"):
                yield name


def _reset(value: Any, slots: dict[str, Any]) -> None:
    for name, before in slots.items():
        if getattr(value, name, None) is not before:
            setattr(value, name, before)


def _refill(container: Any, content: list[Any]) -> None:
    """Put the content back; one that is as it was is not touched, for others may be reading it."""
    now = list(container.items()) if isinstance(container, dict) else list(container)
    if len(now) == len(content) and all(map(_is_same, now, content)):
        return
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:  # of a dict
        return one[0] is other[0] and one[1] is other[1]
    return one is other


def _restore_of(value: Any) -> Callable[[], object] | None:
    """Return what puts a value back that has its content outside of Python objects, None for others."""
    if isinstance(value, Tensor):
        return tensor_keeper(value) if has_memory(value) and value.numel() <= _CLONED else lambda: None
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    numpy = sys.modules.get("numpy")
    return None if numpy is None else _numpy(numpy, value)


def _numpy(numpy: Any, value: Any) -> Callable[[], object] | None:
    if isinstance(value, numpy.ndarray):
        if value.size > _CLONED or value.dtype.hasobject or not value.flags.writeable:
            return lambda: None
        before = value.copy()
        return lambda: numpy.copyto(value, before)
    if isinstance(value, numpy.random.Generator):
        bits, state = value.bit_generator, value.bit_generator.state
        return lambda: setattr(bits, "state", state)
    if isinstance(value, numpy.random.RandomState):
        drawn = value.get_state()
        return lambda: value.set_state(drawn)
    return None


@torch.no_grad()
def tensor_keeper(tensor: Tensor, *, on_host: bool = False) -> Callable[[], None]:
    """Copy a tensor, and return what puts it back bit for bit if something wrote to it.

    Args:
        tensor: with memory of its own.
        on_host: keep the copy in host memory.
    """
    held = stored(tensor.detach())
    before = held.to("cpu", copy=True) if on_host else held.clone()

    @torch.no_grad()
    def restore() -> None:
        # What is written through `.data` or NumPy makes no new version: the bits have to be compared.
        now = stored(tensor.detach())
        then = before.to(now.device)
        if now.shape == then.shape and not _same_bits(now, then):
            now.copy_(then)

    return restore


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or one.is_quantized:
        return False
    one, other = one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg()
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def has_memory(tensor: Tensor) -> bool:
    """Return True if a tensor holds values: sharding takes the memory from views of whole parameters."""
    if tensor.device.type == "meta" or torch.nn.parameter.is_lazy(tensor):
        return False
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return True
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0
