"""What the loop has made of the step in flight, to be put back after it was computed again."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradsentinel.again.recompute import close_marks, marks_of
from gradsentinel.measures.inspection import stored
from gradsentinel.run import Run
from gradsentinel.state.buffers import version_of

_PLAIN = frozenset({int, float, complex, bool, str, bytes, tuple, type(None)})
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
"""Of these types and no other: a subclass may forbid what they allow."""
_OF_ALL_MODULES = frozenset(vars(nn.Module()))


class Standing:
    """Gradients, buffers, numbers, and what modules remember, of the step as the loop has made them.

    The gradients are held by reference: a computation from the start makes new ones. Where it writes into
    the same memory, as with gradients in the buckets of DDP, they are only back if it came to the same.
    Of what modules have as attributes numbers, texts, tensors, and lists and dicts of whatever are kept: a
    hidden state, a temperature that falls with each forward pass.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._marks = marks_of(run)
        self._gradients = [(p, p.grad) for _, p in run.host.named_parameters()]
        self._buffers = list(_buffers_of(run))
        self._attributes = list(_attributes_of(run))
        self._numbers = run.last_loss, run.last_grad_norm
        self._scaler: dict[int, Any] = getattr(getattr(run.host, "scaler", None), "_per_optimizer_states", {})
        self._flags = dict(self._scaler)

    @property
    def marks(self) -> dict[str, tuple[float, float]]:
        """Norm and largest magnitude of each gradient, by parameter."""
        return dict(self._marks)

    @torch.no_grad()
    def put_back(self) -> bool:
        """Put everything back, and return True if the gradients are those of the loop on this rank."""
        run = self._run
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._scaler.clear()  # an overflow of the second computation is none of the loop's
        self._scaler.update(self._flags)
        for put in (*self._buffers, *self._attributes):
            put()
        run.last_loss, run.last_grad_norm = self._numbers
        return close_marks(self._marks, marks_of(run))


def _buffers_of(run: Run) -> Iterator[Callable[[], None]]:
    """Yield what puts each buffer back, the very same object with the same values in it."""
    for _, held, name in run.scene.buffers.holders():
        buffer = held.get(name)
        yield partial(held.__setitem__, name, buffer)
        if buffer is not None:
            yield from _values_of(buffer, partial(held.__setitem__, name))


def _attributes_of(run: Run) -> Iterator[Callable[[], None]]:
    """Yield what puts back the attributes that modules set in their forward passes; not those of torch's."""
    modules = {id(module): module for _, root in run.host.modules() for module in root.modules()}
    for module in modules.values():
        if all(one is object or one.__module__.startswith("torch.") for one in type(module).__mro__):
            continue
        attributes = vars(module)
        for name, value in attributes.items():
            if name in _OF_ALL_MODULES and name != "training":
                continue
            replace = partial(attributes.__setitem__, name)
            if type(value) in _PLAIN:
                yield partial(replace, value)
            elif type(value) is Tensor:
                yield partial(replace, value)
                if value.grad_fn is None and not _is_freed(value):
                    yield from _values_of(value, replace)
            elif type(value) in _CONTAINERS:
                yield partial(replace, value)
                yield partial(_refill, value, value.copy())


def _values_of(tensor: Tensor, replace: Callable[[Tensor], None]) -> Iterator[Callable[[], None]]:
    """Yield what puts the values back; nothing for a tensor that has none."""
    if tensor.device.type != "meta" and not nn.parameter.is_lazy(tensor):
        yield partial(_write, tensor, stored(tensor).detach().clone(), version_of(tensor), replace)


def _is_freed(tensor: Tensor) -> bool:
    """Whether the memory was taken from a tensor, as sharding does with views of whole parameters."""
    own = tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"
    return own and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _write(tensor: Tensor, values: Tensor, version: int, replace: Callable[[Tensor], None]) -> None:
    """Write the values only if they differ: a tensor may lie in memory that cannot be written."""
    target = stored(tensor)
    if target.shape != values.shape:  # somebody has given it other memory
        replace(values)
        return
    strided = target.layout is torch.strided  # others cannot be compared, nor written to unnoticed
    if torch.equal(target, values) if strided else version == version_of(tensor):
        return
    if target.is_inference():  # such a tensor is never written, only replaced
        replace(values.clone())
    else:
        target.copy_(values)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if hasattr(container, "extend") else container.update)(content)
