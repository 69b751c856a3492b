"""What a device itself can tell of an overflow: its flag, and whether it makes an infinity of one at all.

Ascend devices without INF/NAN mode saturate: an overflow becomes the largest finite value and NaN becomes
0, so that no look at values finds it for certain. A flag of the device remembers that it happened.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def overflow_flag(device: torch.device) -> Tensor | None:
    """Return whether the device has overflowed since its flag was cleared, 0-dim bool there; no wait.

    None if the device has no such flag: it makes infinities, which anybody can see.
    """
    npu = _saturating_npu(device)
    if npu is None:
        return None
    status = npu.npu_get_float_status(torch.zeros(8, device=device))
    flag: Tensor = status[0] != 0
    return flag


def clear_overflow_flag(device: torch.device) -> None:
    """Forget overflows up to now; no wait."""
    npu = _saturating_npu(device)
    if npu is not None:
        npu.npu_clear_float_status(torch.zeros(8, device=device))


@torch.no_grad()
def saturates(device: torch.device) -> bool:
    """Return True if an overflow in float16 stays finite on this device; waits for it, so ask once."""
    largest = torch.full((1,), torch.finfo(torch.float16).max, dtype=torch.float16, device=device)
    return bool(torch.isfinite(largest + largest).all())


def _saturating_npu(device: torch.device) -> Any:
    """Return torch_npu if the device is an NPU without INF/NAN mode; where its flag exists, it is loaded."""
    npu = sys.modules.get("torch_npu") if device.type == "npu" else None
    return None if npu is None or npu.npu.utils.is_support_inf_nan() else npu
