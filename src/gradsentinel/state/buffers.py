"""A copy of the model's buffers from before the step, because a bad forward pass writes to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradsentinel.measures.inspection import stored
from gradsentinel.wording import plain_name

_SMALL = 1 << 20
"""Buffers up to this many bytes are copied every step."""
_LOOK_AGAIN = 50
"""Every so many steps new buffers are looked for, and the large ones are compared again."""
_TRIAL_STEPS = 3
"""For so many steps larger buffers are compared, to learn which ones the model writes to."""


class BufferShadow:
    """Keeps every buffer as it was before the step, and puts it back when the step is dropped.

    BatchNorm writes its running statistics without raising the tensor's version counter, and code
    that writes through `.data` does not raise it either, so small buffers are simply copied, all in
    one launch per device and dtype. Large ones (masks, position tables) are copied again only if
    their version moved, or if they were seen to change during the first steps.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = list(modules)
        self._owners: list[tuple[str, nn.Module, str]] = []
        self._kept: dict[tuple[int, str], _Kept] = {}
        self._unborn: list[nn.Module] = []
        """Modules whose buffers had no shape yet when they were to be remembered."""
        self._captures = 0
        self.generation = 0
        """Goes up whenever modules and buffers were looked for."""
        self.may_wait = True
        """False trusts the version counters of large buffers instead of comparing them from time to time."""
        self._absent: list[tuple[nn.Module, str]] = []
        self.find()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current buffers by name."""
        for label, module, name in self._owners:
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield label, buffer

    def holders(self) -> Iterator[tuple[str, dict[str, Tensor | None], str]]:
        """Yield for each buffer its label, and the dict and the name that it is found by at any time."""
        for label, module, name in self._owners:
            yield label, module._buffers, name

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by name as they were remembered last."""
        for label, module, name in self._owners:
            kept = self._kept.get((id(module), name))
            if kept is not None:
                yield label, kept.copy

    def moved(self) -> dict[str, int]:
        """Return how often each buffer was written to since it was remembered, as its version tells."""
        found = {}
        for label, module, name in self._owners:
            kept, buffer = self._kept.get((id(module), name)), module._buffers.get(name)
            if kept is not None and buffer is not None:
                found[label] = version_of(buffer) - (kept.version if buffer is kept.buffer else 0)
        return found

    @property
    def none(self) -> bool:
        """True once it is clear that the model has no buffers: there is nothing to remember."""
        return not self._owners and self._captures > _TRIAL_STEPS

    @property
    def complete(self) -> bool:
        """False while a lazy module had no values yet when the buffers were remembered last."""
        return not self._unborn

    def capture(self) -> None:
        """Remember the buffers as they are now; no wait for the device after the first steps."""
        look_again = self._captures <= _TRIAL_STEPS or self._captures % _LOOK_AGAIN == 0
        if look_again:
            self.find()  # a first forward pass, or somebody, may have added some
        self._captures += 1
        if self._owners:
            self._copy(look_again=look_again)

    @torch.no_grad()
    def _copy(self, *, look_again: bool) -> None:
        self._unborn.clear()
        self._absent.clear()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for _, module, name in self._owners:
            buffer = module._buffers.get(name)
            if buffer is None:
                self._absent.append((module, name))
                continue
            if buffer.device.type == "meta":
                continue
            if torch.nn.parameter.is_lazy(buffer):
                self._unborn.append(module)
                continue
            key = (id(module), name)
            kept = self._kept.get(key)
            source = stored(buffer)
            if kept is None or not kept.fits(buffer, source):
                self._kept[key] = _Kept(buffer, source.detach().clone(), version_of(buffer))
                continue
            if self.may_wait and not kept.live and look_again and source.layout is torch.strided:
                kept.live = not torch.equal(kept.copy, source)
            if kept.live or kept.version != version_of(buffer):
                targets.append(kept.copy)
                sources.append(source)
                kept.version = version_of(buffer)
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)

    @torch.no_grad()
    def restore(self, roots: Sequence[nn.Module] | None = None) -> None:
        """Write the remembered values back into the very same buffers; waits for the device.

        Only what changed is written: a buffer may be part of another graph that is still to be used,
        or lie in memory that cannot be written. A large one that the model was never seen to write is
        left alone unless its version moved, since its copy may be old.

        Args:
            roots: write into buffers inside these modules only, and put copies in the place of others,
                because a graph that is still to be used may hold those; None writes into all.
        """
        inside = None if roots is None else {id(module) for root in roots for module in root.modules()}
        for _, module, name in self._owners:
            kept = self._kept.get((id(module), name))
            if kept is None:
                continue
            if inside is not None and id(module) not in inside:
                _replace(kept, module, name)
                continue
            if module._buffers.get(name) is not kept.buffer:
                module._buffers[name] = kept.buffer
            _write_back(kept, module, name)
        for module, name in self._absent:
            if name in module._buffers:
                module._buffers[name] = None
        for module in self._unborn:  # lazy normalisation layers: their statistics came with this forward pass
            reset = getattr(module, "reset_running_stats", None)
            if reset is not None:
                reset()

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Write values of the same shape and dtype into the buffers of these names; waits for the device."""
        for label, module, name in self._owners:
            buffer = module._buffers.get(name)
            if buffer is None or label not in values:
                continue
            if stored(buffer).is_inference():  # such a tensor is never written, only replaced
                module._buffers[name] = values[label].to(buffer.device, copy=True)
            else:
                stored(buffer).copy_(values[label])

    @torch.no_grad()
    def restore_where(self, condemned: Tensor, roots: Sequence[nn.Module] | None = None) -> None:
        """Write the remembered values back if `condemned` (0-dim bool, on the device) is true; no wait.

        Args:
            condemned: whether the step is dropped.
            roots: leave buffers outside of these modules alone; None writes into all.
        """
        inside = None if roots is None else {id(module) for root in roots for module in root.modules()}
        for _, module, name in self._owners:
            kept, buffer = self._kept.get((id(module), name)), module._buffers.get(name)
            if kept is None or buffer is None or (inside is not None and id(module) not in inside):
                continue
            if buffer is kept.buffer and not kept.live and kept.version == version_of(buffer):
                continue
            target = stored(buffer)
            if target.shape == kept.copy.shape and target.dtype == kept.copy.dtype:
                target.copy_(torch.where(condemned.to(target.device), kept.copy, target))

    def find(self) -> None:
        """Look which modules and buffers there are; new ones are remembered at the next capture."""
        self._owners.clear()
        self.generation += 1
        seen: set[int] = set()
        for prefix, root in self._modules:
            for path, module in root.named_modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                stem = plain_name(".".join(part for part in (prefix, path) if part))
                for name in module._buffers:
                    self._owners.append((f"{stem}.{name}" if stem else name, module, name))


def _write_back(kept: _Kept, module: nn.Module, name: str) -> None:
    if _is_as_before(kept):
        return
    target = stored(kept.buffer)
    if target.is_inference():  # such a tensor is never written, only replaced
        kept.buffer = kept.copy.clone()
        module._buffers[name] = kept.buffer
    else:
        target.copy_(kept.copy)
    kept.version = version_of(kept.buffer)


def _replace(kept: _Kept, module: nn.Module, name: str) -> None:
    buffer = module._buffers.get(name)
    if buffer is kept.buffer and _is_as_before(kept):
        return
    kept.buffer = kept.copy.clone()
    module._buffers[name] = kept.buffer
    kept.version = version_of(kept.buffer)


def _is_as_before(kept: _Kept) -> bool:
    """True if the buffer holds what was remembered; NaN equals nothing, so it does not."""
    if not kept.live and kept.version == version_of(kept.buffer):
        return True
    target = stored(kept.buffer)
    return target.layout is torch.strided and torch.equal(target, kept.copy)


def version_of(tensor: Tensor) -> int:
    """Return a tensor's version counter; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(named: Iterable[tuple[str, Tensor]]) -> list[tuple[Tensor, int]]:
    """Return how often each parameter was written to; lazy ones get their values in the forward pass."""
    return [(parameter, version_of(parameter)) for _, parameter in named if not is_lazy(parameter)]


class _Kept:
    """One buffer object, its copy, and the version the copy was made at."""

    __slots__ = ("buffer", "copy", "live", "version")

    def __init__(self, buffer: Tensor, copy: Tensor, version: int) -> None:
        self.buffer = buffer
        self.copy = copy
        self.version = version
        self.live = copy.numel() * copy.element_size() <= _SMALL or buffer.is_inference()

    def fits(self, buffer: Tensor, source: Tensor) -> bool:
        """Return True if the copy can take the buffer's values: the same object, shape, dtype, device."""
        return (
            buffer is self.buffer
            and source.shape == self.copy.shape
            and source.dtype == self.copy.dtype
            and source.device == self.copy.device
        )
