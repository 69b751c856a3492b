"""Who brought the bad value in: local gradients, judged before the ranks add theirs up."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradsentinel.decision import Kind
from gradsentinel.evidence import Evidence, TensorEvidence
from gradsentinel.incident import fold
from gradsentinel.inspection import local, parts_of, readable, values_of

if TYPE_CHECKING:
    from gradsentinel.run import Run


class LocalGradients:
    """How large this rank's own gradients of the step in flight are, from before the reduction.

    Data parallel (DDP): a hook on each parameter sees its accumulated local gradient before the
    bucket's all-reduce, in both bucket-view modes, with no_sync, unused parameters and static graphs.
    Sharded (FSDP2): the parameters that an optimizer knows only ever show the reduced shard; the hooks
    are on the whole parameters that each module has while it computes. One launch per hook for the
    largest absolute value, which unlike a 2-norm is finite if the gradient is; no wait, memory of one
    number each.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._watched: set[str] = set()
        self._norms: dict[str, Tensor] = {}
        self._by_microbatch: list[dict[str, Tensor]] = []
        self._suspended = False
        self.armed: Any = None
        """Further hooks, with `disarm()`, that are taken off when these are."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Record nothing in the block: a step that is run again must not count as the step itself."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    @property
    def watching(self) -> bool:
        """True if there is a reduction to look behind."""
        return bool(self._handles)

    @property
    def microbatches(self) -> int:
        """How many backward passes of this step have ended."""
        return len(self._by_microbatch)

    def watches(self, name: str) -> bool:
        """Return True if this parameter's gradient is added up over ranks and was judged before that."""
        return name in self._watched

    def watch_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Judge these parameters' gradients when each has been accumulated."""
        for name, parameter in named:
            if parameter.requires_grad:
                handle = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                self._watched.add(name)

    def watch_outputs(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Judge the gradients of the whole parameters that these sharded modules compute with."""
        named = list(named)
        sharded = {id(module) for _, module in named}
        for name, module in named:
            places = list(_own_parameters(name, module, sharded))
            self._watched.update(full_name for _, _, full_name in places)
            self._handles.append(module.register_forward_pre_hook(self._unsharded_hook(places)))

    def begin_step(self) -> None:
        """Forget the last step."""
        self._norms = {}
        self._by_microbatch.clear()

    def end_microbatch(self) -> None:
        """Keep what the backward pass that just ended showed."""
        self._by_microbatch.append(self._norms)
        self._norms = {}

    def norm(self) -> Tensor | None:
        """Return the 2-norm of the newest value of each place, 0-dim float32, or None; no wait."""
        newest: dict[str, Tensor] = {}
        for norms in (*self._by_microbatch, self._norms):
            newest.update(norms)
        if not newest:
            return None
        first = next(iter(newest.values())).device
        peaks = torch.stack([peak.to(first, torch.float32) for peak in newest.values()])
        largest = peaks.max().clamp_min(torch.finfo(torch.float32).tiny)  # the squares must not overflow
        norm: Tensor = largest * torch.linalg.vector_norm(peaks / largest)
        return norm

    def bad_places(self) -> tuple[int | None, tuple[str, ...]]:
        """Return the first micro-batch whose local gradients were not finite, and where; waits.

        (None, ()) if this rank's gradients were all finite.
        """
        for index, norms in enumerate((*self._by_microbatch, self._norms)):
            if not norms:
                continue
            finite = torch.stack([torch.isfinite(norm).cpu() for norm in norms.values()]).tolist()
            bad = tuple(name for name, fine in zip(norms, finite, strict=True) if not fine)
            if bad:
                return index, bad
        return None, ()

    def detach(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.armed is not None:
            self.armed.disarm()

    def _hook(self, name: str) -> Callable[[nn.Parameter], None]:
        def judge(parameter: nn.Parameter) -> None:
            gradient = None if self._suspended else parameter.grad
            if gradient is not None and readable(gradient) is None:
                self._norms[name] = _largest(gradient)

        return judge

    def _unsharded_hook(
        self, places: Sequence[tuple[nn.Module, str, str]]
    ) -> Callable[[nn.Module, Any], None]:
        known: dict[int, Tensor] = {}

        def watch(_module: nn.Module, _args: Any) -> None:
            # FSDP2 makes its whole parameters in the first forward pass, and keeps the objects.
            for owner, key, name in places:
                parameter = owner._parameters.get(key)
                if parameter is None or not parameter.requires_grad or id(parameter) in known:
                    continue
                known[id(parameter)] = parameter
                handle = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)

        return watch


def _own_parameters(name: str, module: nn.Module, sharded: set[int]) -> Iterator[tuple[nn.Module, str, str]]:
    """Owner, key and full name of a sharded module's parameters, without those of sharded modules in it."""
    for key in module._parameters:
        yield module, key, f"{name}.{key}" if name else key
    for child_name, child in module.named_children():
        if id(child) not in sharded:
            yield from _own_parameters(f"{name}.{child_name}" if name else child_name, child, sharded)


@torch.no_grad()
def _largest(gradient: Tensor) -> Tensor:
    """The largest absolute value, 0-dim; NaN if an element is."""
    values = local(gradient)
    # Coalescing would wait for the device, and what is not finite is so before it, too.
    values = values._values() if values.layout is torch.sparse_coo else values_of(values)
    if not values.numel():
        return torch.zeros((), device=values.device)
    values = parts_of(values)
    if values.device.type == "cpu":  # where this norm is over ten times slower than the two extremes
        low, high = torch.aminmax(values)
        return torch.maximum(-low, high)
    largest: Tensor = torch.linalg.vector_norm(values, float("inf"))
    return largest


def judge_origin(evidence: Evidence, run: Run) -> Evidence:
    """Return the evidence with its origin: did the bad gradient begin on this rank, or only arrive here?"""
    if evidence.kind is not Kind.NONFINITE_GRADIENT or not run.local.watching:
        return evidence
    microbatch, places = run.local.bad_places()
    if not places:
        # A gradient that nobody reduces is this rank's own.
        received = all(run.local.watches(tensor.name) for tensor in evidence.tensors)
        return replace(evidence, origin=False) if received else evidence
    if _came_after(microbatch, evidence, run):
        return replace(evidence, origin=False)
    counted = {tensor.name: tensor for tensor in evidence.tensors}
    return replace(
        evidence,
        microbatch=microbatch,
        # In the order of the backward pass. What is bad may be in another rank's shard after the reduction.
        tensors=tuple(counted.get(name) or _uncounted(name) for name in places),
        message=f"non-finite gradient in {fold(places)}, before the ranks added theirs up",
        details={**evidence.details, "local": list(places)},
    )


def _came_after(microbatch: int | None, evidence: Evidence, run: Run) -> bool:
    """True if the sum was bad before this rank's part: DDP adds to it when no_sync is not used."""
    first = evidence.microbatch
    counted_alike = run.local.microbatches == len(run.scene.microbatches)
    return counted_alike and first is not None and microbatch is not None and microbatch > first


def _uncounted(name: str) -> TensorEvidence:
    return TensorEvidence(name=name, nonfinite=0, numel=0, norm=math.nan)
