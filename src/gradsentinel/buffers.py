"""A copy of the model's buffers from before the step, because a bad forward pass writes to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from gradsentinel.inspection import stored

_SMALL = 1 << 20
"""Buffers up to this many bytes are copied every step."""
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
        self._find()

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the current buffers by name."""
        for label, module, name in self._owners:
            buffer = module._buffers.get(name)
            if buffer is not None:
                yield label, buffer

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers by name as they were remembered last."""
        for label, module, name in self._owners:
            kept = self._kept.get((id(module), name))
            if kept is not None:
                yield label, kept.copy

    @property
    def complete(self) -> bool:
        """False while a lazy module had no values yet when the buffers were remembered last."""
        return not self._unborn

    @torch.no_grad()
    def capture(self) -> None:
        """Remember the buffers as they are now; no wait for the device after the first steps."""
        self._unborn.clear()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for _, module, name in self._owners:
            buffer = module._buffers.get(name)
            if buffer is None or buffer.device.type == "meta":
                continue
            if torch.nn.parameter.is_lazy(buffer):
                self._unborn.append(module)
                continue
            key = (id(module), name)
            kept = self._kept.get(key)
            source = stored(buffer)
            if kept is None or not kept.fits(buffer, source):
                self._kept[key] = _Kept(buffer, source.detach().clone(), buffer._version)
                continue
            comparable = source.layout is torch.strided
            if not kept.live and self._captures <= _TRIAL_STEPS and comparable:
                kept.live = not torch.equal(kept.copy, source)
            if kept.live or kept.version != buffer._version:
                targets.append(kept.copy)
                sources.append(source)
                kept.version = buffer._version
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self._captures += 1

    @torch.no_grad()
    def restore(self) -> None:
        """Write the remembered values back into the very same buffers; no wait for the device."""
        targets: list[Tensor] = []
        copies: list[Tensor] = []
        for _, module, name in self._owners:
            kept = self._kept.get((id(module), name))
            if kept is None:
                continue
            if module._buffers.get(name) is not kept.buffer:
                module._buffers[name] = kept.buffer
            targets.append(stored(kept.buffer))
            copies.append(kept.copy)
        if targets:
            torch._foreach_copy_(targets, copies, non_blocking=True)
        for kept in self._kept.values():
            kept.version = kept.buffer._version
        for module in self._unborn:  # lazy normalisation layers: their statistics came with this forward pass
            reset = getattr(module, "reset_running_stats", None)
            if reset is not None:
                reset()

    def _find(self) -> None:
        seen: set[int] = set()
        for prefix, root in self._modules:
            for path, module in root.named_modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                stem = ".".join(part for part in (prefix, path) if part)
                for name in module._buffers:
                    self._owners.append((f"{stem}.{name}" if stem else name, module, name))


class _Kept:
    """One buffer object, its copy, and the version the copy was made at."""

    __slots__ = ("buffer", "copy", "live", "version")

    def __init__(self, buffer: Tensor, copy: Tensor, version: int) -> None:
        self.buffer = buffer
        self.copy = copy
        self.version = version
        self.live = copy.numel() * copy.element_size() <= _SMALL

    def fits(self, buffer: Tensor, source: Tensor) -> bool:
        """Return True if the copy can take the buffer's values: the same object, shape, dtype, device."""
        return (
            buffer is self.buffer
            and source.shape == self.copy.shape
            and source.dtype == self.copy.dtype
            and source.device == self.copy.device
        )
