"""What a reader elsewhere wants to know of a process: versions, devices, settings that change results."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch

from gradsentinel._version import __version__
from gradsentinel.devices import device_of

_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "FLASH_ATTENTION_DETERMINISTIC",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "PYTHONHASHSEED",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NPU_ALLOC_CONF",
    "INF_NAN_MODE_ENABLE",
    "INF_NAN_MODE_FORCE_DISABLE",
    "COMBINED_ENABLE",
    "TASK_QUEUE_ENABLE",
    "LCCL_DETERMINISTIC",
    "CLOSE_MATMUL_K_SHIFT",
    "NPU_ASD_CONFIG",
    "TORCH_NPU_LOGS",
    "GRADSENTINEL_BUFFERS",
    "GRADSENTINEL_DETERMINISTIC_REPLAY",
    "GRADSENTINEL_MARKS",
    "GRADSENTINEL_TOPOLOGY",
)
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "HCCL_", "ASCEND_", "GLOO_", "ATB_")


def environment() -> dict[str, Any]:
    """Return versions, devices and settings as JSON; starts no device that the program does not use."""
    return {
        "schema": 1,
        "gradsentinel": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "flush_denormal": _flushes_denormals(),
        **device_of("cuda").settings(),
        "cuda": torch.version.cuda,
        "devices": _devices("cuda"),
        "npu": _npu(),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _NAMES or name.startswith(_PREFIXES)
        },
    }


def _npu() -> dict[str, Any] | None:
    """What is known of Ascend devices; None where torch_npu is not loaded."""
    if getattr(torch, "npu", None) is None:
        return None
    versions = {
        name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch_npu", "mindspeed")
    }
    cann = _quietly(lambda: getattr(torch.version, "cann", None))
    found = {**{k: v for k, v in versions.items() if v}, "cann": cann, "devices": _devices("npu")}
    return {**found, **device_of("npu").settings()}


def _devices(kind: str) -> list[str]:
    """Names of the devices of a kind that this process uses already; a look must not start one."""
    backend = getattr(torch, kind, None)
    if backend is None or not _quietly(backend.is_initialized):
        return []
    count = _quietly(backend.device_count)
    return [str(_quietly(lambda i=i: backend.get_device_name(i))) for i in range(count or 0)]


def _flushes_denormals() -> bool:
    tiny = torch.tensor([torch.finfo(torch.float32).tiny])
    return bool((tiny / 2 == 0).all())


def _quietly(question: Any) -> Any:
    """A driver that cannot answer is no reason to lose the rest."""
    try:
        return question()
    except Exception:  # noqa: BLE001 - drivers raise anything, and None in the file says that one did
        return None
