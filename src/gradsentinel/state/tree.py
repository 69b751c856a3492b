"""Nested states as flat tensors plus JSON, and walks over nested structures.

A state flattens into named tensors, which any safetensors file can hold, and a *skeleton*: the same nest as
plain JSON, in which whatever JSON has no word for is an object with a ``$`` tag, such as
``{"$tensor": "optimizer.state.3.exp_avg"}``. Nothing is pickled, and no skeleton makes its reader run code.
"""

import base64
import copy
import dataclasses
import enum
import math
import struct
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradsentinel.state.decoding import DTYPES, Json, decode

_Path: TypeAlias = tuple[Any, ...]
_NATIVE = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
NATIVE_DTYPES = tuple(DTYPES[f"torch.{name}"] for name in _NATIVE.split())
"""What every supported safetensors version stores as it is; others travel as a view of equal width."""
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_DEPTH = 100
_LONG = 2**64
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_is_wrapper: Callable[[Tensor], bool] = is_traceable_wrapper_subclass
_Keep = Callable[[Tensor], Tensor]
_Children = Callable[[Any], list[tuple[Any, Any]]]
_CANNOT_COPY = (TypeError, ValueError, AttributeError, LookupError, NotImplementedError, copy.Error)


class UnsupportedStateError(TypeError):
    """A state holds something that cannot be stored without pickle; the message names where it sits."""


def flatten(state: Any, prefix: str = "", *, copy_views: bool = True) -> tuple[dict[str, Tensor], Json]:
    """Split a nested state into named tensors, contiguous and of dtypes in `NATIVE_DTYPES`, and a skeleton.

    Dicts (in their order), lists, tuples, sets, numbers, strings, bytes, paths, tensors, dtypes, devices,
    NumPy arrays and scalars come back exactly. Subclasses come back as their base: a named tuple as a tuple,
    an OrderedDict or another mapping as a dict, a Parameter as a tensor without ``requires_grad``. Strides
    are not kept. A tensor that occurs twice is stored once and comes back as one.

    Args:
        state: the nest.
        prefix: goes before the tensors' names, and before the path in an error.
        copy_views: copy the tensors that are part of a larger memory or share it, so that each one returned
            owns its memory, as ``safetensors.torch.save_file`` demands. Others are not copied.

    Raises:
        UnsupportedStateError: for anything else, cycles included.
    """
    encoder = _Encoder(copy_views=copy_views)
    skeleton = encoder.encode(state, (prefix,) if prefix else ())
    return encoder.tensors, skeleton


def unflatten(tensors: Mapping[str, Tensor], skeleton: Json) -> Any:
    """Rebuild the state that `flatten` took apart.

    The tensors are used as they are, on the device they are on. Where NumPy is not installed, its arrays come
    back as tensors and its scalars as Python numbers.

    Raises:
        ValueError: the skeleton is damaged, or names a tensor that is not there.
    """
    try:
        return decode(skeleton, tensors)
    except (TypeError, AttributeError, LookupError, RuntimeError, OverflowError, struct.error) as error:
        raise ValueError(f"the skeleton of the state is damaged: {error!r}") from error


def format_path(path: Sequence[Any]) -> str:
    """Write keys, indices and field names as one would in Python: ``optimizer.state[3].foo``."""
    text = ""
    for step in path:
        if isinstance(step, str) and (not text or step.isidentifier()):
            text += f".{step}" if text else step
        else:
            text += f"[{step!r}]"
    return text


def _refuse(value: Any, path: _Path, hint: str = "give tensors, numbers, strings, lists, dicts") -> NoReturn:
    where = format_path(path) or "the state"
    name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise UnsupportedStateError(f"{where}: object of type {name} cannot be stored; {hint}")


