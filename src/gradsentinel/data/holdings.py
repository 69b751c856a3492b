"""The numbers that a batch holds: its tensors, and NumPy's arrays, also within objects of the user's own."""

from __future__ import annotations

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


def held_in(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of all numbers in a batch; arrays as tensors of the same memory.

    As `tensors_in` does, and of what has attributes and is no container of a known kind: those of public
    names that hold numbers or containers. Arrays of texts, dates or objects, and masked ones, are left out.
    """
    return tensors_in(as_tensor(batch), children=_children)


def _children(value: Any) -> list[tuple[Any, Any]]:
    found = children_of(value)
    if not found and not isinstance(value, _NO_RECORDS) and not callable(value):
        found = _attributes(value)
    if "numpy" in sys.modules:
        found = [(key, as_tensor(child)) for key, child in found]
    return found


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = list(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    held = [(name, getattr(value, name, None)) for name in names if not name.startswith(_INTERNAL)]
    return [(name, child) for name, child in held if _may_be_data(child)]


def _may_be_data(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return len(value) <= _MOST_INSIDE
    return isinstance(as_tensor(value), Tensor)


def as_tensor(value: Any) -> Any:
    """Return a NumPy array of numbers as a tensor of the same memory, where torch can; all else as it is."""
    numpy = sys.modules.get("numpy")
    if numpy is None or isinstance(value, Tensor) or type(value) not in (numpy.ndarray, numpy.memmap):
        return value
    if value.dtype.kind not in _NUMBERS:
        return value
    if not value.flags.writeable or min(value.strides, default=0) < 0 or not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))  # torch would complain
    try:
        return torch.from_numpy(value)
    except TypeError:  # long doubles
        return value
