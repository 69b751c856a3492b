"""What the replay of a step showed: the material of a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from gradsentinel.diagnosis.operands import Operand, bad_index, bad_rows, operands_of, tensors_of
from gradsentinel.diagnosis.record import Call, Event
from gradsentinel.diagnosis.replay import Computed
from gradsentinel.diagnosis.scan import sample_ids
from gradsentinel.diagnosis.swap import HALF, batch_size
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.diagnosis.walk import Path, call_of
from gradsentinel.run import Run
from gradsentinel.scene import MicroBatch


@dataclass(slots=True, kw_only=True)
class Findings:
    """One traced micro-batch, the path of its bad values, and what the swap tests said."""

    run: Run
    microbatch: MicroBatch
    trace: Trace
    computed: Computed
    path: Path
    origin: Event
    healthy_others: int = 0
    """Micro-batches of the same step that were finite."""
    finite_in_wide: bool | None = None
    finite_with_known_good: bool | None = None
    """With the weights of the known-good state, on the same batch."""
    rows: tuple[int, ...] = ()
    """Samples that look guilty by the shape of the bad result."""
    finite_without_rows: bool | None = None
    outliers: Mapping[str, list[int]] = field(default_factory=dict)
    operands: list[Operand] = field(default_factory=list)
    finite_on_cpu: bool | None = None
    """The operator alone, on the same inputs, computed on the CPU; None if it ran there anyway."""
    repeatable: bool | None = None
    """What the operator alone does on the same inputs: False if its result is finite then."""

    @classmethod
    def of(cls, run: Run, microbatch: MicroBatch, trace: Trace, computed: Computed, path: Path) -> Findings:
        """Look at the origin's operands and samples."""
        origin = path.origins[0]
        found = cls(run=run, microbatch=microbatch, trace=trace, computed=computed, path=path, origin=origin)
        found.operands = operands_of(origin)
        found.rows = tuple(found.suspect_rows())
        return found

    @property
    def call(self) -> Call:
        """Where the origin was called from."""
        return call_of(self.trace, self.origin)

    @property
    def node(self) -> str | None:
        """The origin's autograd node, or the one through which its value came back."""
        if self.origin.node is not None:
            return self.origin.node
        if self.path.reentry is not None:
            return self.path.reentry.node
        known = self.computed.nodes.get(self.origin.sequence)
        return known[0] if known is not None and (self.origin.first or self.custom) else None

    @property
    def custom(self) -> str | None:
        """The user's own operator in which the origin ran, if it did."""
        if self.origin.custom is not None:
            return self.origin.custom
        known = self.computed.nodes.get(self.origin.sequence)
        inside = known is not None and known[1] and self.origin.in_no_grad and not self.origin.backward
        return known[0] if inside and known is not None else None

    @property
    def half(self) -> str | None:
        """The narrow dtype that the origin worked in or produced, if it did."""
        dtypes = [o.dtype for o in self.operands] + [r.dtype for r in self.origin.results]
        return next((str(d).removeprefix("torch.") for d in dtypes if d in HALF), None)

    @property
    def size(self) -> int | None:
        """Number of samples in the micro-batch."""
        return batch_size(self.microbatch.batch)

    @property
    def name(self) -> str:
        """The operator without its overload: 'div'."""
        name: str = self.origin.function.overloadpacket.__name__
        return name.strip("_")

    def suspect_rows(self) -> list[int]:
        """Return the samples that the bad elements belong to, if their shape tells."""
        size, rows = self.size, bad_rows(self.origin)
        found = bad_index(self.origin)
        if size is None or found is None or not found[0]:
            return []
        length = found[1].shape[0]
        if size > 1 and length % size == 0 and length:
            return sorted({row // (length // size) for row in rows})
        return []

    def whole_row_masked(self) -> bool:
        """Return True if the row that became NaN, along the operator's dimension, held only infinities."""
        found = bad_index(self.origin)
        if found is None or not found[0] or self.name == "mul":
            return False
        index, result = found
        along = self.origin.args[1] if "softmax" in self.name and len(self.origin.args) > 1 else -1
        dim = along % result.dim() if isinstance(along, int) else result.dim() - 1
        place = tuple(slice(None) if d == dim else i for d, i in enumerate(index))
        same = [t for t in tensors_of(self.origin) if t.shape == result.shape and t.is_floating_point()]
        rows = [tensor[place] for tensor in same]
        return any(row.numel() > 1 and bool(torch.isinf(row).all()) for row in rows)

    def singular_origin(self) -> int:
        """Bits: what the operand was computed from that makes the operator singular."""
        origins = self.origin.argument_origins
        if self.name in ("div", "true_divide", "remainder", "fmod") and len(origins) > 1:
            return origins[1]
        lawful = [edge for edge in self.origin.edges if edge.lawful]
        if lawful:
            return self._mask_origin(lawful[0].writer, lawful[0].origin)
        return self.origin.origin

    def _mask_origin(self, writer: int | None, otherwise: int) -> int:
        """Follow lawful infinities back to the mask that put them there."""
        while writer is not None:
            event = self.trace.events[writer]
            before = [edge for edge in event.edges if edge.lawful]
            if event.mask_origin:
                return event.mask_origin
            if not before:
                return event.origin
            writer, otherwise = before[0].writer, before[0].origin
        return otherwise

    def ids(self) -> dict[int, Any]:
        """Return the user's own ids of the samples, by position."""
        return sample_ids(self.microbatch.batch)
