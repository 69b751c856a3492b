"""What the replay of a step showed: the material of a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradsentinel.again.scene import MicroBatch
from gradsentinel.diagnosis.memory import bad_mask
from gradsentinel.diagnosis.operands import Operand, bad_index, bad_rows, operands_of, tensors_of
from gradsentinel.diagnosis.record import FROM_BATCH, FROM_PARAMETERS, Call, Event
from gradsentinel.diagnosis.replay import Computed
from gradsentinel.diagnosis.spread import LENGTH
from gradsentinel.diagnosis.swap import NARROW, batch_size, tensors_by_path
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.diagnosis.walk import Path, call_of
from gradsentinel.measures.inspection import parts_of, readable, values_of
from gradsentinel.run import Run

_SUMS = frozenset(
    {"addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "convolution", "cumsum", "dot", "matmul"}
    | {"mkldnn_convolution", "mm", "mv", "sum"}
)
"""Operators that add up products, or numbers."""
_CHOOSE = frozenset({"gather", "index", "index_select", "take"})
"""Operators that take out what whole numbers say."""
DIVISIONS = frozenset({"div", "true_divide", "remainder", "fmod"})


@dataclass(slots=True, kw_only=True)
class Findings:
    """One traced micro-batch, the path of its bad values, and what the swap tests said."""

    run: Run
    microbatch: MicroBatch
    trace: Trace
    computed: Computed
    path: Path
    origin: Event
    finite_others: tuple[MicroBatch, ...] = ()
    """Micro-batches of the same step that were finite."""
    bad_others: tuple[int, ...] = ()
    """The numbers of those that were not finite either."""
    finite_with_healthy: bool | None = None
    """With the same weights, on the batch of the last healthy step."""
    finite_in_wide: bool | None = None
    widened: str = "the same step"
    """What that was: the step, or the operator alone."""
    lost: Event | None = None
    """An operator of a narrow type that lost what the origin, in a wider one, needed."""
    finite_with_known_good: bool | None = None
    """With the weights of the known-good state, on the same batch."""
    singular_for_any_batch: bool = False
    """True if the same elements are bad with every value of the batch moved a little: see `swap.moved`."""
    rows: tuple[int, ...] = ()
    """Samples that look guilty by the shape of the bad result."""
    finite_without_rows: bool | None = None
    outliers: Mapping[str, list[int]] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    """Fields of the batch that the guilty operand was computed from; one, if it can be told."""
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
        return custom_of(self.origin, self.computed)

    @property
    def half(self) -> str | None:
        """The narrow dtype that the origin worked in or produced, if it did."""
        dtypes = [o.dtype for o in self.operands] + [r.dtype for r in self.origin.results]
        return next((str(d).removeprefix("torch.") for d in dtypes if d in NARROW), None)

    @property
    def overflowed(self) -> bool:
        """True if it went beyond its type: to Inf, or to the NaN that Inf - Inf inside of a sum makes.

        A sum of products, or a mean, has no other way to make NaN of finite numbers.
        """
        finite = bool(self.operands) and all(not operand.nonfinite for operand in self.operands)
        return self.origin.badness.inf or (self.name in _SUMS and finite and not self.origin.literal)

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
        """Return the samples that the bad elements belong to, if their shape tells.

        Where infinities did no harm in most of them, those in which a NaN was made of them.
        """
        rows = self._rows_of(self.origin)
        chosen = self.choice
        if chosen is not None:
            return self._chosen(chosen)
        nan = self.path.first_nan
        harmed = [] if nan is None or nan is self.origin else self._rows_of(nan)
        return harmed if harmed and set(harmed) < set(rows) else rows

    def _rows_of(self, event: Event) -> list[int]:
        size, found = self.size, bad_index(event)
        if size is None or found is None or not found[0]:
            return []
        length = found[1].shape[0]
        if size > 1 and length % size == 0 and length:
            return sorted({row // (length // size) for row in bad_rows(event)})
        return []

    def whole_row_masked(self) -> bool:
        """Return True if the row that became bad, along the operator's dimension, held only infinities."""
        found = bad_index(self.origin)
        if found is None or self.name == "mul":
            return False
        index, result = found
        return any(
            _row_of_infinities(tensor, self._along(tensor.dim()), index, result.shape)
            for tensor in tensors_of(self.origin)
            if tensor.is_floating_point() and tensor.dim() and tensor.layout is torch.strided
        )

    def _along(self, count: int) -> list[int]:
        """The dimensions that the operator works along: the last one, if it does not say."""
        given = self.origin.args[1] if len(self.origin.args) > 1 else -1
        if isinstance(given, bool) or not isinstance(given, (int, list, tuple)):
            given = -1
        dims = [given] if isinstance(given, int) else [dim for dim in given if isinstance(dim, int)]
        return sorted({dim % count for dim in dims if -count <= dim < count}) or [count - 1]

    @property
    def by_batch_alone(self) -> bool:
        """True if what makes the operator singular was computed from the batch and from no parameter."""
        singular = self.singular_origin()
        return bool(singular & FROM_BATCH) and not singular & FROM_PARAMETERS

    @property
    def choice(self) -> Event | None:
        """The operator by which whole numbers of the batch chose infinities that a mask had put there."""
        return next((event for event in self.path.route if self._chosen(event)), None)

    def _chosen(self, event: Event) -> list[int]:
        """Return the samples for which an operator chose an infinity by whole numbers of the batch."""
        if not event.args or not event.edges or not all(edge.lawful for edge in event.edges):
            return []
        name = event.function.overloadpacket.__name__
        given = list(zip(tensors_of(event), event.argument_origins, strict=False))
        numbers = [tensor for tensor, bits in given if not tensor.is_floating_point() and bits & FROM_BATCH]
        if not numbers:
            return []
        if name.startswith("nll_loss") and name.endswith("forward"):
            return _rows_chosen(event, self.size)
        return self._rows_of(event) if name in _CHOOSE else []

    @property
    def by_equal_values(self) -> bool:
        """True if it failed at a deviation, a norm or a distance of 0: values that are equal, or all 0."""
        place = 1 if self.name in DIVISIONS else 0
        return self.origin.argument_measures[place : place + 1] == (LENGTH,) and self.singular_at_zero()

    def singular_at_zero(self) -> bool:
        """Return True if an elementwise operator failed just where its operand, or divisor, is 0."""
        place = 1 if self.name in DIVISIONS else 0
        operand = self.origin.args[place] if len(self.origin.args) > place else None
        pointwise = torch.Tag.pointwise in self.origin.function.tags
        if not pointwise or not isinstance(operand, Tensor) or not self.origin.results:
            return False
        if operand.layout is not torch.strided or self.origin.results[0].layout is not torch.strided:
            return False
        bad = bad_mask(self.origin.results[0])
        try:
            return bool((operand.expand(bad.shape)[bad] == 0).all())
        except RuntimeError:  # an operator in place on another shape
            return False

    def singular_origin(self) -> int:
        """Bits: what the operand was computed from that makes the operator singular."""
        origins = self.origin.argument_origins
        if self.name in DIVISIONS and len(origins) > 1:
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

    def infinite_records(self) -> tuple[str | None, list[int]]:
        """Return the field whose infinities the origin computes with, and the records that hold some.

        No field if most records hold some, or a healthy batch does: a mask that the batch brings along.
        """
        leaves = self._leaves()
        paths = [path for path in tensors_by_path(self.microbatch.batch) if f"batch {path}".strip() in leaves]
        for path in paths:
            rows = _with_infinities(tensors_by_path(self.microbatch.batch)[path], self.size)
            if not rows or 2 * len(rows) > (self.size or 0):
                continue
            healthy = (tensors_by_path(other.batch).get(path) for other in self.run.scene.healthy)
            if not any(_has_infinities(other) for other in healthy if other is not None):
                return path, rows
        return None, []

    def _leaves(self) -> set[str]:
        """The tensors that the origin's bad inputs come from, if no operator made those bad."""
        found, seen, waiting = set(), set(), list(self.origin.edges)
        while waiting:
            edge = waiting.pop()
            if edge.writer is None:
                found.add(edge.leaf)
            elif edge.writer not in seen:
                seen.add(edge.writer)
                waiting += self.trace.events[edge.writer].edges
        return found

    @property
    def guilty_rows(self) -> list[int]:
        """The samples without which the step is finite, or that look guilty where that was not tried."""
        if self.finite_without_rows is False:
            return []
        return sorted({row for rows in self.outliers.values() for row in rows} or set(self.rows))

    def ids(self) -> dict[int, Any]:
        """Return the ids of the samples, by position."""
        return self.microbatch.ids


