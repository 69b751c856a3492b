"""An operator call as an archive holds it: tensors and plain values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradsentinel.diagnosis.operator import CannotRun, Expected, OperatorCall

OPERATOR_KIND = "operator"
VIEW, NAMED = "gradsentinel:view", "gradsentinel:torch"
"""Marks of a tensor that is no contiguous one, and of a name in torch, in the stored arguments."""
_NAMED = (torch.layout, torch.memory_format)


def call_to_tree(call: OperatorCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return state and meta for an archive; tensors are copied to the CPU.

    Raises:
        CannotRun: if an argument cannot be stored.
    """
    state = {
        "args": [encode(value) for value in call.args],
        "kwargs": {name: encode(value) for name, value in call.kwargs.items()},
    }
    expected = call.expected
    meta = {
        "operator": call.name,
        "device": call.device,
        "expected": None
        if expected is None
        else {"output": expected.output, "index": list(expected.index), "nan": expected.nan},
        "reproduced": call.reproduced,
        "cut": call.cut,
        "modules": list(call.modules),
        "script": call.script,
        "libraries": list(call.libraries),
    }
    return state, meta


def call_from_tree(
    state: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> OperatorCall:
    """Rebuild the call, on a device and, if a dtype is given, with its floating tensors in that one.

    Raises:
        CannotRun: if it is not what `call_to_tree` returned.
    """
    try:
        expected = meta["expected"]
        return OperatorCall(
            name=str(meta["operator"]),
            args=tuple(_decode(value, device, dtype) for value in state["args"]),
            kwargs={str(name): _decode(value, device, dtype) for name, value in state["kwargs"].items()},
            device=str(device),
            expected=None
            if expected is None
            else Expected(
                int(expected["output"]), tuple(int(i) for i in expected["index"]), bool(expected["nan"])
            ),
            reproduced=None if meta["reproduced"] is None else bool(meta["reproduced"]),
            cut=str(meta["cut"]),
            modules=tuple(map(str, meta["modules"])),
            script=str(meta.get("script", "")),
            libraries=tuple(map(str, meta["libraries"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CannotRun(f"the stored operator is damaged: {error!r}") from error


def encode(value: Any) -> Any:
    """Return an argument as an archive takes it; tensors are copied to the CPU."""
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if isinstance(value, _NAMED):
        return {NAMED: str(value).removeprefix("torch.")}
    if isinstance(value, torch.Generator):
        return None  # its draws are not repeated; the default generator takes its place
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [encode(item) for item in value]
    return value


def _encode_tensor(tensor: Tensor) -> Any:
    """Keep the order of dimensions in memory, which some kernels depend on, and repeated elements once."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return tensor.to("cpu", copy=True)
    whole = list(tensor.shape)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    kept = tensor.permute(order).contiguous().to("cpu", copy=True)
    moved = back if order != list(range(tensor.dim())) else None
    expanded = whole if whole != list(tensor.shape) else None
    return kept if moved is None and expanded is None else {VIEW: [kept, moved, expanded]}


def _decode(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        moved = value.to(device)
        return moved.to(dtype) if dtype is not None and moved.is_floating_point() else moved
    if isinstance(value, torch.device):
        return device
    if isinstance(value, torch.dtype):
        return dtype if dtype is not None and value.is_floating_point else value
    if isinstance(value, dict):
        return _decode_marked(value, device, dtype)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return [_decode(item, device, dtype) for item in value]
    return value


def _decode_marked(value: dict[str, Any], device: torch.device, dtype: torch.dtype | None) -> Any:
    if VIEW in value:
        kept, moved, expanded = value[VIEW]
        tensor = _decode(kept, device, dtype)
        tensor = tensor if moved is None else tensor.permute(moved)
        return tensor if expanded is None else tensor.expand(expanded)
    found = getattr(torch, value[NAMED])
    if not isinstance(found, _NAMED):
        raise TypeError(f"torch.{value[NAMED]} is no layout")
    return found
