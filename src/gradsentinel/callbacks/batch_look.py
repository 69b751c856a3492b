"""What was seen of a micro-batch, and the findings that are made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.again.scene import MicroBatch
from gradsentinel.callbacks.batch_evidence import evidence_of_oddities
from gradsentinel.callbacks.batch_habits import Oddity
from gradsentinel.callbacks.batch_links import Misses
from gradsentinel.callbacks.batch_reading import Reading
from gradsentinel.data.records import sample_ids
from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.measures.mailbox import Letter, Mailbox


@dataclass(slots=True)
class Look:
    """What was seen of a micro-batch."""

    step: int
    microbatch: int
    batch: Any
    empty: bool = False
    drawn: MicroBatch | None = None
    """The same as the run has it."""
    letters: list[tuple[Reading, Mailbox | None, Letter]] = field(default_factory=list)
    """What was measured, and its numbers on their way; None: they were made in host memory."""
    misses: Misses | None = None
    """What was looked up in vain; None: nobody listened."""
    judged: bool = False
    """True once its backward pass was seen."""
    sheets: list[list[float]] | None = None
    """What the letters say, once somebody has read them."""
    bad: Tensor | None = None
    asked: bool = False
    """True once somebody wanted to know whether it is bad."""

    @property
    def ids(self) -> dict[int, Any]:
        """The ids of its records, by position."""
        return sample_ids(self.batch) if self.drawn is None else self.drawn.ids

    def arrived(self) -> bool:
        """Return True if its numbers can be read."""
        for _, _, letter in self.letters:  # noqa: SIM110 - in each step: without a generator
            if not letter.arrived():
                return False
        return True

    def read(self) -> list[tuple[Reading, list[float]]]:
        """Return what was measured, with its numbers."""
        if self.sheets is None:
            self.sheets = [letter.read() for _, _, letter in self.letters]
        return [(reading, sheet) for (reading, _, _), sheet in zip(self.letters, self.sheets, strict=True)]

    def spoils(self, device: torch.device | None) -> Tensor | None:
        """Return whether something is wrong that may spoil the step, 0-dim bool on the device; None: no.

        Found out when it is asked for first: most steps need no more than a glance, and nobody asks.
        """
        if not self.asked:
            self.asked = True
            flags = [reading.suspicion() for reading, _, _ in self.letters]
            if self.empty:
                flags.append(torch.ones((), dtype=torch.bool))
            for flag in flags:
                self.bad = either(self.bad, None if flag is None else flag_on(device, flag))
        return self.bad


def flag_on(device: torch.device | None, flag: Tensor) -> Tensor | None:
    """Return a flag on a device; None if it is false and in host memory, where looking waits for nothing."""
    if device is None:
        return flag
    if flag.device.type == "cpu" and device.type != "cpu" and not bool(flag):
        return None
    return flag.to(device, non_blocking=True)


def either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return where either is true; 0-dim, no wait."""
    if one is None or other is None:
        return other if one is None else one
    return one | other


def where_bad(bad: Tensor, value: Tensor) -> Tensor:
    """Return the value if the batch is bad, else 0; 0-dim, no wait."""
    return torch.where(bad.to(value.device), value.detach().reshape(()), 0.0)


def was_fine(event: events.AfterStep) -> bool:
    """Return True for a step that was made and is finite."""
    return event.applied and math.isfinite(event.grad_norm) and math.isfinite(event.loss or 0.0)


def warning(confirm: Callable[[], Evidence | None]) -> Finding:
    """Return a finding that only tells."""
    return Finding(kind=Kind.CUSTOM, value=torch.tensor(True), action=Action.WARN, confirm=confirm)


def told_of(odd: Sequence[Oddity], look: Look) -> Callable[[], Evidence | None]:
    """Return what says what is out of the ordinary."""
    return lambda: evidence_of_oddities(odd, look.batch, look.ids, look.microbatch)
