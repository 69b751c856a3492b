"""What stands in a skeleton of `gradsentinel.state.tree`, made into values again without running any code."""

import base64
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

Json: TypeAlias = Any
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def decode(encoded: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return what a part of a skeleton stands for; whatever it raises says that it is damaged."""
    if isinstance(encoded, list):
        return [decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if not (tag := next(iter(encoded), "")).startswith("$"):
        return {key: decode(item, tensors) for key, item in encoded.items()}
    return _DECODERS[tag](encoded[tag], encoded, tensors)


def _decode_tensor(name: str, more: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> Tensor:
    if "dtype" not in more:
        return tensors[name]
    dtype = DTYPES[more["dtype"]]
    if not dtype.is_complex:
        return tensors[name].view(dtype)
    pairs = tensors[name]
    # In a file that is mapped a pair may begin at an odd place, of which no complex number can be a view.
    return torch.view_as_complex(pairs.clone() if pairs.storage_offset() % 2 else pairs)


def _decode_sparse(parts: Json, more: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> Tensor:
    indices, values = decode(parts, tensors)
    tensor = torch.sparse_coo_tensor(indices, values, more["size"], check_invariants=True)
    return tensor._coalesced_(more["coalesced"])


def _decode_numpy(payload: Json, more: Mapping[str, Json], tensors: Mapping[str, Tensor]) -> Any:
    value = decode(payload, tensors)
    try:
        import numpy as np  # noqa: PLC0415  optional
    except ImportError:
        if not isinstance(value, bytes):
            return value
        raise ValueError("the state holds NumPy values that need NumPy to be read") from None
    if isinstance(value, Tensor):
        return value.cpu().numpy()
    dtype = np.lib.format.descr_to_dtype(decode(more["dtype"], tensors))
    if not isinstance(value, bytes):
        return dtype.type(value)
    shape = more.get("shape", ())
    array = np.frombuffer(value, dtype).reshape(shape).copy() if value else np.zeros(shape, dtype)
    return array if "shape" in more else array[()]


# Each takes the tag's payload, the whole object and the tensors.
_DECODERS: dict[str, Callable[[Any, Mapping[str, Json], Mapping[str, Tensor]], Any]] = {
    "$int": lambda text, _, __: int(text, 16),
    "$float": lambda parts, _, __: struct.unpack(">d", bytes.fromhex(parts[1]))[0],
    "$complex": lambda parts, _, tensors: complex(*decode(parts, tensors)),
    "$str": lambda text, _, __: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "$bytes": lambda text, _, __: base64.b64decode(text, validate=True),
    "$dtype": lambda name, _, __: DTYPES[name],
    "$device": lambda name, _, __: torch.device(name),
    "$size": lambda size, _, __: torch.Size(size),
    "$path": lambda text, _, tensors: Path(decode(text, tensors)),
    "$dict": lambda pairs, _, tensors: {decode(k, tensors): decode(v, tensors) for k, v in pairs},
    "$tuple": lambda items, _, tensors: tuple(decode(items, tensors)),
    "$set": lambda items, _, tensors: set(decode(items, tensors)),
    "$frozenset": lambda items, _, tensors: frozenset(decode(items, tensors)),
    "$tensor": _decode_tensor,
    "$sparse": _decode_sparse,
    "$numpy": _decode_numpy,
}
