"""NVIDIA and AMD GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gradsentinel.devices.device import Device
from gradsentinel.devices.health import HealthSource


class Cuda(Device):
    """A GPU as torch.cuda drives it."""

    saturates = False

    def health_source(self) -> HealthSource | None:
        """Return NVML's view of the card."""
        from gradsentinel.devices.nvml import Nvml  # noqa: PLC0415 - only where it is needed

        return Nvml(self.device.index or 0)

    def settings(self) -> dict[str, Any]:
        """Return what matrix products and convolutions are allowed, by `matmul` and `cudnn`."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        found: dict[str, dict[str, Any]] = {"cudnn": {}, "matmul": {}}
        for name in ("version", "deterministic", "benchmark", "allow_tf32"):
            found["cudnn"][name] = _asked(cudnn, name)
        for name in _MATMUL:
            found["matmul"][name] = _asked(matmul, name)
        return found

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return an NVTX range, which torch's own profiler shows, too."""
        return _range(name)


_MATMUL = (
    "allow_tf32",
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
)


def _asked(owner: Any, name: str) -> Any:
    """Return a setting; None from a build that has none, or mixes two ways of setting it."""
    try:
        value = getattr(owner, name)
        return value() if callable(value) else value
    except Exception:  # noqa: BLE001 - torch raises what it likes for a setting it lacks; None is on record
        return None


@contextmanager
def _range(name: str) -> Iterator[None]:
    nvtx: Any = torch.cuda.nvtx  # without types
    nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        nvtx.range_pop()
