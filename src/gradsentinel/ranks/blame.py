"""Who brought the bad value in: local gradients, judged before the ranks add theirs up."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gradsentinel.decision import Kind
from gradsentinel.evidence import Evidence, TensorEvidence
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import local, parts_of, readable, values_of
from gradsentinel.ranks.handover import Handovers
from gradsentinel.ranks.origin import Claim
from gradsentinel.ranks.topology import ranks_of
from gradsentinel.wording import plain_name

if TYPE_CHECKING:
    from gradsentinel.run import Run

_MOST_COMPARED = 8192
"""Of more gradients it is not told which are bad: it would travel to every rank, one bit each."""
_MOST_NAMED = 8
_FROM_GRADIENTS = frozenset({Kind.NONFINITE_GRADIENT, Kind.NONFINITE_LOSS, Kind.LOSS_SCALE})
_MOST_HANDED = 2**16
"""So many values handed over in a step are looked at: a loop that makes no steps must not fill the memory."""


@dataclass(slots=True)
class Seen:
    """What this rank saw of one step before anything was exchanged; numbers on the device, one each."""

    norms: list[dict[str, Tensor]] = field(default_factory=lambda: [{}])
    """Largest absolute value of each gradient, by micro-batch; the last is the one in flight."""
    handed: list[tuple[str, Tensor]] = field(default_factory=list)
    """The same of each value handed to tensor-parallel peers, in that order."""
    began: set[str] = field(default_factory=set)
    """Parameters whose bad gradients are this rank's own, once somebody looked."""

    @property
    def anything(self) -> bool:
        """True if anything was seen so far."""
        return len(self.norms) > 1 or bool(self.norms[0] or self.handed or self.began)


