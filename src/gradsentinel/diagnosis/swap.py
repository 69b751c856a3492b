"""Changes one thing at a time and runs the step again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gradsentinel.again.scene import MicroBatch
from gradsentinel.data.records import ID_FIELDS
from gradsentinel.diagnosis.memory import judge
from gradsentinel.diagnosis.replay import Computed, Replay
from gradsentinel.diagnosis.trace import Trace, is_allocation
from gradsentinel.measures.inspection import parts_of, readable
from gradsentinel.state.snapshot import Snapshot
from gradsentinel.state.tree import map_tensors, tensors_in

T = TypeVar("T")

logger = logging.getLogger("gradsentinel")

NARROW = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize < 4
)


_LITTLE = 0.02
"""Of the mean magnitude: more than bfloat16 rounds away."""


class Widen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes in float32 whatever the program computes in a narrower dtype, autocast or not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator on wider inputs."""
        kwargs = kwargs or {}
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return func(*args, **kwargs)  # a view must stay one
        wide_args, wide_kwargs = tree_map(wider, (args, kwargs))
        if func.overloadpacket.__name__ in ("_softmax", "_log_softmax"):
            wide_args = (*wide_args[:2], False)  # its last argument converts from half by itself
        result = func(*wide_args, **wide_kwargs)
        if not func._schema.is_mutable:
            return result
        swapped: dict[int, Tensor] = {}
        given, widened = tree_leaves((args, kwargs)), tree_leaves((wide_args, wide_kwargs))
        for before, after in zip(given, widened, strict=True):
            if isinstance(before, Tensor) and before is not after:
                swapped[id(after)] = before
        for argument, schema in zip(wide_args, func._schema.arguments, strict=False):
            if schema.alias_info is not None and schema.alias_info.is_write:
                for leaf in tree_leaves(argument):
                    if id(leaf) in swapped:
                        swapped[id(leaf)].copy_(leaf)
        return tree_map(lambda x: swapped.get(id(x), x), result)


class WidenCalls(TorchFunctionMode):
    """Lets functions that insist on inputs of one type, as convolutions do, have all in the wider one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Widen what is narrow if something is not; leave alone what writes to its input."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "_")
        if not name.endswith("_"):
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            types_of = {leaf.dtype for leaf in leaves if leaf.is_floating_point()}
            if len(types_of) > 1 and types_of & NARROW:
                args, kwargs = tree_map(lambda x: wider(x) if isinstance(x, Tensor) else x, (args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def in_wide() -> Iterator[None]:
    """Compute in float32 what the program computes in a narrower type."""
    with WidenCalls(), Widen():  # type: ignore[no-untyped-call]
        yield


class Poison(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills freshly allocated memory with NaN, so that what is read before it is written shows."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; spoil what it allocates."""
        result = func(*args, **(kwargs or {}))
        if is_allocation(func):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and readable(leaf) is None:
                    leaf.fill_(math.nan)
        return result


