"""What a trace keeps of an operator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gradsentinel.diagnosis.memory import Badness
from gradsentinel.diagnosis.source import Line

FROM_PARAMETERS, FROM_BATCH, FROM_BUFFERS = 1, 2, 4
"""What a value was computed from, as bits; attributes count as buffers."""
FIELDS = 3
"""From this bit on, each field of the batch has one, beside that of the batch as a whole."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A non-finite input of an operator, as it was when it was read."""

    argument: int
    writer: int | None
    leaf: str
    lawful: bool
    badness: Badness
    origin: int


@dataclass(frozen=True, slots=True)
class Call:
    """Where an operator was called from."""

    module: str | None
    line: Line | None


@dataclass(slots=True, kw_only=True)
class Event:
    """One operator with a non-finite result, or one that took non-finite values and hid them."""

    index: int
    op: str
    function: Any
    call: Call
    backward: bool
    recomputed: bool
    """True in a forward pass that activation checkpointing repeats during backward."""
    node: str | None
    sequence: int
    """Number of the autograd node that ran, or that this forward operator belongs to."""
    custom: str | None
    """Name of the user's autograd Function or operator library that it ran in."""
    first: bool
    """True for the forward operator that the node of this number was made for."""
    in_no_grad: bool
    badness: Badness
    """Of the results; nothing bad means that the operator absorbed what it was given."""
    edges: tuple[Edge, ...]
    fresh: bool
    """True if it made non-finite values that its inputs do not explain."""
    literal: bool = False
    """True if an infinity or NaN was given to it as a plain number."""
    allocation: bool = False
    origin: int = 0
    lawful: bool = False
    mask_origin: int = 0
    """Bits: what its boolean inputs were computed from."""
    argument_origins: tuple[int, ...] = ()
    argument_measures: tuple[str, ...] = ()
    """What its tensor arguments measure: see `spread.measure_of`."""
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[Tensor, ...] = ()
