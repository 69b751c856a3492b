"""Pieces of memory, told apart and judged: which hold something non-finite, and who wrote it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradsentinel.measures.inspection import parts_of, readable, values_of


@dataclass(frozen=True, slots=True)
class Badness:
    """Which non-finite values a tensor holds."""

    nan: bool = False
    inf: bool = False

    def __bool__(self) -> bool:
        return self.nan or self.inf


FINE = Badness()


@dataclass(slots=True)
class Cell:
    """What is known of one piece of memory."""

    reference: Any
    """Keeps the piece's identity, not its contents."""
    origin: int = 0
    """Bits: what its values were computed from."""
    writer: int | None = None
    """Number of the last operator that wrote something non-finite to it."""
    lawful: bool = False
    """True if its only non-finite values are infinities that somebody wrote there on purpose."""
    fine: bool = False
    """True if all of it was looked at, and was finite, before any operator wrote to it."""
    whole: Badness | None = None
    """What all of it holds, if it was looked at since it was written last."""
    measures: str = ""
    """What its numbers measure: see `spread.measure_of`."""
    leaf: str = ""
    """Where the tensor comes from if no operator made it: 'parameter w', 'batch x', 'constant'."""


def judge(tensor: Tensor) -> Badness:
    """Return which non-finite values a tensor holds; one pass if none, waits for the device."""
    if readable(tensor) is not None:
        return FINE
    values = parts_of(values_of(tensor) if tensor.layout is not torch.strided else tensor.detach())
    if values.numel() == 0:
        return FINE
    if values.dtype.itemsize == 1:
        values = values.float()
    if values.device.type == "cpu":  # where the norm is ten times slower than the two extremes
        low, high = (float(extreme) for extreme in torch.aminmax(values))
        largest = max(abs(low), abs(high)) if low <= high else math.nan
    else:
        largest = float(torch.linalg.vector_norm(values, math.inf))
    if math.isfinite(largest):
        return FINE
    if math.isinf(largest):  # NaN is the largest of all where there is one
        return Badness(nan=False, inf=True)
    return Badness(nan=True, inf=bool(torch.isinf(values).any()))


def bad_mask(tensor: Tensor) -> Tensor:
    """Return which elements are NaN or Inf, in the tensor's shape; float8 has no arithmetic of its own."""
    return ~torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 else tensor)


class Memory:
    """What is known of each piece of memory that a replay touched; holds none of it alive."""

    def __init__(self) -> None:
        self.watched = True
        """False if others write to the memory, too, who are not seen: then it is looked at each time anew."""
        self._cells: dict[int, Cell] = {}

    def known(self, tensor: Tensor) -> Cell | None:
        """Return what is known of a tensor's memory, None if it was never seen."""
        key = _key(tensor)
        return None if key is None else self._cells.get(key)

    def cell(self, tensor: Tensor, *, made: bool = False) -> Cell | None:
        """Return the cell of a tensor's memory; None if it has no memory of its own.

        `made` says that an operator made it; else memory that is seen first comes from outside.
        """
        key = _key(tensor)
        if key is None:
            return None
        cell = self._cells.get(key)
        if cell is None:
            held = tensor._values() if tensor.layout is torch.sparse_coo else tensor
            reference = StorageWeakRef(held.untyped_storage())  # type: ignore[no-untyped-call]
            cell = Cell(reference, leaf="" if made else "constant")
            self._cells[key] = cell
        return cell

    def wrote(self, cell: Cell, tensor: Tensor, badness: Badness) -> None:
        """Note that an operator wrote to a tensor, and what that holds now."""
        cell.whole = badness if _is_whole(tensor) else None

    def read(self, tensor: Tensor) -> tuple[Cell | None, Badness]:
        """Return what is known of an input; its values are looked at only if they may be bad."""
        cell = self.cell(tensor)
        if cell is None or (cell.writer is None and (cell.fine or not cell.leaf)):
            return cell, FINE
        whole = _is_whole(tensor)
        known = cell.whole if whole and self.watched else None
        badness = judge(tensor) if known is None else known
        cell.whole = badness if whole else cell.whole
        if cell.writer is None and not badness and tensor.layout is torch.strided:
            cell.fine = whole
        if badness and cell.writer is None:  # a mask of -inf is no fault; NaN and +inf mask nothing
            cell.lawful = not badness.nan and not _has_plus(tensor)
        return cell, badness


def _is_whole(tensor: Tensor) -> bool:
    """True for a tensor that has every element of its memory, each of them once."""
    if tensor.layout is not torch.strided or 0 in tensor.stride():
        return False
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _has_plus(tensor: Tensor) -> bool:
    """Tell an overflow from a mask: nobody masks with +inf, and a minimum that starts there is hidden."""
    return bool(torch.isposinf(parts_of(values_of(tensor))).any())


def _key(tensor: Tensor) -> int | None:
    try:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, nested, distributed: no storage of its own
        return None
