"""Ranks that should be alike and are not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradsentinel import events
from gradsentinel.callback import Comparer
from gradsentinel.decision import Action, Kind
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Diagnosis, Evidence, Finding, TensorEvidence
from gradsentinel.incident import fold
from gradsentinel.measures.inspection import local
from gradsentinel.ranks.replicas import ReplicaGroup, checksums
from gradsentinel.run import Run

_TENFOLD = math.log(10.0)
_REMEDY = (
    "look for a step that was applied on some ranks only, for random numbers that differ, or for a device "
    "that computes wrong"
)


@dataclass(kw_only=True)
class CrossRankCallback(Comparer):
    """Finds what no NaN check can see: replicas that drifted apart, and a rank that leaves the others.

    Parameters and reduced gradients of data-parallel, HSDP and tensor-parallel replicas must be
    bit-identical. Each rank sums their bits exactly; one number per group travels. With a majority the
    odd ranks are named. Needs torch.distributed; in a job of one process it does nothing. Called on:
    every rank.
    """

    every: int = 100
    """Compare after every so many steps, and at the start."""
    gradients: bool = True
    """Compare the reduced gradients of these steps too."""
    action: Action | str = Action.ROLLBACK
    """What to do when replicas differ: rollback (a `Resync` callback steps in first), abort, or warn."""
    outlier: float | None = 6.0
    """Warn of a rank whose own gradient norm or loss is tenfold the others' and so many deviations
    above them, on the logarithm; None does not look."""
    standings: ClassVar[int] = 2
    _run: Run | None = field(default=None, init=False, repr=False)
    _gradients: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _alike_until: int | None = field(default=None, init=False, repr=False)
    """The last step that all replicas began alike, as far as they were compared."""
    _norm: Tensor | None = field(default=None, init=False, repr=False)
    _losses: Sequence[Tensor] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        self.action = Action.parse(self.action)
        if self.action in {Action.RETRY, Action.SKIP}:
            raise ConfigurationError(
                "replicas that differ are not cured by retry or skip; use rollback or abort"
            )
        if self.every < 1:
            raise ConfigurationError(f"every={self.every} must be at least 1 step")
        if self.outlier is not None and not self.outlier > 0:
            raise ConfigurationError(f"outlier={self.outlier} must be above 0, or None")

    def on_run_start(self, event: events.RunStart) -> None:
        """Remember the run."""
        self._run = event.run

    def compares(self, step: int) -> bool:
        """Return True after every `every`-th step."""
        return (step + 1) % self.every == 0

    def checks_after_step(self, step: int) -> bool:
        """Return True where a comparison is due, so that its result is settled at once."""
        return self.compares(step)

    def on_before_clip(self, event: events.BeforeClip) -> None:
        """Sum the bits of the reduced gradients, before clipping, if they are to be compared."""
        self._norm, self._losses = None, ()
        self._gradients = {}
        if self._run is None or not self.compares(event.step):
            return
        self._norm = self._run.local.norm()
        self._losses = event.losses
        if self.gradients:
            view = event.gradients
            whole = set(view.replicated)
            entries = zip(view.names, view.gradients, strict=True)
            kept = {name: gradient for name, gradient in entries if name in whole}
            self._gradients = dict(zip(kept, checksums(list(kept.values())), strict=True))

    def on_after_step(self, event: events.AfterStep) -> None:
        """Forget the gradients of a step that was dropped: what differed in them is gone."""
        if not event.applied:
            self._gradients = {}

    def width(self, group: ReplicaGroup) -> int:
        """Return two per parameter: itself and its gradient."""
        return 2 * len(group.members)

    def fingerprints(self, group: ReplicaGroup) -> Tensor:
        """Return the checksums of the group's parameters and of their gradients, 0 where there is none."""
        if self._run is None:
            raise RuntimeError("the run has not started")
        parameters = dict(self._run.host.named_parameters())
        sums = checksums([parameters[name] for name in group.members])
        none = torch.zeros((), dtype=torch.int64, device=sums.device)
        gradients = torch.stack([self._gradients.get(name, none).to(sums.device) for name in group.members])
        return torch.cat([sums, gradients])

    def differing(self, step: int, group: ReplicaGroup, places: Sequence[int], own: int) -> Finding:
        """Report the parameters that differ."""
        count = len(group.members)
        parameters = [group.members[place] for place in places if place < count]
        gradients = [group.members[place - count] for place in places if place >= count]
        until = self._alike_until
        since = "since the start" if until is None else f"since step {until} at the earliest"
        what = " and ".join(
            f"{kind} {fold(names)}"
            for kind, names in (("parameter", parameters), ("gradient of", gradients))
            if names
        )
        evidence = Evidence(
            kind=Kind.RANK_DIVERGENCE,
            action=Action.parse(self.action),
            message=f"{group.name} hold different bits, {since}: {what}",
            tensors=tuple(
                TensorEvidence(name=name, nonfinite=0, numel=0, norm=0.0)
                for name in dict.fromkeys([*parameters, *gradients])
            ),
            diagnosis=Diagnosis(
                cause="desync",
                confidence=0.95,
                phase="reduce" if gradients else "optimizer",
                evidence=(
                    f"checksums of {len(parameters)} parameters and {len(gradients)} gradients differ",
                ),
                remedy=(_REMEDY,),
            ),
            details={
                "group": group.label,
                "group_size": len(group.ranks),
                "checksum": own,
                "alike_until": -1 if until is None else until,
            },
        )
        return Finding(
            kind=Kind.RANK_DIVERGENCE,
            value=torch.tensor(True),
            action=Action.parse(self.action),
            confirm=lambda: evidence,
        )

    def alike(self, step: int) -> None:
        """Remember that the replicas were alike."""
        self._alike_until = step

    def on_recovery(self, event: events.RecoveryEvent) -> None:
        """Forget comparisons of steps that are taken back, and gradients that are not those of the step."""
        self._gradients = {}  # after a retry there are others; what is agreed is agreed by all ranks
        step = event.recovery.step
        if step is not None and self._alike_until is not None:
            self._alike_until = min(self._alike_until, step)

    @torch.no_grad()
    def standing(self) -> Tensor | None:
        """Return the logarithms of this rank's own gradient norm and loss.

        The norm is there if there is a reduction to look behind, the loss if it is known and above 0.
        """
        if self.outlier is None or (self._norm is None and not self._losses):
            return None
        nothing = torch.full((), math.nan)
        losses = [local(loss).float().reshape(()) for loss in self._losses]
        loss = torch.stack(losses).mean() if losses else nothing
        norm = nothing if self._norm is None else self._norm
        return torch.log(torch.stack([norm.to(loss.device, loss.dtype), loss]))

    def compared_at(self, place: int, step: int, own: float, others: tuple[float, float]) -> Finding | None:
        """Warn if this rank's own gradients, or its loss, are far larger than the others'."""
        mean, deviation = others
        if self.outlier is None or own - mean <= max(_TENFOLD, self.outlier * deviation):
            return None
        what = ("local gradient norm", "loss")[place]
        message = (
            f"the {what} of this rank is {math.exp(own):.4g}, that of the others about {math.exp(mean):.4g}"
        )
        return Finding(
            kind=Kind.RANK_DIVERGENCE, value=torch.tensor(True), action=Action.WARN, message=message
        )
