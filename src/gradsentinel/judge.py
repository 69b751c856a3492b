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

    def rule(self, filed: Sequence[Filed], extras: Mapping[str, Tensor], device: torch.device) -> Ruling:
        """Return the agreed ruling; called on every rank, waits for the device once."""
        place: dict[int, int] = {}
        stack: list[Tensor] = []
        for value in (*(entry.finding.value for entry in filed), *extras.values()):
            if id(value) not in place:
                place[id(value)] = len(stack)
                stack.append(value)
        wide = any(value.dtype is torch.float64 for value in stack) and device.type != "npu"
        dtype = torch.float64 if wide else torch.float32
        packed = torch.zeros(0, dtype=dtype, device=device)
        if stack:
            packed = torch.stack([_scalar(value).to(device=device, dtype=dtype) for value in stack])
        levels, limits = self._levels(packed, filed, place)
        levels = self.consensus.agree(levels)
        host = torch.cat([levels.to(dtype), packed]).tolist()
        agreed = tuple(Action(int(level)) for level in host[: self.slots])
        numbers = host[self.slots :]
        fired = tuple(
            entry
            for position, entry in enumerate(filed)
            if not abs(numbers[place[id(entry.finding.value)]]) <= limits[position]
        )
        values = {name: numbers[place[id(value)]] for name, value in extras.items()}
        return Ruling(agreed, fired, values)

    def _levels(
        self, packed: Tensor, filed: Sequence[Filed], place: Mapping[int, int]
    ) -> tuple[Tensor, dict[int, float]]:
        """One int32 level per slot, on the device, and the bound of each finding as it was compared."""
        if not filed:
            return torch.zeros(self.slots, dtype=torch.int32, device=packed.device), {}
        key = (
            self.slots,
            packed.device,
            packed.dtype,
            tuple(
                (
                    entry.slot,
                    place[id(entry.finding.value)],
                    _bound(entry.finding, packed.dtype),
                    entry.finding.action,
                )
                for entry in filed
            ),
        )
        if self._plan is None or key != self._key:
            self._plan, self._key = self._lay_out(packed, key[3]), key
        index, limit, action, limits = self._plan
        broken = (packed.abs()[index] <= limit).logical_not()
        return (broken.to(torch.int32) * action).amax(1), limits

    def _lay_out(
        self, packed: Tensor, rows: Sequence[tuple[int, int, float, Action]]
    ) -> tuple[Tensor, Tensor, Tensor, dict[int, float]]:
        """Index, bound and action matrices [slots, most findings of one slot], padded with harmless rows."""
        columns: dict[int, list[tuple[int, float, Action]]] = {slot: [] for slot in range(self.slots)}
        for slot, position, bound, action in rows:
            columns[slot].append((position, bound, action))
        width = max(len(column) for column in columns.values())
        for column in columns.values():
            column.extend([(0, float("inf"), Action.CONTINUE)] * (width - len(column)))
        table = [columns[slot] for slot in range(self.slots)]
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


def _scalar(value: Tensor) -> Tensor:
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.reshape(())


def _bound(finding: Finding, dtype: torch.dtype) -> float:
    largest = torch.finfo(dtype).max  # an infinite bound would let an infinite value pass
    if finding.limit is not None:
        return min(finding.limit, largest)
    return 0.5 if finding.value.dtype is torch.bool else largest
