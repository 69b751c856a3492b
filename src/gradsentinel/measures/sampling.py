"""Which elements are looked at when: a part of a large model at a time, all of it within so many checks."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsentinel.errors import ConfigurationError
from gradsentinel.measures.inspection import local

_LARGEST_PIECE = 2**20
"""Elements that are looked at in one go, so that what is computed from them stays small too."""
MOST_PIECES = 256
"""Pieces in one check: each costs a few launches, however small it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of one tensor, in the order of its indices."""

    name: str
    start: int
    stop: int
    whole: int
    """Elements of the whole tensor."""

    def __len__(self) -> int:
        return self.stop - self.start


class Rotation:
    """Deals the elements of many tensors out to a fixed number of checks, which then take turns.

    Tensors are cut into equal pieces, with a rest each. The pieces are dealt out one by one, large ones
    first and those of a size in the model's order, each to the check that has the least so far. So a check
    holds large and small tensors from all over the model; no check holds more than `elements_per_check`
    elements or `MOST_PIECES` pieces; any two differ by one piece at most; and every element is in exactly
    one of `rounds` checks. (Greedy list scheduling; R. L. Graham, Bell System Technical Journal 45, 1966.)

    Depends on its arguments alone: wherever they are the same, so are the checks.

    Args:
        sizes: name and number of elements of each tensor, in the model's order.
        elements_per_check: bound on the elements of one check, at least 2.

    Raises:
        ConfigurationError: if the bound is too small.
    """

    def __init__(self, sizes: Iterable[tuple[str, int]], elements_per_check: int) -> None:
        if elements_per_check < 2:
            raise ConfigurationError(f"elements_per_check={elements_per_check} must be at least 2")
        self.elements_per_check = elements_per_check
        least = -(-elements_per_check // MOST_PIECES)
        self.piece = max(least, min(elements_per_check // 8, _LARGEST_PIECE))
        """Elements of a full piece."""
        self._sizes = [(name, size) for name, size in sizes if size > 0]
        self._first: list[int] = []
        """Number of full pieces before those of each tensor."""
        full = 0
        for _, size in self._sizes:
            self._first.append(full)
            full += size // self.piece
        self._full = full
        rests = [
            (max(size % self.piece, least), place)
            for place, (_, size) in enumerate(self._sizes)
            if size % self.piece
        ]
        total = full * self.piece + sum(cost for cost, _ in rests)
        self.rounds = 1
        """So many checks in a row see every element."""
        if total > elements_per_check:
            self.rounds = -(-total // (elements_per_check - self.piece))
        self._rests = self._deal(rests)

    def _deal(self, rests: list[tuple[int, int]]) -> dict[int, list[int]]:
        """Give each rest to the check with the least load, the largest rests first.

        The full pieces are dealt already: round robin, so check number `n` holds the pieces `n`,
        `n + rounds`, ... of all.
        """
        each, more = divmod(self._full, self.rounds)
        # No other checks than those that have the least now can get one.
        checks = [(more + index) % self.rounds for index in range(min(self.rounds, len(rests)))]
        loads = [((each + (check < more)) * self.piece, order) for order, check in enumerate(checks)]
        heapq.heapify(loads)
        dealt: dict[int, list[int]] = {}
        for cost, place in sorted(rests, key=lambda rest: -rest[0]):
            load, order = loads[0]
            dealt.setdefault(checks[order], []).append(place)
            heapq.heapreplace(loads, (load + cost, order))
        return dealt

    def sample(self, check: int) -> tuple[Piece, ...]:
        """Return what check number `check` looks at, from 0; the same again after `rounds` checks."""
        check %= self.rounds
        pieces = [self._piece(number) for number in range(check, self._full, self.rounds)]
        for place in self._rests.get(check, ()):
            name, size = self._sizes[place]
            pieces.append(Piece(name, size - size % self.piece, size, size))
        return tuple(pieces)

    def covers_after(self, every: int = 1) -> int:
        """Return after how many steps every element was seen, with a check in every `every` steps."""
        return self.rounds * every

    def _piece(self, number: int) -> Piece:
        place = bisect_right(self._first, number) - 1
        name, size = self._sizes[place]
        start = (number - self._first[place]) * self.piece
        return Piece(name, start, start + self.piece, size)


def size_of(tensor: Tensor) -> int:
    """Return how many numbers this rank holds of a tensor; a complex one is two."""
    return local(tensor).numel() * (2 if tensor.is_complex() else 1)


def cut(tensor: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a tensor as flat real numbers, 1-dim; no wait, and no copy of a contiguous tensor.

    Of a distributed tensor a piece of the shard. A sparse gradient has other values in each step: of those
    that it stores, as many at most from about the same place.
    """
    values = local(tensor).detach()
    if values.is_sparse:
        values = values._values()  # coalescing would wait for the device
    elif values.is_nested or values.layout is not torch.strided:
        values = values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    values = values.resolve_neg()
    count = values.numel()
    start, stop = piece.start, piece.stop
    if count != piece.whole:
        start = start * count // piece.whole
        stop = count if stop == piece.whole else stop * count // piece.whole
        stop = min(stop, start + len(piece))
    if values.is_contiguous():
        return values.view(-1)[start:stop]
    inner = count // values.shape[0]  # copy the rows that the piece touches, not everything
    first, last = start // inner, -(-stop // inner)
    return values[first:last].reshape(-1)[start - first * inner : stop - first * inner]
