"""The numbers that a batch holds: its tensors, and NumPy's arrays, also within objects of the user's own."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from gradsentinel.state.tree import children_of, tensors_in

_NUMBERS = frozenset("fiubc")
"""Kinds of NumPy's types that hold numbers."""
_NO_RECORDS = (type, torch.nn.Module, torch.Generator, ModuleType, FunctionType)
_INTERNAL = "_"
_MOST_INSIDE = 256
"""An object's list or table with more entries is none of records: a vocabulary, or the whole data set."""
_SMALL = 1 << 20
"""So many bytes of an object's arrays are read whatever they are."""


def held_in(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of all numbers in a batch; arrays as tensors of the same memory.

    As `tensors_in` does, and of what has attributes and is no container of a known kind: those of public
    names that hold numbers or containers. Arrays of texts, dates or objects, and masked ones, are left out,
    and so are an object's larger arrays with another number of records than all else it has: it only refers
    to them (the whole data set, a file that is mapped into memory).
    """
    return tensors_in(as_tensor(batch), children=_children)


def _children(value: Any) -> list[tuple[Any, Any]]:
    found = children_of(value)
    if not found and not isinstance(value, _NO_RECORDS) and not callable(value):
        found = _attributes(value)
    elif dataclasses.is_dataclass(value):
        found = _without_strangers(found)
    if "numpy" in sys.modules:
        found = [(key, as_tensor(child)) for key, child in found]
    return found


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    held = [(name, getattr(value, name, None)) for name in names if not name.startswith(_INTERNAL)]
    found = [(name, child) for name, child in held if _may_be_data(child)]
    return _without_strangers(found)


def _without_strangers(found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Leave out the arrays that are no part of the batch, as far as their sizes tell."""
    held = [child for _, child in found if _may_be_data(child)]
    arrays = sorted((child for child in held if _is_array(child)), key=lambda child: int(child.nbytes))
    if not arrays or (len(held) == 1 and arrays[0].ndim):
        return found
    records = [child.shape[0] for child in held if isinstance(child, Tensor) and child.dim()]
    records += [child.shape[0] for child in arrays if child.ndim]
    records += [len(child) for child in held if isinstance(child, (list, tuple))]
    left, strangers = _SMALL, set()
    for array in arrays:
        if array.nbytes <= left:
            left -= array.nbytes
        elif not array.ndim or records.count(array.shape[0]) < 2:
            strangers.add(id(array))
    return [(name, child) for name, child in found if id(child) not in strangers]


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) in (numpy.ndarray, numpy.memmap)


class _Opened:
    """The memory of a read-only array, for torch, which warns of those; nobody writes to it."""

    def __init__(self, array: Any) -> None:
        self.array = array  # which the memory belongs to
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.__array_interface__["data"][0], False),
        }


def _may_be_data(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return len(value) <= _MOST_INSIDE
    return isinstance(as_tensor(value), Tensor)


def as_tensor(value: Any) -> Any:
    """Return a NumPy array of numbers as a tensor of the same memory, where torch can; all else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not _is_array(value):
        return value
    if value.dtype.kind not in _NUMBERS:
        return value
    if min(value.strides, default=0) < 0 or not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))  # torch has no such tensors
    elif not value.flags.writeable:
        value = numpy.asarray(_Opened(value))
    try:
        return torch.from_numpy(value)
    except TypeError:  # long doubles
        return value
