"""What detectors suspect, and what is left of it when the host looks closer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsentinel.decision import Action, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEvidence:
    """What is wrong with one named tensor (a gradient, a parameter, a buffer, a moment)."""

    name: str
    nonfinite: int
    """Number of elements that are NaN or Inf."""
    numel: int
    norm: float
    """2-norm, infinite or NaN if an element is."""
    first_index: tuple[int, ...] | None = None
    """Position of the first non-finite element."""
    counted: bool = True
    """False when the tensor was gone before anybody could count: `nonfinite` 1 then means at least one."""

    def as_dict(self) -> dict[str, Any]:
        """JSON form; keys as in incident.json."""
        return {
            "name": self.name,
            "nonfinite": self.nonfinite,
            "numel": self.numel,
            "norm": self.norm,
            "first_index": None if self.first_index is None else list(self.first_index),
            "counted": self.counted,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One record of the micro-batch that holds the fault."""

    position: int
    """Index in the micro-batch."""
    id: Any = None
    """The user's own id of the record, if the batch carries one."""
    field: str = ""
    """Where in the batch, as a dotted path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Cause, place and evidence."""

    cause: str
    """data, precision, math, operator, hardware, optimizer, desync, setup or unknown."""
    confidence: float
    phase: str | None = None
    """setup, input, forward, loss, backward, reduce or optimizer, where it is known."""
    module: str | None = None
    op: str | None = None
    node: str | None = None
    source: str | None = None
    evidence: tuple[str, ...] = ()
    remedy: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON form; keys as in incident.json."""
        return {
            "cause": self.cause,
            "confidence": self.confidence,
            "phase": self.phase,
            "module": self.module,
            "op": self.op,
            "node": self.node,
            "source": self.source,
            "evidence": list(self.evidence),
            "remedy": list(self.remedy),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A confirmed finding, on the host, in words and numbers."""

    kind: Kind
    action: Action
    message: str
    """One plain sentence: what was seen, and where."""
    tensors: tuple[TensorEvidence, ...] = ()
    microbatch: int | None = None
    samples: tuple[Sample, ...] = ()
    origin: bool = True
    """False when this rank only received the bad value from others."""
    diagnosis: Diagnosis | None = None
    """As far as it is known without running anything again."""
    details: Mapping[str, Any] = field(default_factory=dict)
    about: tuple[str, ...] = ()
    """The parameters, fields or modules that it is about, by which a warning is told from the one before: of
    other names it is news at once, of the same it goes on. Empty: of the step as a whole."""
    once: bool = False
    """True if the detector asks until this is told (it hears of it in `on_incident`), and not again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a detector suspects: one number on the device, and the bound it should keep.

    The bus compares the values of all detectors in one go and reads the result once, so a detector
    never synchronises. `confirm` runs later, on the host, and only when some rank's value broke its
    bound in this detector's slot; returning None withdraws the suspicion.
    """

    kind: Kind
    value: Tensor
    """0-dim tensor. A bool must be False, any other number must be finite and within `limit`."""
    limit: float | None = None
    """Largest magnitude allowed; None asks only for a finite value."""
    action: Action = Action.SKIP
    message: str = ""
    """Used as the evidence when there is no `confirm`."""
    confirm: Callable[[], Evidence | None] | None = None
    microbatch: int | None = None

    def __post_init__(self) -> None:
        # A callback that counts on the host may give a plain bool or number.
        given: Any = self.value
        if not isinstance(given, Tensor):
            object.__setattr__(self, "value", torch.as_tensor(given))

    def resolve(self) -> Evidence | None:
        """Return the confirmed evidence, or None if the suspicion was unfounded."""
        if self.confirm is not None:
            return self.confirm()
        return Evidence(
            kind=self.kind,
            action=self.action,
            message=self.message or f"{self.kind} reported by a detector",
            microbatch=self.microbatch,
        )
