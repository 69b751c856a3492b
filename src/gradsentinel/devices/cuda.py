"""NVIDIA and AMD GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import torch

from gradsentinel.devices.device import Device, Switch


class Cuda(Device):
    """A GPU as torch.cuda drives it."""

    saturates = False
    switches: ClassVar[tuple[Switch, ...]] = (
        Switch(
            variable="CUBLAS_WORKSPACE_CONFIG",
            values=(":4096:8", ":16:8"),
            cost="set before the first matrix product; takes some MiB more, or is slower with :16:8",
        ),
    )

    def settings(self) -> dict[str, Any]:
        """Return the precision that matrix products and convolutions are allowed."""
        return {
            "matmul_allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_allow_tf32": torch.backends.cudnn.allow_tf32,
        }

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return an NVTX range, which torch's own profiler shows, too."""
        return _range(name)


@contextmanager
def _range(name: str) -> Iterator[None]:
    nvtx: Any = torch.cuda.nvtx  # without types
    nvtx.range_push(name)
    try:
        with torch.profiler.record_function(name):
            yield
    finally:
        nvtx.range_pop()
