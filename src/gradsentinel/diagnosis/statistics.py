"""A step in numbers: norms and counts per parameter, ranges and fingerprints of the batch."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradsentinel.again.scene import MicroBatch
from gradsentinel.incident import jsonable
from gradsentinel.measures.inspection import inspect_tensor, local, parts_of, readable, values_of
from gradsentinel.measures.named import gradient_of
from gradsentinel.run import Run
from gradsentinel.state.tree import tensors_in

SCHEMA = 1


@torch.no_grad()
def statistics(run: Run, microbatches: Sequence[MicroBatch], *, gradients: bool = True) -> dict[str, Any]:
    """Return the numbers of the step in flight as JSON; waits for the device.

    Args:
        run: the run.
        microbatches: of the step.
        gradients: False when the present gradients are not those of the step.
    """
    return {
        "schema": SCHEMA,
        "step": run.step,
        "loss": jsonable(run.last_loss),
        "grad_norm": jsonable(run.last_grad_norm),
        "learning_rates": [
            [jsonable(_number(group.get("lr"))) for group in optimizer.param_groups]
            for optimizer in run.host.optimizers
        ],
        "parameters": [
            _parameter(name, p, gradient_of(p) if gradients else None)
            for name, p in run.host.named_parameters()
        ],
        "batch": [_batch(microbatch) for microbatch in microbatches],
        "healthy": [_batch(microbatch) for microbatch in run.scene.healthy],
    }


def _parameter(name: str, parameter: Tensor, gradient: Tensor | None) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "trainable": parameter.requires_grad}
    for key, tensor in (("", parameter), ("grad_", gradient)):
        if tensor is not None and readable(tensor) is None:
            seen = inspect_tensor(name, tensor)
            entry |= {f"{key}norm": seen.norm, f"{key}nonfinite": seen.nonfinite, f"{key}numel": seen.numel}
    found: dict[str, Any] = jsonable(entry)
    return found


def _batch(microbatch: MicroBatch) -> dict[str, Any]:
    return {
        "microbatch": microbatch.index,
        "tensors": {path or "batch": describe(tensor) for path, tensor in tensors_in(microbatch.batch)},
    }


@torch.no_grad()
def describe(tensor: Tensor) -> dict[str, Any]:
    """Return shape, dtype, range, counts and fingerprint of a tensor as JSON."""
    entry: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
    }
    if tensor.is_meta or tensor.is_quantized:
        return entry
    if readable(tensor) is None:
        values = parts_of(values_of(tensor))
        finite = values[torch.isfinite(values)].double()
        entry["nonfinite"] = values.numel() - finite.numel()
    elif tensor.layout is torch.strided and not tensor.is_nested and tensor.dtype.itemsize <= 8:
        values = local(tensor.detach())
        finite = values.double().flatten()
    else:
        return entry
    if finite.numel():
        entry |= {"min": float(finite.min()), "max": float(finite.max()), "mean": float(finite.mean())}
        entry["zeros"] = int((finite == 0).sum())
    entry["fingerprint"] = _fingerprint(values)
    found: dict[str, Any] = jsonable(entry)
    return found


def _fingerprint(values: Tensor) -> str:
    """A checksum of the very bits: two batches with the same one are the same batch."""
    held = values.detach().to("cpu").contiguous()
    size = held.numel() * held.element_size()
    data = memoryview((ctypes.c_ubyte * size).from_address(held.data_ptr())) if size else b""
    return f"{zlib.crc32(data):08x}"


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
