"""When the ranks are asked about a step, and what with: from an event's findings to one ruling."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsentinel import events
from gradsentinel.again.scene import MicroBatch
from gradsentinel.bus import Bus
from gradsentinel.callback import Callback, Detector
from gradsentinel.gradients import GradientView
from gradsentinel.judge import Filed, Judge, Ruling, Submission
from gradsentinel.measures.norms import spans
from gradsentinel.ranks.blame import Seen
from gradsentinel.run import Run
from gradsentinel.state.rng import RngState

_ASKED = (("overflow", 0.0),)
"""The number above whose bound all ranks do alike: does the scaler of any rank drop the step?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A step whose findings were handed in; nobody has read yet what the ranks made of them."""

    step: int
    iteration: int
    submission: Submission
    gradients: GradientView
    losses: int
    """How many losses travel along."""
    started: float
    optimizers: Sequence[Optimizer]
    microbatches: tuple[MicroBatch, ...]
    rng: RngState | None
    seen: Seen
    extras: Mapping[str, Tensor]
    due: tuple[bool, ...]
    """What this rank holds to be due after the step."""
    quiet: bool
    """True if nobody was asked: an alarm of any rank would show in the global norm."""

    def loss_of(self, ruling: Ruling) -> float | None:
        """Return the mean of the losses that were read."""
        seen = [ruling.values[f"loss{index}"] for index in range(self.losses)]
        return sum(seen) / len(seen) if seen else None


class Agreement:
    """Asks the ranks what is to be done about a step: one small all_reduce, or none where one is made anyway.

    Where every parameter is sharded over all ranks (FSDP), computing the global norm is a reduction over
    all ranks already. A rank that has something to say, which the others cannot see in the norm (its loss
    is NaN, a callback raised, its gradient scaler overflowed), makes its own part of the norm infinite;
    then all ranks see that they have to agree, and compute the true norm again. As long as the norm is
    within every detector's bound nobody is asked, and no second reduction is made.
    """

    def __init__(self, run: Run, bus: Bus) -> None:
        self._run = run
        self._bus = bus
        self.judge = Judge(run.consensus)
        self._norm_bound: float | None = None
        """What the global norm must keep for nobody to be asked; None: all are, in every step."""

    def start(self) -> None:
        """Find out whether the norm can carry an alarm; called on every rank, when settings were compared."""
        run = self._run
        if run.consensus.world_size == 1:
            return
        bounds = [
            one.norm_bound() if isinstance(one, Detector) else None
            for one in self._bus.callbacks
            if type(one).on_before_clip is not Callback.on_before_clip
        ]
        trained = [p for _, p in run.host.named_parameters() if p.requires_grad]
        carried = None not in bounds and spans(trained, run.consensus.world_size)
        if run.consensus.all_of(carried):
            largest = torch.finfo(torch.float32).max
            self._norm_bound = min([largest, *(bound for bound in bounds if bound is not None)])

    def submit(
        self,
        gradients: GradientView,
        losses: tuple[Tensor, ...],
        filed: list[Filed],
        *,
        loss_scale: Tensor | None = None,
        overflow: Tensor | None = None,
        at_once: bool,
    ) -> Submitted:
        """Emit `on_before_clip` and hand in what was found, without waiting; called on every rank.

        `filed` are the findings from before; `at_once` means that the ruling is going to be read before
        the step is made.
        """
        run, started = self._run, time.perf_counter()
        due = self.due_after(run.step) if at_once else ()
        quiet = (
            at_once
            and self._norm_bound is not None
            and gradients.distributed
            and 0 < gradients.norm_type < math.inf
        )
        if quiet:
            gradients.alarm = self._alarm(filed, due, overflow)
        if self._bus.hears(events.BeforeClip):
            event = events.BeforeClip(
                step=run.step,
                gradients=gradients,
                losses=losses,
                loss_scale=loss_scale,
                overflow=overflow,
            )
            filed = filed + self._bus.emit(event)
        extras = {"grad_norm": gradients.total_norm}
        if gradients.clip_at is not None and len(gradients):
            extras["clip_factor"] = gradients.clip_factor(gradients.clip_at)
        extras.update({f"loss{index}": loss for index, loss in enumerate(losses)})
        if loss_scale is not None and overflow is not None:
            extras.update(loss_scale=loss_scale, overflow=overflow)
        return Submitted(
            step=run.step,
            iteration=run.iteration,
            submission=self._judge(filed, extras, due, _ASKED, agree=not quiet, at_once=at_once),
            gradients=gradients,
            losses=len(losses),
            started=started,
            optimizers=run.optimizers,
            microbatches=tuple(run.scene.microbatches),
            rng=run.scene.rng,
            seen=run.local.seen,
            extras=extras,
            due=due,
            quiet=quiet,
        )

    def ruling(self, submitted: Submitted) -> Ruling:
        """Return what was agreed; called on every rank, waits for the device."""
        submission = submitted.submission
        ruling = submission.ruling(submission.sheet().tolist())
        if not submitted.quiet or abs(ruling.values["grad_norm"]) <= (self._norm_bound or 0.0):
            return ruling
        submitted.gradients.calm()
        submission = self._judge(submission.filed, submitted.extras, submitted.due, _ASKED, at_once=True)
        return submission.ruling(submission.sheet().tolist())

    def true_norm(self, gradients: GradientView, norm: float, *, agreed: bool) -> float | None:
        """Return the true norm if the usual formula overflowed on finite gradients, else None.

        Sharded gradients need all ranks for it, so they compute it only where all of them know: after
        a suspicion that was agreed on.
        """
        overflowed = not abs(norm) < math.inf
        if gradients.distributed:
            overflowed = agreed and not self._run.consensus.all_of(not overflowed)
        if not overflowed:
            return None
        safe = gradients.safe_norm()
        return safe if safe < math.inf else None

    def settle(self, filed: Sequence[Filed]) -> Ruling:
        """Return what the ranks agree on about findings from outside of a step; waits for the device."""
        submission = self._judge(filed, {}, at_once=True)
        return submission.ruling(submission.sheet().tolist())

    def due_after(self, step: int) -> tuple[bool, ...]:
        """Say what is due after this step: settling, and a comparison for each comparer."""
        bus = self._bus
        if not bus.comparers:
            return (bus.must_settle(step),)
        compares = [bool(bus.ask(one, one.compares, step, "compares", step)) for one in bus.comparers]
        return (bus.must_settle(step), *compares)

    def must_wait(self, step: int) -> bool:
        """Return True if a snapshot or a comparison hangs on how this step ends; alike on every rank.

        What detectors find after the step may be settled with a later one.
        """
        return self._bus.must_settle(step, responders_only=True) or any(self.due_after(step)[1:])

    def _alarm(self, filed: Sequence[Filed], due: tuple[bool, ...], overflow: Tensor | None) -> Tensor:
        """Return whether this rank has something to say that the others cannot see in the norm."""
        if any(due) or self._bus.has_functions(events.BeforeClip):
            return torch.ones((), dtype=torch.bool, device=self._run.host.device)
        extras = {} if overflow is None else {"overflow": overflow}
        levels = self._judge(filed, extras, (), _ASKED, agree=False).levels
        assert levels is not None  # the device's part of the work, which nobody reads yet
        return levels.amax() > 0

    def _judge(
        self,
        filed: Sequence[Filed],
        extras: Mapping[str, Tensor],
        due: tuple[bool, ...] = (),
        bounds: Sequence[tuple[str, float]] = (),
        *,
        agree: bool = True,
        at_once: bool = False,
    ) -> Submission:
        self.judge.slots = self._bus.slots
        device = self._run.host.device
        return self.judge.submit(filed, extras, device, due=due, bounds=bounds, agree=agree, at_once=at_once)
