"""Ascend NPUs, through torch_npu; written to its sources (2.13.0) and tried on the simulated device only.

Where a tensor lies on an NPU, torch_npu is loaded; it is never imported here, so that an installation
without CANN, whose import fails, is none of our business.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from gradsentinel.devices.device import Device
from gradsentinel.devices.health import HealthSource

ONE_LAUNCH = frozenset(
    {
        "aten::_foreach_norm.Scalar",
        "aten::_foreach_mul_.Scalar",
        "aten::_foreach_mul_.ScalarList",
        "aten::_foreach_copy_",
        "aten::_amp_foreach_non_finite_check_and_unscale_",
    }
)
"""Operators on lists of tensors that GradSentinel counts on being one kernel (or one for every 24 tensors).
Source: the kernels that torch_npu 2.13.0 registers. `_foreach_mul_.Tensor`, with which torch clips, is not
among them: it becomes one launch for each tensor."""

_UNSCALED = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What `_amp_foreach_non_finite_check_and_unscale_` takes."""
_ND = 2
_PLAIN = frozenset({0, _ND})
"""Numbers of the plain tensor formats: NCHW and ND."""
_FLAG_SIZE = 8
"""Elements of the tensor that the flag is read into; the first one tells."""


class Npu(Device):
    """An Ascend device: in INF/NAN mode (A2, A3), or saturating (Atlas training series, 910A)."""

    wide = torch.float32
    takes_host_factors = True

    @property
    def saturates(self) -> bool:
        """True if the device is in saturation mode; torch_npu is asked, or the device itself."""
        if self._torch_npu is None:
            return self._saturates
        return not self._torch_npu.npu.utils.is_support_inf_nan()

    def overflow_flag(self) -> Tensor | None:
        """Return whether the device has overflowed since its flag was cleared; None in INF/NAN mode."""
        npu = self._flagged
        if npu is None:
            return None
        # Releases differ in which of the two the flag is written to.
        given = torch.zeros(_FLAG_SIZE, device=self.device)
        returned = npu.npu_get_float_status(given)
        flag: Tensor = torch.maximum(given, returned)[0] != 0
        return flag

    def clear_overflow_flag(self) -> None:
        """Forget overflows up to now."""
        npu = self._flagged
        if npu is not None:
            npu.npu_clear_float_status(torch.zeros(_FLAG_SIZE, device=self.device))

    def scale_(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply by a number that only the device knows: what unscales gradients does it in one kernel.

        On a saturating device that one reads and clears the overflow flag, so there it is one launch for
        each tensor.
        """
        tensors = list(tensors)
        if tensors[0].dtype not in _UNSCALED or self.saturates:
            torch._foreach_mul_(tensors, factor)
            return
        unread = torch.zeros(1, device=self.device)
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, unread, factor.to(torch.float32).reshape(1))

    def in_plain_format(self, values: Tensor) -> Tensor:
        """Return the values in a plain format: the device may keep them in blocks, padded (NZ, 5HD)."""
        npu = self._torch_npu
        if npu is None or npu.get_npu_format(values) in _PLAIN:
            return values
        plain: Tensor = npu.npu_format_cast(values, _ND)
        return plain

    def health_source(self) -> HealthSource | None:
        """Return what `npu-smi` says of the card."""
        from gradsentinel.devices.npu_smi import NpuSmi  # noqa: PLC0415 - only where it is needed

        return NpuSmi(self.device.index or 0)

    def settings(self) -> dict[str, Any]:
        """Return whether matrix products and convolutions may use HF32, and what becomes of an overflow."""
        found: dict[str, Any] = {}
        for kind in ("matmul", "conv"):
            with suppress(Exception):  # older releases have no such setting
                found[f"{kind}_allow_hf32"] = bool(getattr(self.module, kind).allow_hf32)
        with suppress(Exception):  # likewise
            if self._torch_npu is not None:
                found["inf_nan_mode"] = bool(self._torch_npu.npu.utils.is_support_inf_nan())
        return found

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return an mstx range, on the host and on the current stream."""
        tool = getattr(self.module, "mstx", None)
        return super().mark(name) if tool is None else _range(tool, name, self.current_stream())

    @property
    def _torch_npu(self) -> Any:
        return sys.modules.get("torch_npu")

    @property
    def _flagged(self) -> Any:
        """torch_npu where there is a flag; in INF/NAN mode asking for it raises."""
        return self._torch_npu if self._torch_npu is not None and self.saturates else None


@contextmanager
def _range(tool: Any, name: str, stream: Any) -> Iterator[None]:
    number = tool.range_start(name, stream)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        tool.range_end(number)