class _Encoder:
    def __init__(self, *, copy_views: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._copy_views = copy_views
        self._storages: set[int] = set()
        self._stored: dict[Any, tuple[Tensor, Json]] = {}  # holds on to the tensors: the key is their address
        self._open: set[int] = set()  # the containers around the current value

    def encode(self, value: Any, path: _Path) -> Json:
        kind = type(value)  # what nearly everything is comes first: the training runs meanwhile
        if (leaf := _LEAVES.get(kind)) is not None:
            return leaf(value)
        if kind is Tensor:
            return self._tensor(value, path)
        if kind is not dict and kind is not list:
            numpy = sys.modules.get("numpy")
            if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
                return self._numpy(numpy, value, path)
            if isinstance(value, enum.Enum):
                _refuse(value, path, "give its value")
            if (base := next((base for base in kind.__mro__ if base in _LEAVES), None)) is not None:
                return _LEAVES[base](value)
            if isinstance(value, Tensor):
                return self._tensor(value, path)
            if not isinstance(value, Mapping | list | tuple | set | frozenset):
                _refuse(value, path)
        if id(value) in self._open or len(path) > _MAX_DEPTH:
            _refuse(value, path, "it contains itself or is nested too deeply")
        self._open.add(id(value))
        encoded = self._container(value, path)
        self._open.discard(id(value))
        return encoded

    def _container(self, value: Any, path: _Path) -> Json:
        if isinstance(value, Mapping):
            items = [[self._key(k, at := (*path, k)), self.encode(v, at)] for k, v in value.items()]
            is_plain = all(isinstance(key, str) and not key.startswith("$") for key, _ in items)
            return dict(items) if is_plain else {"$dict": items}
        if isinstance(value, set | frozenset):
            items = [self._key(item, (*path, item)) for item in sorted(value, key=repr)]
            return {"$set" if isinstance(value, set) else "$frozenset": items}
        # Long ones are of plain numbers: the state of Python's generator has 625.
        encoded: list[Json] = [
            item if type(item) is int and abs(item) < _LONG else self.encode(item, (*path, index))
            for index, item in enumerate(value)
        ]
        return encoded if isinstance(value, list) else {"$tuple": encoded}

    def _key(self, value: Any, path: _Path) -> Json:
        if type(value) is str:
            return _encode_str(value)
        encoded = (encoder := _Encoder(copy_views=False)).encode(value, path)
        if encoder.tensors:
            _refuse(value, path, "tensors and arrays can be neither keys nor members of sets")
        return encoded

    def _tensor(self, tensor: Tensor, path: _Path) -> Json:
        is_odd = tensor.is_meta or tensor.is_quantized or tensor.is_nested
        if type(tensor) is not Tensor or tensor.requires_grad:
            is_odd = is_odd or _is_wrapper(tensor) or is_lazy(tensor)
            tensor = tensor if is_odd else tensor.detach()
        if is_odd:
            _refuse(tensor, path, "give a plain tensor with data (of a DTensor, its to_local())")
        if tensor.layout == torch.sparse_coo:
            parts = enumerate((tensor._indices(), tensor._values()))
            encoded = [self._tensor(part, (*path, index)) for index, part in parts]
            return {"$sparse": encoded, "size": list(tensor.shape), "coalesced": tensor.is_coalesced()}
        if tensor.layout != torch.strided:
            _refuse(tensor, path, "give a dense or sparse COO tensor")
        if type(tensor) is not Tensor:
            tensor = tensor.as_subclass(Tensor)
        if (key := _alias_key(tensor)) not in self._stored:
            self._stored[key] = (tensor, self._dense(tensor, path))
        return self._stored[key][1]

    def _dense(self, tensor: Tensor, path: _Path) -> Json:
        dtype, carrier = tensor.dtype, tensor.resolve_conj().resolve_neg()
        if dtype.is_complex:
            carrier = torch.view_as_real(carrier)
        elif dtype not in NATIVE_DTYPES:
            try:
                carrier = carrier.view(_SAME_WIDTH[dtype.itemsize])
            except (LookupError, RuntimeError):
                _refuse(tensor, path, f"its dtype {dtype} is not supported")
        carrier = carrier.contiguous()
        if self._copy_views and carrier.numel():
            storage = carrier.untyped_storage()
            is_view = storage.nbytes() != carrier.nbytes or storage.data_ptr() in self._storages
            carrier = carrier.clone() if is_view else carrier
            self._storages.add(carrier.untyped_storage().data_ptr())
        base = ".".join(map(str, path)) or "tensor"
        base = base if base.isascii() else base.encode("utf-8", "backslashreplace").decode()
        name, count = base, 1
        while name in self.tensors or name == "__metadata__":  # reserved by safetensors
            count += 1
            name = f"{base}#{count}"
        self.tensors[name] = carrier
        return {"$tensor": name} if carrier.dtype == dtype else {"$tensor": name, "dtype": str(dtype)}

    def _numpy(self, numpy: Any, value: Any, path: _Path) -> Json:
        descr = numpy.lib.format.dtype_to_descr(value.dtype)
        is_exact = numpy.lib.format.descr_to_dtype(descr) == value.dtype and not value.dtype.hasobject
        is_scalar = isinstance(value, numpy.generic)
        if not is_exact or not (is_scalar or type(value) in (numpy.ndarray, numpy.memmap)):
            _refuse(value, path, "give a plain array of numbers")  # masked arrays and matrices are more
        width = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}.get(value.dtype.kind, 0)
        payload: Any = value.tobytes()
        if value.dtype.isnative and value.dtype.itemsize <= width:
            payload = value.item() if is_scalar else torch.from_numpy(numpy.array(value, order="C"))
        encoded = {"$numpy": self.encode(payload, path), "dtype": self.encode(descr, path)}
        return encoded if is_scalar else {**encoded, "shape": list(value.shape)}


