"""Whether numbers that are looked up are those of the micro-batch in flight; all others are passed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsentinel.callbacks.batch_fields import Field
from gradsentinel.callbacks.batch_links import beyond

_SURE = 8
"""Fewer numbers than that are a constant apart by chance."""
_NEAR = 2
"""What has more than so many times the numbers, or fewer than one of so many, is another field."""

Values = Sequence[tuple[Field, Tensor]]


@dataclass(slots=True)
class Matches:
    """The integer fields of a micro-batch, and what may be of them.

    Numbers are a field's if they are the same memory, or equal, or a constant apart; and if they are a part
    of a field, or what the model has made of it, those beyond the table are among the field's own.
    """

    fields: Values = ()
    _sorted: dict[torch.device, Tensor] = field(default_factory=dict)
    """All numbers of the fields that are on a device, in order."""

    def take(self, fields: Values) -> None:
        """Take the integer fields of the next micro-batch."""
        self.fields = fields
        self._sorted.clear()

    def hold(self, numbers: Tensor) -> bool:
        """Say whether these are the numbers of one of the fields, one by one; no wait."""
        for _, values in self.fields:
            if values.device != numbers.device:
                continue
            if _same_memory(values, numbers):
                return True
            if numbers.device.type == "cpu" and equal(values, numbers):
                return True
        return False

    def on_host(self, numbers: Tensor, bad: Tensor, shifts: dict[str, set[int]]) -> list[tuple[str, int]]:
        """Return the paths of the fields that numbers on the host are of, and what was added to each.

        Args:
            numbers: what is looked up.
            bad: which of them the table has not; one at least.
            shifts: by path: what the model is known to add to a field before it looks it up.
        """
        numbers = numbers.flatten().to(torch.int64)
        wrong = numbers[bad.flatten()]
        whole: list[tuple[str, int]] = []
        partly: list[tuple[str, int]] = []
        for one, given in self.fields:
            values = given.flatten().to(
                "cpu", torch.int64
            )  # waits only where the program has done so already
            known = shifts.get(one.path, set())
            shift = apart(values, numbers)
            if shift is not None and (shift == 0 or shift in known or _tells(values)):
                whole.append((one.path, shift))
                continue
            for shift in (0, *sorted(known - {0})):
                if bool(torch.isin(wrong - shift, values).all()):
                    partly.append((one.path, shift))
                    break
        return whole or partly

    def on_device(self, numbers: Tensor, size: int, ignore: int | None) -> Tensor | None:
        """Return which numbers are beyond a table, and of the batch; None: none can be; no wait.

        Decided on the device, of what the host does not know.
        """
        near = [values for _, values in self.fields if values.device == numbers.device]
        if any(_same_memory(values, numbers) for values in near):
            return beyond(numbers, size, ignore)
        flat = numbers.flatten().to(torch.int64)
        bad = beyond(numbers, size, ignore)
        known: list[Tensor] = []
        tests: list[Tensor] = []
        for _, given in self.fields:
            if given.device == numbers.device:
                values = given.flatten().to(torch.int64)
                if values.numel() == flat.numel() and values.numel() >= _SURE:
                    shifts = flat - values
                    tests.append((shifts == shifts[0]).all() & (values != values[0]).any())
            elif given.device.type == "cpu":
                strange = beyond(given, size, ignore)
                if bool(strange.any()):
                    known.append(torch.unique(given[strange].to(torch.int64)))
                if flat.numel() == given.numel() >= _SURE:
                    values = given.flatten().to(flat.device, torch.int64, non_blocking=True)
                    shifts = flat - values
                    tests.append((shifts == shifts[0]).all() & (values != values[0]).any())
        if near:
            tests.append(_among(flat, bad.flatten(), self._in_order(near, numbers.device)))
        if known:
            order = torch.cat(known).sort().values.to(flat.device, non_blocking=True)
            tests.append(_among(flat, bad.flatten(), order))
        return bad & torch.stack(tests).any() if tests else None

    def _in_order(self, near: Sequence[Tensor], device: torch.device) -> Tensor:
        order = self._sorted.get(device)
        if order is None:
            order = torch.cat([values.flatten().to(torch.int64) for values in near]).sort().values
            self._sorted[device] = order
        return order


def near_in_size(one: int, other: int) -> bool:
    """Say whether a field of so many numbers may be what so many are looked up of."""
    return one <= _NEAR * other and other <= _NEAR * one


def equal(values: Tensor, numbers: Tensor) -> bool:
    """Say whether two tensors on the host hold the same numbers in the same order."""
    if values.numel() != numbers.numel():
        return False
    return torch.equal(values.flatten().to(torch.int64), numbers.flatten().to(torch.int64))


def apart(values: Tensor, numbers: Tensor) -> int | None:
    """Return by how much all of these numbers on the host are above those values; None if it differs."""
    if values.numel() != numbers.numel() or not values.numel():
        return None
    shifts = numbers.flatten().to(torch.int64) - values.flatten().to(torch.int64)
    return int(shifts[0]) if bool((shifts == shifts[0]).all()) else None


def _tells(values: Tensor) -> bool:
    """Say whether to be a constant apart from these is no chance."""
    return values.numel() >= _SURE and bool((values != values[0]).any())


def _among(numbers: Tensor, bad: Tensor, order: Tensor) -> Tensor:
    """Return whether all bad numbers are among those in order, 0-dim bool; no wait."""
    at = torch.searchsorted(order, numbers).clamp_(max=order.numel() - 1)
    return ((order.take(at) == numbers) | ~bad).all()


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Say whether the second of two plain tensors on one device is a view of a part of the first."""
    if one.dtype is not other.dtype or not one.data_ptr():
        return False
    first, last = _extent(one)
    begins, ends = _extent(other)
    return first <= begins and ends <= last


def _extent(one: Tensor) -> tuple[int, int]:
    """Return where in memory a tensor begins, and where it ends."""
    steps = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
    begins = one.data_ptr()
    return begins, begins + (1 + steps) * one.element_size()