class LocalGradients:
    """How large this rank's own gradients of the step in flight are, from before the reduction.

    Data parallel (DDP): a hook on each parameter sees its accumulated local gradient before the
    bucket's all-reduce, in both bucket-view modes, with no_sync, unused parameters and static graphs.
    Sharded (FSDP2): the parameters that an optimizer knows only ever show the reduced shard; the hooks
    are on the whole parameters that each module has while it computes. Tensor parallel (DTensor): hooks
    on the modules whose values the ranks exchange. One launch per hook for the largest absolute value,
    which unlike a 2-norm is finite if the value is; no wait, memory of one number each.
    """

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._watched: set[str] = set()
        self._handovers = Handovers(self._handed_over)
        self._suspended = False
        self.hooked = False
        """True once something is looked at: else nobody need be told of steps and micro-batches."""
        self.seen = Seen()
        """The step in flight; the next step gets a new one, so whoever needs this one later may keep it."""
        self.first_peer: int | None = None
        """The smallest of the ranks that exchange values with this one in forward and backward pass."""
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
        """True if there is a reduction of gradients to look behind."""
        return bool(self._handles)

    @property
    def microbatches(self) -> int:
        """How many backward passes of this step have ended."""
        return len(self.seen.norms) - 1

    def watches(self, name: str) -> bool:
        """Return True if this parameter's gradient is added up over ranks and was judged before that."""
        return name in self._watched

    def watch_parameters(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Judge these parameters' gradients when each has been accumulated."""
        for name, parameter in named:
            if parameter.requires_grad:
                self.hooked = True
                handle = parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
                self._handles.append(handle)
                self._watched.add(name)

    def watch_sharded(self, named: Iterable[tuple[str, nn.Module]]) -> None:
        """Judge the gradients of the whole parameters that these sharded modules compute with."""
        named = list(named)
        sharded = {id(module) for _, module in named}
        for name, module in named:
            places = list(_own_parameters(name, module, sharded))
            self._watched.update(full_name for _, _, full_name in places)
            self.hooked = True
            self._handles.append(module.register_forward_pre_hook(self._unsharded_hook(places)))

    def watch_exchanges(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Look at what the tensor-parallel modules in these exchange, before they do."""
        self.hooked = True
        self._handovers.watch(modules)

    def begin_step(self) -> None:
        """Forget the last step."""
        self.seen = Seen()

    def end_microbatch(self) -> None:
        """Keep what the backward pass that just ended showed."""
        self.seen.norms.append({})

    def norm(self) -> Tensor | None:
        """Return the 2-norm of the newest value of each place, 0-dim float32, or None; no wait."""
        newest: dict[str, Tensor] = {}
        for norms in self.seen.norms:
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
        for index, norms in enumerate(self.seen.norms):
            bad = tuple(name for name, fine in zip(norms, _finite(norms.values()), strict=True) if not fine)
            if bad:
                return index, bad
        return None, ()

    def first_bad_handover(self) -> tuple[int, str] | None:
        """Return number and name of the first bad value that was handed to tensor-parallel peers; waits."""
        finite = _finite(peak for _, peak in self.seen.handed)
        number = next((number for number, fine in enumerate(finite) if not fine), None)
        return None if number is None else (number, self.seen.handed[number][0])

    def leader(self, rank: int) -> int:
        """Return the smallest rank of those that exchange values with this one, which is `rank`."""
        mesh = self._handovers.mesh
        first = self.first_peer if mesh is None else min(ranks_of(mesh))
        return rank if first is None else first

    def detach(self) -> None:
        """Take every hook off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._handovers.detach()
        if self.armed is not None:
            self.armed.disarm()

    def _handed_over(self, what: str, own: Tensor) -> None:
        if not self._suspended and readable(own) is None and len(self.seen.handed) < _MOST_HANDED:
            self.seen.handed.append((what, _largest(own)))

    def _hook(self, name: str) -> Callable[[nn.Parameter], None]:
        def judge(parameter: nn.Parameter) -> None:
            gradient = None if self._suspended else parameter.grad
            if gradient is not None and readable(gradient) is None:
                self.seen.norms[-1][name] = _largest(gradient)

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
    """Owner, key and full name of what a module shards: not what it ignores, nor sharded modules in it."""
    for key, parameter in module._parameters.items():
        if hasattr(parameter, "device_mesh"):
            yield module, key, plain_name(f"{name}.{key}" if name else key)
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


def _finite(values: Iterable[Tensor]) -> list[bool]:
    """Whether each of these numbers is finite; waits for each device once."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    finite: list[bool] = []
    for number, value in enumerate(values):
        by_device.setdefault(value.device, []).append((number, value))
        finite.append(True)
    for entries in by_device.values():
        flags = torch.stack([torch.isfinite(value) for _, value in entries]).tolist()
        for (number, _), flag in zip(entries, flags, strict=True):
            finite[number] = flag
    return finite


def judge_origin(evidence: Evidence, run: Run) -> Evidence:
    """Return the evidence with its origin: did the bad gradient begin on this rank, or only arrive here?"""
    if evidence.kind not in _FROM_GRADIENTS or run.consensus.world_size == 1:
        return evidence
    evidence = replace(evidence, tensors=_in_backward_order(evidence.tensors, run))
    microbatch, places = run.local.bad_places()
    own = tuple(tensor for tensor in evidence.tensors if not run.local.watches(tensor.name))
    run.local.seen.began.update(places, (tensor.name for tensor in own))
    if evidence.kind is Kind.NONFINITE_LOSS or not run.local.watching:
        return evidence
    if not places:
        # A gradient that nobody reduces is this rank's own.
        return evidence if own else replace(evidence, origin=False)
    if _came_after(microbatch, evidence, run):
        return replace(evidence, origin=False)
    counted = {tensor.name: tensor for tensor in evidence.tensors}
    return replace(
        evidence,
        microbatch=microbatch,
        # In the order of the backward pass. What is bad may be in another rank's shard after the reduction.
        tensors=(*(counted.get(name) or _uncounted(name) for name in places), *own),
        message=f"{_what(evidence)} in {fold(places)}, before the ranks added theirs up",
        details={**evidence.details, "local": list(places)},
    )


def claim_of(run: Run, *, speaks: bool) -> Claim | None:
    """Return what this rank knows of where it began, once its evidence was examined; waits for the device.

    None if it has no evidence (`speaks`) and did not hand over anything bad either.
    """
    seen, handed = run.local.seen, run.local.first_bad_handover()
    if handed is None and not speaks:
        return None
    number, what = (None, "") if handed is None else handed
    claim = Claim(leader=run.local.leader(run.rank.rank), handed=number, what=what)
    names = _backward_order(run)
    if len(names) > _MOST_COMPARED:
        return claim
    bad = [number for number, name in enumerate(names) if name in seen.began]
    return replace(
        claim,
        order=hashlib.sha256("\n".join(names).encode(errors="backslashreplace")).hexdigest()[:16],
        bad=sum(1 << number for number in bad),
        first=tuple(names[number] for number in bad[:_MOST_NAMED]),
    )


def _backward_order(run: Run) -> list[str]:
    """Names of the parameters, as the backward pass usually comes to them: from the last to the first."""
    return [name for name, parameter in run.host.named_parameters() if parameter.requires_grad][::-1]


def _what(evidence: Evidence) -> str:
    return evidence.message if evidence.kind is Kind.LOSS_SCALE else "non-finite gradient"


def _in_backward_order(tensors: Sequence[TensorEvidence], run: Run) -> tuple[TensorEvidence, ...]:
    place = {name: number for number, name in enumerate(_backward_order(run))}
    return tuple(sorted(tensors, key=lambda tensor: place.get(tensor.name, len(place))))


def _came_after(microbatch: int | None, evidence: Evidence, run: Run) -> bool:
    """True if the sum was bad before this rank's part: DDP adds to it when no_sync is not used."""
    first = evidence.microbatch
    counted_alike = run.local.microbatches == len(run.scene.microbatches)
    return counted_alike and first is not None and microbatch is not None and microbatch > first


def _uncounted(name: str) -> TensorEvidence:
    return TensorEvidence(name=name, nonfinite=0, numel=0, norm=math.nan)
