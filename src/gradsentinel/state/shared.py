"""Host memory that the process which writes sees as well, so that nothing is handed over to be written."""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LEAST = 1 << 16
"""Bytes from which on a tensor lies here: each one has pages of its own."""
_FIRST = 64 << 20
_SHARE = 4
"""A new segment is at least this part of what there is, so that there are few, however much they hold."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of shared memory, which lives as long as a tensor in it, or this."""

    memory: mmap.mmap
    descriptor: int
    start: int
    """Its address."""
    size: int


class SharedMemory:
    """Memory in files without a name (Linux), whose pages are only there once they are written to.

    It is not in `/dev/shm`, which is small in many containers. What a forked process writes there is seen
    here, so a child that goes on by itself is to make memory of its own.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._starts: list[tuple[int, int]] = []
        """Addresses in order, with the place in the list."""
        self._end = 0
        """So much of the last one is given away."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All there are, in the order that they were made in."""
        return tuple(self._segments)

    def tensor_like(self, like: Tensor) -> Tensor | None:
        """Return memory like a tensor's own; None if it is not worth it, or the system has none."""
        if like.nbytes < _LEAST or not hasattr(os, "memfd_create"):
            return None
        shape = torch.empty_like(like, device="meta")
        if not self._segments or self._end + shape.nbytes > self._segments[-1].size:
            try:
                self._grow(shape.nbytes)
            except (OSError, ValueError):  # no descriptor or no address space left, or forbidden here
                return None
        last = self._segments[-1]
        try:
            # A storage of its own: who saves or copies one tensor has nothing to do with its neighbours.
            flat = torch.frombuffer(last.memory, dtype=shape.dtype, count=shape.numel(), offset=self._end)
        except (TypeError, ValueError, RuntimeError):  # a dtype that torch does not take from memory
            return None
        self._end += _whole_pages(shape.nbytes)
        return flat.as_strided(shape.shape, shape.stride())

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """Return in which segment, and where in it, so many bytes of memory lie; None if they do not."""
        place = bisect_right(self._starts, (address, len(self._segments))) - 1
        if place < 0:
            return None
        number = self._starts[place][1]
        segment = self._segments[number]
        inside = address + size <= segment.start + segment.size
        return (number, address - segment.start) if inside else None

    def release(self, tensor: Tensor) -> None:
        """Give the pages of a tensor back to the system; nobody may read it after that."""
        where = self.find(tensor.data_ptr(), tensor.nbytes)
        if where is not None and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # then they stay until the segment goes
                memory = self._segments[where[0]].memory
                memory.madvise(mmap.MADV_REMOVE, where[1], _whole_pages(tensor.nbytes))

    def _grow(self, needed: int) -> None:
        so_far = sum(segment.size for segment in self._segments)
        size = _whole_pages(max(needed, _FIRST, so_far // _SHARE))
        descriptor = os.memfd_create("gradsentinel")
        try:
            os.ftruncate(descriptor, size)
            memory: Any = mmap.mmap(descriptor, size)
        except (OSError, ValueError):
            os.close(descriptor)
            raise
        weakref.finalize(memory, os.close, descriptor).atexit = False
        start = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
        self._segments.append(Segment(memory, descriptor, start, size))
        self._starts = sorted((segment.start, number) for number, segment in enumerate(self._segments))
        self._end = 0


def _whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