def _alias_key(tensor: Tensor) -> Any:
    """Two tensors of equal key are the same elements of the same memory."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided or not tensor.numel() or tensor.is_meta:
        return object()
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    return (*place, tensor.is_conj(), tensor.is_neg())


def _encode_float(value: float) -> Json:
    if math.isfinite(value):
        return float(value)
    return {"$float": [str(float(value)), struct.pack(">d", value).hex()]}  # to be read; with its bits


def _encode_str(value: str) -> Json:
    if value.isascii():
        return str.__str__(value)
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, which JSON would join into one character
        return {"$str": value.encode("utf-8", "surrogatepass").hex()}
    return str.__str__(value)


_LEAVES: dict[type, Callable[[Any], Json]] = {
    type(None): lambda _: None,
    bool: bool,
    # Python limits the digits of decimal numbers, not of hexadecimal ones.
    int: lambda value: int(value) if abs(value) < _LONG else {"$int": hex(value)},
    float: _encode_float,
    complex: lambda value: {"$complex": [_encode_float(value.real), _encode_float(value.imag)]},
    str: _encode_str,
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
    torch.dtype: lambda value: {"$dtype": str(value)},
    torch.device: lambda value: {"$device": str(value)},
    torch.Size: lambda value: {"$size": list(value)},
    PurePath: lambda value: {"$path": _encode_str(str(value))},
}


def tensors_in(
    obj: Any, *, max_depth: int = 32, children: _Children | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every tensor in mappings, sequences, sets and dataclasses.

    Anything with ``keys()`` and ``[]`` counts as a mapping. A container is entered once, however often it
    occurs (cycles are fine), and what lies deeper than ``max_depth`` containers is left out. ``children``
    says what is in a container in place of `children_of`.
    """
    found = paths_in(obj, max_depth=max_depth, children=children)
    return ((format_path(path), tensor) for path, tensor in found)


