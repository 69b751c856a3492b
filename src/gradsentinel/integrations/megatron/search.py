"""Where a bad value begins: the step is run again by all ranks, and each looks at what its modules make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradsentinel.again.recompute import recompute
from gradsentinel.decision import Action, Kind
from gradsentinel.evidence import Diagnosis
from gradsentinel.incident import Incident
from gradsentinel.integrations.megatron.host import MegatronHost
from gradsentinel.ranks.topology import Rank, fold_ranks
from gradsentinel.run import Run
from gradsentinel.state.tree import tensors_in

_LOOKED_INTO = frozenset({Kind.NONFINITE_LOSS, Kind.NONFINITE_GRADIENT, Kind.LOSS_SCALE})
_DEEPEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The first bad value that one rank made of good ones."""

    order: tuple[int, int, int, int]
    """Forward before backward; then the micro-batch, the place in the pipeline, and that on the rank."""
    rank: Rank
    phase: str
    microbatch: int
    module: str
    kind: str
    """Class of the module."""
    gradient: str = ""
    """The parameter whose gradient it is."""

    def __str__(self) -> str:
        if self.gradient:
            return f"the gradient of {self.gradient} is not finite from micro-batch {self.microbatch} on"
        return (
            f"{self.module} ({self.kind}) makes a value that is not finite of finite ones, in micro-batch "
            f"{self.microbatch}"
        )


def search(incident: Incident, run: Run) -> None:
    """Complete the incident with what a second computation of the step shows. Called on: every rank.

    If the step is finite then, the fault was transient. If not: which rank, micro-batch and module were the
    first. What the second computation leaves behind is for the recovery, which computes the step again or
    drops it.
    """
    host = run.host
    known = incident.diagnosis is not None and incident.diagnosis.confidence >= 0.5
    if known or incident.kind not in _LOOKED_INTO or incident.action < Action.RETRY:
        return
    if not isinstance(host, MegatronHost) or incident.step != run.step:
        return
    if not run.consensus.all_of(host.why_no_recompute(run) is None):
        return
    watcher = _Watcher(host, run.rank)
    with watcher.watching():
        outcome = recompute(run, tentative=True)
    places = [place for place in run.consensus.gather(watcher.first) if place is not None]
    if outcome.failure:
        incident.notes += (outcome.failure,)
        return
    before = incident.diagnosis or Diagnosis(cause="unknown", confidence=0.0, phase="backward")
    if outcome.finite:
        incident.diagnosis = replace(
            before,
            cause="hardware",
            confidence=0.6,
            evidence=("computed again by all ranks, from the same batches and random states, it is finite",),
            remedy=(f"if it comes back on {incident.who}, run the self-test of its device",),
        )
    elif places:
        earliest = min(place.order for place in places)
        _tell(incident, before, [place for place in places if place.order == earliest])


def _tell(incident: Incident, before: Diagnosis, places: Sequence[Place]) -> None:
    """Name the ranks, of several that exchange values those that were the first, and what they computed."""
    first = places[0]
    who = fold_ranks(place.rank.rank for place in places)
    incident.concern(place.rank for place in places)
    incident.microbatch = first.microbatch
    incident.diagnosis = replace(
        before,
        confidence=0.5,
        phase=first.phase,
        module=first.module,
        evidence=(f"computed again by all ranks it is not finite either: on {who}, {first}",),
        remedy=(f"look at what {first.module} computes on {who}", *before.remedy),
    )


class _Watcher:
    """Looks at each module's output, and at each parameter's gradient, until the first bad one."""

    def __init__(self, host: MegatronHost, rank: Rank) -> None:
        self._host = host
        self._rank = rank
        self._calls: dict[int, int] = {}
        self._count = 0
        self.first: Place | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on, in the block."""
        handles: list[Any] = []
        try:
            for chunk, (_, root) in enumerate(self._host.modules()):
                for path, module in root.named_modules():
                    if path and not any(True for _ in module.children()):
                        handles.append(module.register_forward_hook(self._after(path, chunk)))
            for name, parameter in self._host.named_parameters():
                if parameter.requires_grad:
                    look = self._in_backward(name, parameter)
                    handles.append(parameter.register_hook(look))  # type: ignore[no-untyped-call]
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, place: Place) -> None:
        if self.first is None or place.order < self.first.order:
            self.first = place

    def _after(self, path: str, chunk: int) -> Any:
        renamed = self._host.names.module(path, chunk)

        def look(module: Any, given: Any, made: Any) -> None:
            self._count += 1  # the same on ranks that hold parts of the same modules
            if self.first is not None or _finite(made) or not _finite(given):
                return
            step = self._host.step
            microbatch = step.microbatch if step is not None else 0
            place = chunk * self._host.stages + self._host.stage
            self._note(
                Place(
                    order=(0, microbatch, place, self._count),
                    rank=self._rank,
                    phase="forward",
                    microbatch=microbatch,
                    module=renamed,
                    kind=type(module).__name__,
                )
            )

        return look

    def _in_backward(self, name: str, parameter: Tensor) -> Any:
        chunk = self._host.names.describe(parameter)["chunk"]

        def look(gradient: Tensor) -> None:
            microbatch = self._calls[id(parameter)] = self._calls.get(id(parameter), -1) + 1
            self._count += 1
            if self.first is not None or _finite(gradient):
                return
            place = chunk * self._host.stages + self._host.stage
            self._note(
                Place(
                    order=(1, microbatch, -place, self._count),
                    rank=self._rank,
                    phase="backward",
                    microbatch=microbatch,
                    module=name.rpartition(".")[0],
                    kind="",
                    gradient=name,
                )
            )

        return look


@torch.no_grad()
def _finite(values: Any) -> bool:
    """Whether all floating-point tensors are finite; waits for the device."""
    return all(
        bool(torch.isfinite(tensor).all())
        for _, tensor in tensors_in(values, max_depth=_DEEPEST)
        if tensor.is_floating_point()
    )