def custom_of(event: Event, computed: Computed) -> str | None:
    """Return the user's own autograd Function or operator library in which an operator ran, if it did."""
    if event.custom is not None:
        return event.custom
    known = computed.nodes.get(event.sequence)
    inside = known is not None and known[1] and event.in_no_grad and not event.backward
    return known[0] if inside and known is not None else None


@torch.no_grad()
def _rows_chosen(event: Event, size: int | None) -> list[int]:
    """Return the samples whose label chose an infinity, by the arguments of a negative log-likelihood."""
    logarithms, target = event.args[0], event.args[1]
    ignored = event.args[4] if len(event.args) > 4 else -100
    counts = target != ignored
    picked = logarithms.gather(
        -1 if logarithms.dim() == 1 else 1,
        target.where(counts, 0).unsqueeze(-1 if logarithms.dim() == 1 else 1),
    )
    bad = torch.isinf(picked).reshape(counts.shape) & counts
    if not bad.dim() or not size or bad.shape[0] % size:
        return []
    rows: list[int] = bad.reshape(size, -1).any(1).nonzero().flatten().tolist()
    return rows


@torch.no_grad()
def _with_infinities(tensor: Tensor, size: int | None) -> list[int]:
    plain = readable(tensor) is None and tensor.layout is torch.strided and tensor.is_floating_point()
    if not plain or tensor.dim() == 0 or tensor.shape[0] != size:
        return []
    bad = torch.isinf(parts_of(values_of(tensor))).reshape(tensor.shape[0], -1).any(1)
    rows: list[int] = bad.nonzero().flatten().tolist()
    return rows


@torch.no_grad()
def _has_infinities(tensor: Tensor) -> bool:
    return readable(tensor) is None and bool(torch.isinf(parts_of(values_of(tensor))).any())


def _row_of_infinities(
    tensor: Tensor, dims: Sequence[int], index: tuple[int, ...], shape: Sequence[int]
) -> bool:
    """Tell whether the row of a tensor that an element of the result comes from holds only infinities."""
    if math.prod(tensor.shape[dim] for dim in dims) < 2:
        return False
    rows = torch.isinf(tensor)
    for dim in dims:
        rows = rows.all(dim, keepdim=True)
    if tuple(tensor.shape) == tuple(shape):
        return bool(rows.expand(tensor.shape)[index])
    return rows.numel() == math.prod(shape) and bool(rows.reshape(tuple(shape))[index])