def paths_in(
    obj: Any, *, max_depth: int = 32, children: _Children | None = None
) -> Iterator[tuple[Sequence[Any], Tensor]]:
    """Yield the same tensors with the keys and indices that lead to them, which takes less."""
    inside = children or children_of
    entered: dict[int, Any] = {}  # holds on to the objects, so that no other gets their id
    waiting: list[tuple[_Path, Any]] = [((), obj)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            yield path, value
        elif len(path) < max_depth and not isinstance(value, _ATOMS) and id(value) not in entered:
            entered[id(value)] = value
            waiting += [((*path, step), child) for step, child in reversed(inside(value))]


def children_of(obj: Any) -> list[tuple[Any, Any]]:
    """Return what a container holds, with the keys, indices and names; nothing of what is none."""
    if isinstance(obj, torch.nn.Module | type):
        return []
    if isinstance(obj, Mapping):
        return list(obj.items())
    if dataclasses.is_dataclass(obj):
        return [(f.name, getattr(obj, f.name)) for f in dataclasses.fields(obj) if hasattr(obj, f.name)]
    if callable(getattr(type(obj), "keys", None)) and hasattr(obj, "__getitem__"):
        return [(key, obj[key]) for key in obj.keys()]  # noqa: SIM118  it may iterate over something else
    known = isinstance(obj, list | tuple | UserList | deque | set | frozenset)  # a named tuple has names
    return list(zip(getattr(obj, "_fields", range(len(obj))), obj, strict=True)) if known else []


def map_tensors(fn: Callable[[Tensor], Any], obj: Any) -> Any:
    """Return a copy of a nested structure in which each tensor is replaced by ``fn(tensor)``.

    Containers keep their type: dicts, lists, tuples, named tuples, deques, sets, dataclasses, and other
    mappings where they can be built anew (else they become a dict). Other values are the same objects as
    before. A tensor or container that occurs twice is mapped once; cycles are fine.
    """
    return _Mapper(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf).map(obj)


def clone_tree(state: Any, device: torch.device | str | None = None, keep: _Keep | None = None) -> Any:
    """Return a deep copy of a nested state: later changes to one are not seen by the other.

    Tensors become detached clones, moved to ``device`` if given, or what ``keep`` returns; what was the same
    memory stays one tensor. Containers are copied as by `map_tensors`, other values deeply where they can be.
    """
    clones: dict[Any, tuple[Tensor, Tensor]] = {}
    keep = keep or (lambda leaf: leaf.clone() if device is None else leaf.to(device, copy=True))

    def clone(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and not is_lazy(leaf):
            key = _alias_key(leaf := leaf.detach())
            if key not in clones:
                clones[key] = (leaf, keep(leaf))
            return clones[key][1]
        return leaf if isinstance(leaf, torch.nn.Module) else _built(copy.deepcopy, leaf, lambda same: same)

    return _Mapper(clone).map(state)


class _Mapper:
    def __init__(self, leaf: Callable[[Any], Any]) -> None:
        self._leaf = leaf
        self._done: dict[int, tuple[Any, Any]] = {}  # id: (the old object, kept for its id; the new one)

    def map(self, obj: Any) -> Any:
        if isinstance(obj, _ATOMS):
            return obj
        if id(obj) not in self._done:
            self._done[id(obj)] = (obj, self._rebuild(obj))
        return self._done[id(obj)][1]

    def _rebuild(self, obj: Any) -> Any:
        if isinstance(obj, dict | UserDict):
            return self._refilled(obj, dict, list(obj))
        if isinstance(obj, list | UserList | deque):
            return self._refilled(obj, list, range(len(obj)))
        if isinstance(obj, Mapping):  # its shallow copy might share the items: build it anew
            return _built(type(obj), {key: self.map(item) for key, item in obj.items()}, dict)
        if isinstance(obj, tuple | set | frozenset):
            items = [self.map(item) for item in obj]
            make = getattr(obj, "_make", type(obj))  # named tuples take their fields one by one
            return _built(make, items, tuple if isinstance(obj, tuple) else set)
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type | torch.nn.Module):
            new = _built(copy.copy, obj, lambda same: same)
            self._done[id(obj)] = (obj, new)
            for name, value in children_of(obj) if new is not obj else ():
                object.__setattr__(new, name, self.map(value))
            return new
        return self._leaf(obj)

    def _refilled(self, obj: Any, fallback: type, keys: Sequence[Any]) -> Any:
        new = _built(copy.copy, obj, fallback)
        self._done[id(obj)] = (obj, new)  # before it is filled: it may contain itself
        for key in keys:
            new[key] = self.map(obj[key])
        return new


def _built(kind: Callable[[Any], Any], items: Any, fallback: Callable[[Any], Any]) -> Any:
    try:
        return kind(items)
    except _CANNOT_COPY:
        return fallback(items)
