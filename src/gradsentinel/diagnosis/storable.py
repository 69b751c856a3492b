"""A batch as it can be stored without pickle, copied at once, and back again."""

from __future__ import annotations

import copy
import dataclasses
import enum
import sys
from collections import UserList, deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gradsentinel.measures.inspection import local
from gradsentinel.state.tree import UnsupportedStateError, flatten, format_path

_MARK = "gradsentinel:"
_RECORD, _TUPLE, _GRAD, _GONE = f"{_MARK}record", f"{_MARK}tuple", f"{_MARK}requires_grad", f"{_MARK}gone"
_DEEPEST = 32
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, PurePath)
_KEYS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)
_is_wrapper: Callable[[Tensor], bool] = is_traceable_wrapper_subclass


class Record(dict[Any, Any]):
    """A record of the batch whose class is not here: its fields by key and by attribute."""

    def __getattr__(self, name: str) -> Any:
        """Return a field."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the stored record has no field {name!r}") from None


class Gone:
    """Stands where something was that could not be stored; whoever uses it learns what is missing."""

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an AttributeError that names what is missing."""
        raise AttributeError(f"{self._what} is not in the bundle: it could not be stored without pickle")

    def __repr__(self) -> str:
        return f"<not in the bundle: {self._what}>"


def to_storable(value: Any, *, name: str = "", copied: bool = False) -> tuple[Any, list[str]]:
    """Return a copy that an archive takes, its tensors on the CPU, and what had to be left out, in words.

    Records (dataclasses, named tuples, mappings of their own class) keep their fields, not their class.
    Of a distributed tensor the part of this rank is kept. Waits for the device.

    Args:
        value: the nest.
        name: goes before the places that are named.
        copied: True if its tensors are copies on the CPU already, which are then used as they are.
    """
    encoder = _Encoder(copied=copied)
    return encoder.encode(value, (name,) if name else ()), encoder.left_out


def from_stored(value: Any, device: torch.device | str | None = None) -> Any:
    """Return what `to_storable` made of a batch as the program can use it, tensors on a device.

    A record comes back as a `Record`, a named tuple as one, what was left out as a `Gone`.
    """
    if isinstance(value, Tensor):
        return value if device is None else value.to(device)
    if isinstance(value, dict):
        return _decode(value, device)
    if isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, torch.Size):
        return type(value)(from_stored(item, device) for item in value)
    return value


def nbytes(value: Any) -> int:
    """Return about how many bytes a copy of a nested value takes: tensors, arrays, texts."""
    return sum(map(_size_of, _leaves(value, set(), 0)))


def _leaves(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """Yield what is no container, each object once."""
    if isinstance(value, _PLAIN) and not isinstance(value, (str, bytes)):
        return
    if id(value) in seen or depth > _DEEPEST:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, (list, tuple, UserList, deque, set, frozenset)):
        inside = value
    elif isinstance(value, Tensor) or not hasattr(value, "__dict__"):
        yield value
        return
    else:  # a record, or something that will not be stored
        inside = vars(value).values()
    for item in inside:
        yield from _leaves(item, seen, depth + 1)


def _size_of(value: Any) -> int:
    if not isinstance(value, Tensor):
        size = len(value) if isinstance(value, (str, bytes)) else getattr(value, "nbytes", 0)
        return size if isinstance(size, int) else 0
    if is_lazy(value) or value.is_meta:
        return 0
    held = local(value)
    if held.layout is torch.sparse_coo:
        return held._values().nbytes + held._indices().nbytes
    return held.numel() * held.element_size()