def wider(value: Any) -> Any:
    """Return a narrow tensor in float32, and float32 for a narrow dtype; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype in NARROW:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in NARROW else value


def is_finite(computed: Computed) -> bool:
    """Return True if the loss and every gradient are finite, and the buffers, where they are looked at."""
    bad = judge(computed.loss) or any(judge(g) for g in computed.gradients.values())
    return not bad and not computed.spoilt


def finite_in_wide(replay: Replay, microbatch: MicroBatch) -> bool | None:
    """Return whether the micro-batch is finite in float32; None if it cannot be computed so."""
    computed = compute_in_wide(replay, microbatch)
    return None if computed is None else is_finite(computed)


def compute_in_wide(replay: Replay, microbatch: MicroBatch) -> Computed | None:
    """Compute the micro-batch in float32; None if it cannot be computed so."""

    def wide() -> Computed:
        with replay.with_parameters(lambda _, p: p.detach().float() if p.dtype in NARROW else None):
            return replay.compute(microbatch, mode=in_wide())

    return _tried("in float32", wide)


def finite_with_weights(replay: Replay, microbatch: MicroBatch, snapshot: Snapshot) -> bool | None:
    """Return whether the micro-batch is finite with the weights of a known-good state."""
    computed = compute_with_weights(replay, microbatch, snapshot)
    return None if computed is None else is_finite(computed)


def compute_with_weights(
    replay: Replay, microbatch: MicroBatch, snapshot: Snapshot, other: Any = None
) -> Computed | None:
    """Compute the micro-batch, or another batch in its place, with the weights of a known-good state."""

    def older(name: str, parameter: Tensor) -> Tensor | None:
        kept = snapshot.parameters.get(name)
        fits = kept is not None and kept.shape == parameter.shape
        return kept.detach().to(parameter.device, copy=True) if fits and kept is not None else None

    def with_older() -> Computed:
        with replay.with_parameters(older):
            return replay.compute(microbatch, batch=None if other is None else _own(other))

    return _tried("with older weights", with_older)


def finite_without(
    replay: Replay, microbatch: MicroBatch, rows: Sequence[int], size: int, field: str | None = None
) -> bool | None:
    """Return whether the micro-batch is finite without some samples: see `compute_without`."""
    computed = compute_without(replay, microbatch, rows, size, field)
    return None if computed is None else is_finite(computed)


def compute_without(
    replay: Replay, microbatch: MicroBatch, rows: Sequence[int], size: int, field: str | None = None
) -> Computed | None:
    """Compute the micro-batch with some samples replaced by another one of it; None if that fails.

    In one field only, if its path is given.
    """
    others = [row for row in range(size) if row not in rows]
    if not others or not rows:
        return None
    chosen = {id(tensor) for path, tensor in tensors_in(microbatch.batch) if field in (None, path)}

    def replaced(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        if id(tensor) in chosen and copy.dim() and copy.shape[0] == size:
            copy[list(rows)] = copy[others[0]].clone()
        return copy.requires_grad_(tensor.requires_grad)

    return _tried(
        "without some samples",
        lambda: replay.compute(microbatch, batch=map_tensors(replaced, microbatch.batch)),
    )


def finite_with_batch(replay: Replay, microbatch: MicroBatch, other: Any) -> bool | None:
    """Return whether another batch is finite with the same weights."""
    computed = compute_with_batch(replay, microbatch, other)
    return None if computed is None else is_finite(computed)


def compute_with_batch(
    replay: Replay, microbatch: MicroBatch, other: Any, mode: Trace | None = None
) -> Computed | None:
    """Compute another batch with the same weights, traced if a trace is given; None if that fails."""
    return _tried("with another batch", lambda: replay.compute(microbatch, batch=_own(other), mode=mode))


def _own(batch: Any) -> Any:
    return map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), batch)


def norms_of(computed: Computed) -> list[Tensor]:
    """Return the norm of each gradient that has one, 0-dim float64."""
    return [
        torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
        for gradient in computed.gradients.values()
        if gradient.layout is torch.strided and not gradient.is_complex()
    ]


def moved(batch: Any, fields: Sequence[str]) -> Any:
    """Return a copy of the batch in which each value of these fields is another one, close by.

    Values that are 0, or equal, by accident are so no more; what a formula makes 0 of any values stays 0.
    None if a field holds whole numbers, labels or flags, which cannot be moved.
    """
    named = tensors_by_path(batch)
    chosen = {id(named[path]) for path in fields if path in named and _is_plain(named[path])}
    if not fields or len(chosen) < len(set(fields)):
        return None
    generator = torch.Generator().manual_seed(0)  # leaves the program's own random state alone

    @torch.no_grad()
    def replaced(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        if id(tensor) in chosen:
            spread = copy.float().abs().mean() or 1.0
            noise = torch.rand(copy.shape, generator=generator).to(copy.device) + 0.5
            copy += (_LITTLE * spread * noise).to(copy.dtype)
        return copy.requires_grad_(tensor.requires_grad)

    return map_tensors(replaced, batch)


def _is_plain(tensor: Tensor) -> bool:
    return readable(tensor) is None and tensor.layout is torch.strided and tensor.is_floating_point()


def finite_compiled(replay: Replay, microbatches: Sequence[MicroBatch]) -> bool:
    """Return whether the micro-batches are finite when compiled code runs as such; True if it cannot tell."""
    found = _tried("compiled", lambda: all(is_finite(replay.compute(m, eager=False)) for m in microbatches))
    return found is not False


def _tried(how: str, compute: Callable[[], T]) -> T | None:
    """Return what was computed; None if the program's code does not take to be run that way."""
    try:
        return compute()
    except Exception as error:
        logger.debug("the step could not be tried %s: %s", how, error, exc_info=True)
        return None


def batch_size(batch: Any) -> int | None:
    """Return the size that the first dimensions of a batch's tensors agree on, or None."""
    sizes = [tensor.shape[0] for _, tensor in tensors_in(batch) if tensor.dim()]
    if not sizes:
        return None
    most = max(set(sizes), key=sizes.count)
    return most if sizes.count(most) * 2 > len(sizes) or len(sizes) <= 2 else None


def outlier_rows(batch: Any, size: int, factor: float = 1e3) -> dict[str, list[int]]:
    """Return, by path, the samples whose values are far larger than those of the rest of the batch.

    Floating fields first: in whole numbers large ones are often mere names.
    """
    found = {}
    fields = [(path, t) for path, t in tensors_in(batch) if t.dim() and t.shape[0] == size and size >= 3]
    for path, tensor in sorted(fields, key=lambda field: not field[1].is_floating_point()):
        if tensor.dtype is torch.bool or tensor.is_complex() or path.rpartition(".")[2] in ID_FIELDS:
            continue
        peaks = tensor.detach().double().flatten(1 if tensor.dim() > 1 else 0).abs()
        peaks = peaks.amax(1) if peaks.dim() > 1 and peaks.numel() else peaks
        typical = float(peaks.median()) if peaks.numel() else 0.0
        # Where most are 0, as with counts, an ordinary number is no outlier.
        rows = (peaks > factor * (typical or 1.0)).nonzero().flatten().tolist()
        if rows and len(rows) < size:
            found[path] = rows
    return found


@torch.no_grad()
def peak_of(tensor: Tensor) -> float:
    """Return the largest finite magnitude, 0 if there is none; waits for the device."""
    if readable(tensor) is not None or tensor.layout is not torch.strided:
        return 0.0
    values = parts_of(tensor.detach()).abs()
    values = values[torch.isfinite(values)]
    return float(values.max()) if values.numel() else 0.0


def tensors_by_path(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by path."""
    return dict(tensors_in(batch))


def peaks_of(batch: Any) -> dict[str, float]:
    """Return the largest finite magnitude of each floating tensor of a batch, by path."""
    return {path: peak_of(t) for path, t in tensors_in(batch) if t.is_floating_point()}
