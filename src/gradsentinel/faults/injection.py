"""The record of what was injected: the truth that a detector or a diagnosis is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

Number = int | float | complex


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One fault that really happened: the truth that a detector or a diagnosis is compared with."""

    step: int
    """Step it happened in."""
    microbatch: int
    """Micro-batch of that step."""
    rank: int
    """Rank it happened on."""
    kind: str
    """Family of the fault, such as `poison_sample` or `flip_bit`."""
    target: str
    """What was hit: `sample`, `activation`, `gradient` or `parameter`."""
    where: str
    """Name of the module or parameter, or path of the field in the batch."""
    index: tuple[int, ...]
    """Element that was hit, the first one if there are several; of a sharded tensor, within the local
    part."""
    before: Number | None = None
    """Its value before."""
    after: Number | None = None
    """Its value after."""
    bit: int | None = None
    """Bit that was flipped, 0 being the lowest of the mantissa."""
    elements: int = 1
    """How many elements were changed."""
    op: str | None = None
    """Operator that computed the wrong value, where the fault is one of an operator."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as strict JSON can hold it: NaN and infinities become strings, complex numbers pairs."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Hit:
    """What a change did to a tensor."""

    index: tuple[int, ...]
    before: Number
    after: Number
    bit: int | None = None
    elements: int = 1
    op: str | None = None
