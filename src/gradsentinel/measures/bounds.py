"""How much memory the evidence for a later diagnosis may take: one setting for all buffers that hold it."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, fields
from functools import lru_cache

from gradsentinel.errors import ConfigurationError

VARIABLE = "GRADSENTINEL_BUFFERS"
"""`name=value`, separated by commas, such as `pinned=4MiB,steps=128`; what is not named keeps its default."""

MOST_LAG = 16
"""Under `guard="device"` an incident is handled at most so many steps later: what is kept for it is kept of
so many steps more. No setting of its own, for `Sentinel(lag=)` is that."""

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_DIGITS = 15
"""Of the largest number of anything."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds, each with its default; sizes in bytes."""

    pinned: int = 1 << 20
    """Size: pinned memory that each mailbox keeps for numbers on their way to the host. Letters under way
    come on top; what is beyond is asked for anew, from torch's cache of pinned memory, which costs time and
    never a result. A letter holds a few numbers per parameter: enough for some ten thousand of them."""
    steps: int = 64
    """Steps before an incident whose gradient norms are kept, by reference to what was computed anyway."""
    norms: int = 1 << 18
    """Norms that are kept at most: of a model with more tensors than `norms / steps` fewer steps."""
    marks: int = 32
    """States that a detector on the device keeps of what it learnt, one every 16 steps, to go back to after a
    rollback; each is ten numbers for each number watched."""
    modules: int = 64
    """Modules that hooks watch for the next incident, where a step cannot be run again."""
    calls: int = 64
    """Bad operators of a replay whose inputs are kept."""
    copies: int = 1 << 28
    """Size: copies of these inputs, as far as the program may still write to them."""
    weights: int = 1 << 30
    """Size: copies of parameters during a replay, frozen ones first: a forward pass may write to a
    codebook."""
    passed: int = 1 << 28
    """Size: memory of what the loop gave to the model and got back from it in a step, kept by reference until
    the step is decided, where `forward=` is given; what is beyond is not known to a diagnosis."""
    alarms: int = 32
    """Warnings of torch_npu's silent check that wait to become incidents."""

    def __str__(self) -> str:
        return ",".join(f"{name}={getattr(self, name)}" for name in _NAMES)


_NAMES = tuple(field.name for field in fields(Bounds))
SIZES = frozenset({"pinned", "copies", "weights", "passed"})
"""The bounds that are bytes; the others are numbers of something, and at least 1."""


def bounds() -> Bounds:
    """Return the bounds that the environment asks for; reads it each time, which takes a microsecond.

    Raises:
        ConfigurationError: for a name or a value that makes no sense, with the names there are.
    """
    return parse(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=16)
def parse(text: str) -> Bounds:
    """Return the bounds that a text such as `pinned=4MiB,steps=128` asks for.

    Raises:
        ConfigurationError: as for `bounds`.
    """
    found: dict[str, int] = {}
    for part in filter(None, (entry.strip() for entry in text.split(","))):
        name, equals, stated = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _NAMES:
            raise ConfigurationError(f"{VARIABLE}: {part!r} is none of {_accepted()}")
        if name in found:
            raise ConfigurationError(f"{VARIABLE}: {name} is there twice")
        found[name] = _size(name, stated) if name in SIZES else _count(name, stated)
    return Bounds(**found)


def _size(name: str, stated: str) -> int:
    match = _SIZE.fullmatch(stated)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigurationError(f"{VARIABLE}: {name}={stated} is no size; give bytes, or 512KiB, 4MiB, 1GiB")
    size = float(match[1]) * _UNITS[match[2].lower()]
    if size > sys.maxsize:
        raise ConfigurationError(f"{VARIABLE}: {name}={stated[:_DIGITS]}... is more than any memory holds")
    return int(size)


def _count(name: str, stated: str) -> int:
    if len(stated) > _DIGITS and stated.isdigit():
        raise ConfigurationError(f"{VARIABLE}: {name}={stated[:_DIGITS]}... is more than any memory holds")
    if not (stated.isascii() and stated.isdigit() and int(stated) > 0):
        raise ConfigurationError(f"{VARIABLE}: {name}={stated} is no whole number from 1 on")
    return int(stated)


def _accepted() -> str:
    return ", ".join(f"{name}=<{'size' if name in SIZES else 'number'}>" for name in _NAMES)
