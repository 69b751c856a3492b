"""The model's boundary: what the loop gave to it and got back, against what `forward=` gives it and gets."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsentinel.again.model_calls import UNKNOWN, Leaf, ModelCall, Record
from gradsentinel.measures.inspection import parts_of
from gradsentinel.state.tree import format_path

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ORDINARY = 2.0**16
"""Rounding and ordinary differences stay below that; what a broken number is multiplied with does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Values that are others in the loop than in the replay, at one place."""

    where: str
    """In words: 'argument 0', 'what the model returned'."""
    first: str = ""
    """Of the first element that differs: its index, and both numbers."""
    odd: int = 0
    """So many elements differ."""
    alike: int = 0
    """Finite elements other than 0 that are the same, in records that are the same as a whole."""
    bad: bool = False
    """True if the loop's are not finite where the replay's are, or far larger."""
    finite: bool = True
    """True if the loop's are finite where they differ."""
    records: tuple[int, ...] = ()
    """The records that hold them, if the values are those of records."""
    size: int = 0
    """How many records there are; 0 if that cannot be told."""
    flipped: int | None = None
    """The bit that differs, if only one does, of one element, in a way that no arithmetic makes."""

    @property
    def confined(self) -> bool:
        """True if some records are damaged, and all others are the same bit for bit."""
        return bool(self.records) and len(self.records) < self.size and self.alike > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a comparison of the calls of one micro-batch has shown."""

    unknown: str = ""
    """Why they cannot be compared; empty if they can."""
    given: Difference | None = None
    """The model was given something else."""
    made: Difference | None = None
    """It was given the same, and returned something else."""
    name: str = ""
    """The root module that made it."""
    partial: bool = False
    """True if something of what it returned cannot be compared."""
    unseen: str = ""
    """Why what it was given may have been something else, although it is the same now."""
    modes: tuple[str, ...] = ()
    """The program's own modes that the loop's calls ran under."""
    hooks: int = 0
    """So many more hooks were registered in the loop than in the replay, before the model returned."""

    @property
    def same(self) -> bool:
        """True if all of it was compared, and is the same."""
        return not self.unknown and not self.partial and self.given is None and self.made is None


def compare_calls(loop: Record | None, replay: Record | None, sizes: Collection[int]) -> Boundary:
    """Compare the calls of a micro-batch, on the host; waits for the device.

    Args:
        loop: as the loop made them.
        replay: as `forward=` made them.
        sizes: how many records the micro-batch has, as its tensors tell.
    """
    if loop is None or replay is None or not loop.calls:
        return Boundary(unknown="the loop did not call the model as a whole")
    modes = tuple(dict.fromkeys(mode.__name__ for call in loop.calls for mode in call.modes))
    hooks = max((call.hooks for call in loop.calls), default=0)
    hooks -= max((call.hooks for call in replay.calls), default=0)
    if modes:
        return Boundary(unknown="it ran under modes of the program's own", modes=modes, hooks=max(0, hooks))
    try:
        found = _compare(loop, replay, sizes)
    except Exception as error:  # noqa: BLE001 - tensors of other libraries: what they cannot do proves nothing
        found = {"unknown": f"what the loop gave to the model cannot be compared: {type(error).__name__}"}
    return Boundary(**found, modes=modes, hooks=max(0, hooks))


@torch.no_grad()
def _compare(loop: Record, replay: Record, sizes: Collection[int]) -> dict[str, Any]:
    pairs, why = _pairs(loop, replay)
    if why:
        return {"unknown": why}
    unseen, partial = "", False
    for kind, mine, theirs in pairs:
        given = kind == "given"
        one, other = (mine.given, theirs.given) if given else (mine.made or [], theirs.made or [])
        if [path for path, _, _ in one] != [path for path, _, _ in other]:
            if given:
                return {"unknown": "the loop calls the model with other arguments than forward="}
            return {"made": Difference(where="the form of what the model returned"), "name": mine.name}
        why = _not_known(one, other) if given else ""
        if why:
            return {"unknown": why}
        leaves = [
            (path, value, again, _written(value, version))
            for (path, value, version), (_, again, later) in zip(one, other, strict=True)
            if value is not UNKNOWN and again is not UNKNOWN and not _written(again, later)
        ]
        partial = partial or len(leaves) < len(one) or any(written for *_, written in leaves)
        found = [
            difference
            for path, value, again, written in leaves
            if (difference := _difference(_name(path, given=given), value, again, sizes)) is not None
            if not written or difference.flipped is not None  # what a loop writes is no single flipped bit
        ]
        if found:
            worst = _worst(found) if given else _together(found)
            return {"given" if given else "made": worst, "name": mine.name, "unseen": unseen}
        if given:
            unseen = unseen or _unseen(one)
    return {"unseen": unseen, "partial": partial}


def _pairs(loop: Record, replay: Record) -> tuple[list[tuple[str, ModelCall, ModelCall]], str]:
    """Return calls and returns in their order, the loop's with the replay's; or why they do not fit."""
    why = loop.lost or replay.lost
    if why:
        return [], why
    if any(call.made is None for call in (*loop.calls, *replay.calls)):
        return [], "a call of the model raised"
    for graph_only in (False, True):  # an evaluation in between is no part of the step
        mine, theirs = (
            sorted(
                event
                for number, call in enumerate(call for call in record.calls if call.graph or not graph_only)
                for event in ((call.order, "given", number), (call.returned, "made", number))
            )
            for record in (loop, replay)
        )
        ours, others = (
            [call for call in record.calls if call.graph or not graph_only] for record in (loop, replay)
        )
        alike = [event[1:] for event in mine] == [event[1:] for event in theirs]
        if ours and alike and [call.name for call in ours] == [call.name for call in others]:
            return [(kind, ours[number], others[number]) for _, kind, number in mine], ""
    return [], f"the loop called the model {len(loop.calls)} times, forward= {len(replay.calls)} times"


def _not_known(one: Sequence[Leaf], other: Sequence[Leaf]) -> str:
    for (path, value, version), (_, again, later) in zip(one, other, strict=True):
        name = _name(path, given=True)
        if value is UNKNOWN or again is UNKNOWN:
            return f"{name} of the model is nothing that can be compared, or too large to be kept"
        if _written(value, version) or _written(again, later):
            return f"{name} of the model was written to after it was handed over"
    return ""


def _written(value: Any, version: int) -> bool:
    return isinstance(value, Tensor) and value._version != version


def _unseen(given: Sequence[Leaf]) -> str:
    """Memory that torch has not allocated is written to by its owner, and no version tells."""
    for path, value, _ in given:
        if isinstance(value, Tensor) and value.numel() and value.layout is torch.strided:
            storage = value.untyped_storage()
            if value.device.type == "cpu" and not storage.resizable() and not storage.is_shared():
                return f"{_name(path, given=True)} of the model lies in memory of NumPy or another library"
    return ""


def _name(path: Sequence[Any], *, given: bool) -> str:
    if given:
        return f"argument {format_path([str(p) if i == 0 else p for i, p in enumerate(path)])}"
    return f"{format_path(path)} of what the model returned" if path else "what the model returned"


# -- one value ---------------------------------------------------------------------------------------


def _difference(where: str, value: Any, again: Any, sizes: Collection[int]) -> Difference | None:
    if not isinstance(value, Tensor) or not isinstance(again, Tensor):
        same = type(value) is type(again) and (value == again or (value != value and again != again))  # noqa: PLR0124
        return None if same else Difference(where=where, first=f"{value!r:.40} instead of {again!r:.40}")
    kinds = [f"{t.dtype}, shape {list(t.shape)}".removeprefix("torch.") for t in (value, again)]
    if kinds[0] != kinds[1] or value.layout is not again.layout:
        return Difference(where=where, first=f"{kinds[0]} instead of {kinds[1]}")
    if value.layout is not torch.strided:
        raise TypeError(value.layout)
    mine, theirs = (parts_of(t.detach()).cpu().contiguous() for t in (value, again))
    return _elements(where, mine, theirs, sizes)


def _elements(where: str, mine: Tensor, theirs: Tensor, sizes: Collection[int]) -> Difference | None:
    kind = _BITS[mine.element_size()]
    raw = mine, theirs
    odd = (
        mine.view(kind) != theirs.view(kind)
        if mine.dim()
        else mine[None].view(kind)[0] != theirs[None].view(kind)[0]
    )
    floating = mine.dtype.is_floating_point
    if floating:
        if mine.element_size() == 1:  # float8 has no comparisons
            mine, theirs = mine.float(), theirs.float()
        odd &= (mine != theirs) & ~(mine.isnan() & theirs.isnan())
    count = int(odd.sum())
    if not count:
        return None
    finite = mine.isfinite() if floating else torch.ones_like(odd)
    bad = odd & (~finite & theirs.isfinite() if floating else ~finite)
    huge = odd & (mine.abs().double() > _ORDINARY * theirs.abs().double().clamp_min(1)) if floating else bad
    hits = bad if bool(bad.any()) else huge if bool(huge.any()) else odd
    index = tuple(int(i) for i in torch.unravel_index(hits.flatten().to(torch.uint8).argmax(), hits.shape))
    rows = _by_records(odd, sizes)
    clean = None if rows is None else ~rows
    alike = finite & (mine != 0)
    return Difference(
        where=where,
        first=f"element {list(index)}: {mine[index].item():g} instead of {theirs[index].item():g}"
        if mine.dtype is not torch.bool
        else f"element {list(index)}",
        odd=count,
        alike=0 if clean is None else int(_in_records(alike, sizes)[clean].sum()),  # type: ignore[index]
        bad=bool(bad.any()) or bool(huge.any()),
        finite=bool(finite[odd].all()),
        records=() if rows is None else tuple(rows.nonzero().flatten().tolist()),
        size=0 if rows is None else len(rows),
        flipped=_flipped(*(tensor.flatten()[odd.flatten()] for tensor in raw)) if count == 1 else None,
    )


def _flipped(mine: Tensor, theirs: Tensor) -> int | None:
    """Return the one bit in which two numbers differ, if no arithmetic makes the first of the second."""
    if not mine.dtype.is_floating_point or mine.element_size() == 1:  # float8 has no arithmetic to tell it by
        return None
    kind, bits = _BITS[mine.element_size()], 8 * mine.element_size()
    one, other = (int(tensor.view(kind)) for tensor in (mine, theirs))
    changed = (one ^ other) & ((1 << bits) - 1)
    was, should = float(mine), float(theirs)
    # Dividing by 0 makes an Inf, or a NaN of these very bits; doubling and negating change one bit, too.
    usual = [int(mine.new_tensor([value]).abs().view(kind)) for value in (math.inf, math.nan)]
    if not changed or changed & (changed - 1) or not should or one & ((1 << (bits - 1)) - 1) in usual:
        return None
    return None if 1 / _ORDINARY < abs(was / should) < _ORDINARY else changed.bit_length() - 1


def _in_records(values: Tensor, sizes: Collection[int]) -> Tensor | None:
    """Return the elements with one row for each record; None where there is no telling."""
    shape = values.shape
    if not values.numel() or not values.dim() or not sizes or 0 in sizes:
        return None
    size = shape[0]
    if size not in sizes:
        size = min(sizes)
        if len(sizes) > 1 or values.dim() == 1 or shape[0] % size:
            dims = [dim for dim, length in enumerate(shape[:-1]) if length in sizes]
            return values.movedim(dims[0], 0).reshape(shape[dims[0]], -1) if len(dims) == 1 else None
    return values.reshape(size, -1) if size > 1 else None  # flattened, perhaps: records and positions


def _by_records(odd: Tensor, sizes: Collection[int]) -> Tensor | None:
    rows = _in_records(odd, sizes)
    return None if rows is None else rows.any(1)


def _worst(found: Sequence[Difference]) -> Difference:
    return min(found, key=lambda one: (not one.bad, one.finite))


def _together(found: Sequence[Difference]) -> Difference:
    """Return the one that tells most: of records, and none if one of several has all its records damaged."""
    spread = [one for one in found if not one.confined and (one.size or one.odd > 1)]
    if spread:
        return _worst(spread)
    return min(found, key=lambda one: (not one.confined, not one.bad))
