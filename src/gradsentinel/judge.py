"""From the findings of all detectors to one agreed ruling, with a fixed number of launches and one read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsentinel.consensus import Consensus
from gradsentinel.decision import Action
from gradsentinel.evidence import Finding


@dataclass(frozen=True, slots=True)
class Filed:
    """A finding with the detector's slot and the step it belongs to."""

    slot: int
    step: int
    finding: Finding
    detector: str = ""
    """Who found it."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What the ranks agreed on, on the host."""

    levels: tuple[Action, ...]
    """The most severe action any rank suspects, per detector slot."""
    fired: tuple[Filed, ...]
    """The findings of this rank whose value broke its bound."""
    values: Mapping[str, float]
    """The extra numbers that travelled along."""
    due: tuple[bool, ...] = ()
    """What is due after the step: true where it is on any rank."""
    broken: tuple[bool, ...] = ()
    """Which of the bounds on extra numbers are broken: true where they are on any rank."""

    @property
    def suspicious(self) -> bool:
        """True if any rank suspects anything."""
        return any(self.levels)


class Judge:
    """Compares the values of all findings with their bounds at once and reads the result once.

    The number of kernel launches is the same for one detector and for fifty: the values are stacked,
    compared in one go, reduced to one level per detector slot, agreed over the ranks and fetched
    together with the numbers that the log wants anyway.
    """

    def __init__(self, consensus: Consensus, *, slots: int = 0) -> None:
        self.consensus = consensus
        self.slots = slots
        self._key: object = None
        self._plan: tuple[Tensor, Tensor, Tensor, dict[int, float]] | None = None
        self._due: dict[tuple[bool, ...], Tensor] = {}
        """The few answers to what is due, on the device already: making them anew would wait for it."""

    def rule(
        self,
        filed: Sequence[Filed],
        extras: Mapping[str, Tensor],
        device: torch.device,
        *,
        due: tuple[bool, ...] = (),
        bounds: Sequence[tuple[str, float]] = (),
    ) -> Ruling:
        """Return the agreed ruling; called on every rank, waits for the device once.

        `due` travels along, so that ranks which do not know alike what comes after the step still do alike;
        so does whether some of the extra numbers, by name, break a bound on any rank. Both have the same
        length on every rank, also on one that lacks such a number.
        """
        everywhere = {id(value) for value in extras.values()}
        place: dict[int, int] = {}
        stack: list[Tensor] = []
        for value in (*extras.values(), *(entry.finding.value for entry in filed)):
            if id(value) not in place:
                place[id(value)] = len(stack)
                stack.append(_scalar(value, reduce=id(value) in everywhere))
        wide = any(value.dtype is torch.float64 for value in stack) and device.type != "npu"
        dtype = torch.float64 if wide else torch.float32
        packed = torch.zeros(0, dtype=dtype, device=device)
        if stack:
            packed = torch.stack([value.to(device=device, dtype=dtype) for value in stack])
        largest = torch.finfo(dtype).max  # an infinite bound would let an infinite value pass
        rows = [
            (entry.slot, place[id(entry.finding.value)], _bound(entry.finding, largest), entry.finding.action)
            for entry in filed
        ] + [
            (self.slots + number, place[id(extras[name])], min(bound, largest), Action.WARN)
            for number, (name, bound) in enumerate(bounds)
            if name in extras
        ]
        slots = self.slots + len(bounds)
        levels, limits = self._levels(packed, rows, slots)
        if due:
            flags = self._due.get(due)
            if flags is None or flags.device != levels.device:
                flags = self._due[due] = torch.tensor(due, dtype=torch.int32, device=device)
            levels = torch.cat([levels, flags])
        levels = self.consensus.agree(levels)
        host = torch.cat([levels.to(dtype), packed]).tolist()
        agreed = tuple(Action(int(level)) for level in host[: self.slots])
        broken = tuple(bool(level) for level in host[self.slots : slots])
        told = tuple(bool(flag) for flag in host[slots : slots + len(due)])
        numbers = host[slots + len(due) :]
        fired = tuple(
            entry
            for position, entry in enumerate(filed)
            if not abs(numbers[place[id(entry.finding.value)]]) <= limits[position]
        )
        values = {name: numbers[place[id(value)]] for name, value in extras.items()}
        return Ruling(agreed, fired, values, told, broken)

    def _levels(
        self, packed: Tensor, rows: Sequence[tuple[int, int, float, Action]], slots: int
    ) -> tuple[Tensor, dict[int, float]]:
        """One int32 level per slot, on the device, and the bound of each row as it was compared.

        A row is a slot, the position of its number, its bound, and the level if the bound is broken.
        """
        if not rows:
            return torch.zeros(slots, dtype=torch.int32, device=packed.device), {}
        key = (slots, packed.device, packed.dtype, tuple(rows))
        if self._plan is None or key != self._key:
            self._plan, self._key = self._lay_out(packed, rows, slots), key
        index, limit, action, limits = self._plan
        broken = (packed.abs()[index] <= limit).logical_not()
        return (broken.to(torch.int32) * action).amax(1), limits

    def _lay_out(
        self, packed: Tensor, rows: Sequence[tuple[int, int, float, Action]], slots: int
    ) -> tuple[Tensor, Tensor, Tensor, dict[int, float]]:
        """Index, bound and action matrices [slots, most rows of one slot], padded with harmless rows."""
        columns: dict[int, list[tuple[int, float, Action]]] = {slot: [] for slot in range(slots)}
        for slot, position, bound, action in rows:
            columns[slot].append((position, bound, action))
        width = max(len(column) for column in columns.values())
        for column in columns.values():
            column.extend([(0, float("inf"), Action.CONTINUE)] * (width - len(column)))
        table = [columns[slot] for slot in range(slots)]
        device, dtype = packed.device, packed.dtype
        bounds = torch.tensor([[cell[1] for cell in row] for row in table], dtype=dtype)
        limits = {
            position: float(torch.tensor(bound, dtype=dtype))
            for position, (_, _, bound, _) in enumerate(rows)
        }
        return (
            torch.tensor([[cell[0] for cell in row] for row in table], device=device),
            bounds.to(device),
            torch.tensor([[int(cell[2]) for cell in row] for row in table], dtype=torch.int32, device=device),
            limits,
        )


def _scalar(value: Tensor, *, reduce: bool) -> Tensor:
    """A value as a plain 0-dim tensor; of a distributed one the whole with `reduce`, else this rank's part.

    Every rank has the extra numbers, but perhaps not the findings (its detector may have raised), so for
    those nobody may wait. Their parts say more, too: which rank it is that has the bad one.
    """
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor() if reduce else value.to_local()  # type: ignore[attr-defined]
    return value.reshape(()) if value.numel() else value.new_zeros(())


def _bound(finding: Finding, largest: float) -> float:
    if finding.limit is not None:
        return min(finding.limit, largest)
    return 0.5 if finding.value.dtype is torch.bool else largest