class _Encoder:
    def __init__(self, *, copied: bool) -> None:
        self.left_out: list[str] = []
        self._copied = copied
        self._copies: dict[int, tuple[Tensor, Any]] = {}  # holds on to the tensors: the key is their address
        self._open: set[int] = set()

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, enum.Enum):
            return self.encode(value.value, path)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, _PLAIN):
            return value
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            return self._checked(value, path)
        if id(value) in self._open or len(path) > _DEEPEST:
            return self._gone(value, path, "it contains itself or is nested too deeply")
        self._open.add(id(value))
        encoded = self._container(value, path)
        self._open.discard(id(value))
        return encoded

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, (list, tuple, UserList, deque)) and not hasattr(value, "_fields"):
            parts = [self.encode(item, (*path, number)) for number, item in enumerate(value)]
            return tuple(parts) if isinstance(value, tuple) else parts
        if isinstance(value, (set, frozenset)):
            return self._checked(value, path)
        if type(value) is dict:
            return self._items(value.items(), path)
        if isinstance(value, tuple):
            fields: Any = list(value._fields)  # type: ignore[attr-defined]
            return {_TUPLE: [fields, [self.encode(getattr(value, f), (*path, f)) for f in fields]]}
        return self._record(value, path)

    def _record(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Keep the fields of a mapping of its own class, of a dataclass, of whatever has keys() and []."""
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            return {_RECORD: self._items(((name, getattr(value, name)) for name in names), path)}
        if not callable(getattr(type(value), "keys", None)) or not hasattr(value, "__getitem__"):
            return self._gone(value, path)
        try:
            items = [(key, value[key]) for key in value.keys()]  # noqa: SIM118 - it may iterate otherwise
        except Exception as error:  # noqa: BLE001 - somebody else's container may raise anything
            return self._gone(value, path, f"it raised {type(error).__name__}")
        return {_RECORD: self._items(items, path)}

    def _items(self, items: Any, path: tuple[Any, ...]) -> dict[Any, Any]:
        kept = {}
        for key, item in items:
            if isinstance(key, enum.Enum) or not isinstance(key, (*_KEYS, tuple)):
                self._gone(item, (*path, str(key)), "its key cannot be stored")
            elif isinstance(key, str) and key.startswith(_MARK):
                self._gone(item, (*path, key), "its name is taken")
            else:
                kept[key] = self.encode(item, (*path, key))
        return kept

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> Any:
        known = self._copies.get(id(tensor))
        if known is None:
            known = self._copies[id(tensor)] = (tensor, self._copy(tensor, path))
        return known[1]

    def _copy(self, tensor: Tensor, path: tuple[Any, ...]) -> Any:
        if is_lazy(tensor):
            return self._gone(tensor, path, "it has no shape yet")
        held = local(tensor.detach())
        odd = held.is_meta or held.is_quantized or held.is_nested or _is_wrapper(held)
        if odd or held.layout not in (torch.strided, torch.sparse_coo):
            return self._gone(tensor, path, "only dense and sparse COO tensors are stored")
        kept = held.as_subclass(Tensor) if held.layout is torch.strided else held
        kept = kept if self._copied else kept.to("cpu", copy=True)
        kept = self._checked(kept, path)
        return {_GRAD: kept} if tensor.requires_grad and isinstance(kept, Tensor) else kept

    def _checked(self, value: Any, path: tuple[Any, ...]) -> Any:
        try:
            flatten(value, copy_views=False)
        except UnsupportedStateError as error:
            return self._gone(value, path, str(error).partition("; ")[2])
        return copy.copy(value) if not isinstance(value, Tensor) else value

    def _gone(self, value: Any, path: tuple[Any, ...], why: str = "") -> Any:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        what = f"{format_path(path) or 'the batch'} ({kind})"
        self.left_out.append(f"{what}: {why or 'only tensors, numbers, text and containers are stored'}")
        return {_GONE: what}


def _decode(value: dict[Any, Any], device: torch.device | str | None) -> Any:
    if len(value) == 1:
        if _RECORD in value:
            return Record({key: from_stored(item, device) for key, item in value[_RECORD].items()})
        if _GRAD in value:
            return from_stored(value[_GRAD], device).detach().requires_grad_()
        if _GONE in value:
            return Gone(str(value[_GONE]))
        if _TUPLE in value:
            fields, items = value[_TUPLE]
            # Whose fields these are is known only now.
            made = namedtuple("Batch", fields, rename=True)  # type: ignore[misc] # noqa: PYI024
            return made(*(from_stored(item, device) for item in items))
    return {key: from_stored(item, device) for key, item in value.items()}
