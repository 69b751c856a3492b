"""What it takes to undo or replay the step in flight: its micro-batches, random states and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradsentinel.buffers import BufferShadow
from gradsentinel.rng import RngState


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch, by reference, and the random state just before it entered the model."""

    index: int
    batch: Any
    rng: RngState


class Scene:
    """The step in flight; holds references and small copies only."""

    def __init__(
        self, modules: Iterable[tuple[str, nn.Module]], *, device_types: tuple[str, ...] = ()
    ) -> None:
        self._device_types = device_types
        self.buffers = BufferShadow(modules)
        self.rng: RngState | None = None
        """Random state before the step."""
        self.microbatches: list[MicroBatch] = []
        self.healthy: tuple[MicroBatch, ...] = ()
        """Micro-batches of the last step that was applied without an incident: what is normal here."""

    def begin(self, *, same_batches: bool = False) -> None:
        """Forget the last step and remember the state before the next one, perhaps of the same batches."""
        if not same_batches:
            self.microbatches.clear()
        self.buffers.capture()
        self.rng = RngState.capture(self._device_types)

    def add(self, batch: Any) -> None:
        """Remember a micro-batch that is about to enter the model."""
        rng = RngState.capture(self._device_types)
        if not self.microbatches:
            self.rng = rng
        self.microbatches.append(MicroBatch(len(self.microbatches), batch, rng))

    def as_mapping(self) -> Mapping[str, Any]:
        """Return the scene as the incident event carries it."""
        return {"microbatches": tuple(self.microbatches), "rng": self.rng}
