"""From the findings of all detectors to one agreed ruling, with a fixed number of launches and one read.

The device's part and the host's part are apart: `Judge.submit` waits for nothing, `Submission.ruling`
is what the numbers say once somebody has read them, at once or some steps later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradsentinel.decision import Action
from gradsentinel.devices import device_of
from gradsentinel.evidence import Finding
from gradsentinel.ranks.consensus import Consensus

_MOST_PLANS = 16
"""So many layouts are kept; a detector whose bound changes with every step would fill the memory."""


Row = tuple[int, int, float, Action]
"""A slot, where its number stands, its bound, and the level if that is broken."""


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


@dataclass(frozen=True, slots=True)
class Submission:
    """What was agreed about a step, still on the device; nobody has waited for it yet."""

    levels: Tensor | None
    """1-dim int32: a level per detector slot, per bound on an extra number, per thing that is due. None if
    this rank is alone and reads the numbers at once: then the host compares them, in no launch at all."""
    packed: Tensor
    """1-dim: every number that travels, each once."""
    filed: tuple[Filed, ...]
    rows: Sequence[Row]
    """What was compared: of each filed finding, and then of each bound on an extra number that is there."""
    limits: Mapping[int, float]
    """The bound of each row, as it was compared."""
    extras: Mapping[str, int]
    """Where in `packed` an extra number stands."""
    slots: int
    bounds: int
    due: tuple[bool, ...]

    def sheet(self) -> Tensor:
        """Return all there is to read as one 1-dim tensor, on the device; no wait."""
        if self.levels is None:
            return self.packed
        return torch.cat([self.levels.to(self.packed.dtype), self.packed])

    def condemned(self) -> Tensor:
        """Return whether any rank wants the step undone, 0-dim bool, on the device; no wait."""
        levels = self._on_device()
        if not self.slots:
            return torch.zeros((), dtype=torch.bool, device=levels.device)
        return levels[: self.slots].amax() >= int(Action.RETRY)

    def broken(self, bound: int) -> Tensor:
        """Return whether a bound on an extra number is broken on any rank, 0-dim bool; no wait."""
        return self._on_device()[self.slots + bound] > 0

    def _on_device(self) -> Tensor:
        if self.levels is None:
            raise RuntimeError("this was to be read at once: the device compared nothing")
        return self.levels

    def ruling(self, sheet: Sequence[float]) -> Ruling:
        """Return what the numbers of the sheet say, once they are on the host."""
        last = self.slots + self.bounds
        head = last + len(self.due) if self.levels is not None else 0
        numbers = sheet[head:]
        breaks = [
            row
            for row, (_, place, _, _) in enumerate(self.rows)
            if not abs(numbers[place]) <= self.limits[row]
        ]
        if self.levels is None:
            levels: list[float] = [Action.CONTINUE] * last
            for slot, _, _, action in map(self.rows.__getitem__, breaks):
                levels[slot] = max(levels[slot], action)
            due: Sequence[float] = self.due
        else:
            levels, due = list(sheet[:last]), sheet[last:head]
        return Ruling(
            levels=tuple(Action(int(level)) if level else Action.CONTINUE for level in levels[: self.slots]),
            fired=tuple(self.filed[row] for row in breaks if row < len(self.filed)),
            values={name: numbers[place] for name, place in self.extras.items()},
            due=tuple(bool(flag) for flag in due),
            broken=tuple(bool(level) for level in levels[self.slots :]),
        )


class Judge:
    """Compares the values of all findings with their bounds at once and reads the result once.

    The number of kernel launches is the same for one detector and for fifty: the values are stacked,
    compared in one go, reduced to one level per detector slot, agreed over the ranks and fetched
    together with the numbers that the log wants anyway.
    """

    def __init__(self, consensus: Consensus, *, slots: int = 0) -> None:
        self.consensus = consensus
        self.slots = slots
        self._plans: dict[object, tuple[Tensor, Tensor, Tensor, dict[int, float]]] = {}
        """The few layouts that a run has, laid out on the device already."""
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
        """Return the agreed ruling; called on every rank, waits for the device once."""
        submission = self.submit(filed, extras, device, due=due, bounds=bounds, at_once=True)
        return submission.ruling(submission.sheet().tolist())

    def submit(
        self,
        filed: Sequence[Filed],
        extras: Mapping[str, Tensor],
        device: torch.device,
        *,
        due: tuple[bool, ...] = (),
        bounds: Sequence[tuple[str, float]] = (),
        agree: bool = True,
        at_once: bool = False,
    ) -> Submission:
        """Compare and agree without waiting for the device; called on every rank.

        `due` travels along, so that ranks which do not know alike what comes after the step still do alike;
        so does whether some of the extra numbers, by name, break a bound on any rank. Both have the same
        length on every rank, also on one that lacks such a number. Without `agree` nothing is sent: every
        rank has to know by itself that none suspects anything. `at_once` says that the ruling is read next
        and nothing on the device depends on it: a rank that is alone then leaves the comparing to the host.
        """
        everywhere = {id(value) for value in extras.values()}
        places: dict[int, int] = {}
        stack: list[Tensor] = []
        for value in (*extras.values(), *(entry.finding.value for entry in filed)):
            if id(value) not in places:
                places[id(value)] = len(stack)
                stack.append(_scalar(value, reduce=id(value) in everywhere))
        wide = any(value.dtype is torch.float64 for value in stack)
        dtype = device_of(device).wide if wide else torch.float32
        if stack:
            numbers = [
                value if value.dtype is dtype and value.device == device else value.to(device, dtype)
                for value in stack
            ]
            packed = torch.stack(numbers)
        else:
            packed = torch.zeros(0, dtype=dtype, device=device)
        largest = torch.finfo(dtype).max  # an infinite bound would let an infinite value pass
        rows: list[Row] = [
            (
                entry.slot,
                places[id(entry.finding.value)],
                _bound(entry.finding, largest),
                entry.finding.action,
            )
            for entry in filed
        ] + [
            (self.slots + number, places[id(extras[name])], min(bound, largest), Action.WARN)
            for number, (name, bound) in enumerate(bounds)
            if name in extras
        ]
        slots = self.slots + len(bounds)
        levels: Tensor | None = None
        if at_once and agree and self.consensus.world_size == 1:
            limits = self._plan(packed, rows, slots)[3] if rows else {}
        else:
            levels, limits = self._levels(packed, rows, slots)
        if levels is not None and due:
            flags = self._due.get(due)
            if flags is None or flags.device != levels.device:
                flags = self._due[due] = device_of(device).send(torch.tensor(due, dtype=torch.int32))
            levels = torch.cat([levels, flags])
        return Submission(
            levels=self.consensus.agree(levels) if agree and levels is not None else levels,
            packed=packed,
            filed=tuple(filed),
            rows=rows,
            limits=limits,
            extras={name: places[id(value)] for name, value in extras.items()},
            slots=self.slots,
            bounds=len(bounds),
            due=due,
        )

    def _levels(self, packed: Tensor, rows: Sequence[Row], slots: int) -> tuple[Tensor, dict[int, float]]:
        """One int32 level per slot, on the device, and the bound of each row as it was compared."""
        if not rows:
            return torch.zeros(slots, dtype=torch.int32, device=packed.device), {}
        index, limit, action, limits = self._plan(packed, rows, slots)
        broken = (packed.abs()[index] <= limit).logical_not()
        return (broken.to(torch.int32) * action).amax(1), limits

    def _plan(
        self, packed: Tensor, rows: Sequence[Row], slots: int
    ) -> tuple[Tensor, Tensor, Tensor, dict[int, float]]:
        """Return a layout that was made before, or make it."""
        key = (slots, packed.device, packed.dtype, tuple(rows))
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._lay_out(packed, rows, slots)
        return plan

    def _lay_out(
        self, packed: Tensor, rows: Sequence[Row], slots: int
    ) -> tuple[Tensor, Tensor, Tensor, dict[int, float]]:
        """Index, bound and action matrices [slots, most rows of one slot], padded with harmless rows."""
        columns: dict[int, list[tuple[int, float, Action]]] = {slot: [] for slot in range(slots)}
        for slot, position, bound, action in rows:
            columns[slot].append((position, bound, action))
        width = max(len(column) for column in columns.values())
        for column in columns.values():
            column.extend([(0, float("inf"), Action.CONTINUE)] * (width - len(column)))
        table = [columns[slot] for slot in range(slots)]
        device, dtype = device_of(packed.device), packed.dtype
        bounds = torch.tensor([[cell[1] for cell in row] for row in table], dtype=dtype)
        limits = {
            position: float(torch.tensor(bound, dtype=dtype))
            for position, (_, _, bound, _) in enumerate(rows)
        }
        return (
            device.send(torch.tensor([[cell[0] for cell in row] for row in table])),
            device.send(bounds),
            device.send(torch.tensor([[int(cell[2]) for cell in row] for row in table], dtype=torch.int32)),
            limits,
        )


def _scalar(value: Tensor, *, reduce: bool) -> Tensor:
    """A value as a plain 0-dim tensor; of a distributed one the whole with `reduce`, else this rank's part.

    Every rank has the extra numbers, but perhaps not the findings (its detector may have raised), so for
    those nobody may wait. Their parts say more, too: which rank it is that has the bad one.
    """
    if type(value) is Tensor and not value.requires_grad and not value.dim():
        return value
    value = value.detach()
    if hasattr(value, "full_tensor"):
        value = value.full_tensor() if reduce else value.to_local()  # type: ignore[attr-defined]
    return value.reshape(()) if value.numel() else value.new_zeros(())


def _bound(finding: Finding, largest: float) -> float:
    if finding.limit is not None:
        return min(finding.limit, largest)
    return 0.5 if finding.value.dtype is torch.bool else largest
