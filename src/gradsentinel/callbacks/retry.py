"""Computing a failed step again: a fault that does not come back costs nothing then."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from gradsentinel import events
from gradsentinel.again.recompute import Recomputed, close_marks, knows_how, marks_of
from gradsentinel.again.standing import Standing
from gradsentinel.callback import Detector
from gradsentinel.callbacks.outliers import WORDS
from gradsentinel.callbacks.recomputing import NONFINITE, Recomputing
from gradsentinel.decision import Action, Kind
from gradsentinel.diagnosis.graph import difference, graph_of
from gradsentinel.errors import ConfigurationError
from gradsentinel.evidence import Evidence, Finding
from gradsentinel.incident import Incident, Outcome, Recovery
from gradsentinel.ranks.ballot import GuardedConsensus
from gradsentinel.recovery import Budget
from gradsentinel.run import Run
from gradsentinel.testing import record_swallowed

logger = logging.getLogger("gradsentinel")

_OTHER_LOSS = 1e-2
"""Losses of the same micro-batch that differ by more than this, relatively, are not the same loss."""
_IN_VAIN = 3
"""So many overflows in a window that came back: the scaler is at its limit, as it should be."""
_OWN_DRAWS = (
    "forward= draws from a generator of its own, which is not put back for the second computation: the step "
    "was made with other random numbers than without the fault"
)
_REAL = 5
"""So many spikes in a window that came out the same: this run has them, and no more are computed again."""
_DOUBLE = math.log(2)
_LEAST_SCALE = 1.0
_SETTLES = 20
"""So many steps must pass after the last overflow of the search for a loss scale until it has ended: half of
a scale that was too large is often too large for the next batch."""


_FAR_BEYOND = 4.0
"""Times a scale that was too large: at that one some batches pass and some do not, as gradients vary."""


@dataclass(kw_only=True)
class Retry(Recomputing, Detector):
    """Computes a bad step again, from the same batch, random state and buffers; if it is finite now, uses it.

    A transient fault then leaves no trace: the run goes on bit for bit as if it had not happened, and no
    batch is lost. A finite spike counts as a fault if it is not there any more; one that is only to be
    reported is used as it is if it is. Needs `forward=`. Hands over when the fault comes back, when the
    budget is used up, and when computing again fails.
    Called on: every rank.
    """

    rung: ClassVar[Action] = Action.RETRY
    max_retries: int = 10
    """So many steps within `window` may be saved; a device that fails more often is a matter for the next
    rung."""
    window: int = 1000
    """Length of the window, in attempted steps."""
    attempts: int = 2
    """A step is computed again at most so often; only once if the very same comes out."""
    overflows: bool = True
    """With a GradScaler: also retry a step that overflows once the scaler has found its scale. An overflow
    that comes back is left to the scaler, and so is any later one at such a scale."""
    _budget: Budget = field(init=False, repr=False)
    _in_vain: Budget = field(init=False, repr=False)
    _real: Budget = field(init=False, repr=False)
    _last_loss: float = field(default=math.nan, init=False, repr=False)
    """Of the last step that was applied."""
    _found_scale: bool = field(default=False, init=False, repr=False)
    """True once the GradScaler has let a step pass."""
    _passed: int = field(default=0, init=False, repr=False)
    """Steps that the GradScaler has let pass since the last overflow of its search."""
    _edge: float = field(default=math.inf, init=False, repr=False)
    """The smallest loss scale known to be too large, for some batches."""
    _beyond: int = field(default=0, init=False, repr=False)
    """Steps in a row that have passed far beyond it all the same."""
    _run: Run | None = field(default=None, init=False, repr=False)
    """None if no step can be computed again here."""

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.window < 1 or self.attempts < 1:
            raise ConfigurationError(
                "max_retries must be 0 or more, window at least 1 step and attempts at least 1"
            )
        self._budget = Budget(self.max_retries, self.window)
        self._in_vain = Budget(_IN_VAIN, self.window)
        self._real = Budget(_REAL, self.window)

    def norm_bound(self) -> float:
        """Return infinity: all it looks at is the scaler's overflow, which every rank hears of anyway."""
        return math.inf

    def calm(self, step: int, norm: float, losses: Sequence[float]) -> bool:
        """Return True: without a GradScaler it suspects nothing before the clip."""
        return True

    def on_run_start(self, event: events.RunStart) -> None:
        """Say so if no step can be computed again here."""
        super().on_run_start(event)
        event.run.budgets[type(self).__name__] = self._budget.as_dict
        self._run = event.run if knows_how(event.run) and not event.run.decides_late else None

    def on_before_clip(self, event: events.BeforeClip) -> Finding | None:
        """Suspect an overflow at a loss scale that is not known to be too large."""
        if event.loss_scale is None or event.overflow is None or not self.overflows or self._searching:
            return None
        if self._run is None or not self._affordable(self._run.iteration):
            return None
        scale, view = event.loss_scale, event.gradients
        return Finding(
            kind=Kind.LOSS_SCALE,
            value=(event.overflow > 0).logical_and(scale < self._edge),
            action=Action.RETRY,
            confirm=lambda: Evidence(
                kind=Kind.LOSS_SCALE,
                action=Action.RETRY,
                message=f"the gradients overflow, at a loss scale of {float(scale):g}",
                tensors=view.evidence(),
            ),
        )

    def on_after_step(self, event: events.AfterStep) -> None:
        """Remember the loss, and learn which loss scales are too large."""
        if event.applied and event.loss is not None:
            self._last_loss = event.loss
        scale = event.loss_scale
        if scale is None:
            return
        if event.applied:
            self._found_scale = True
            self._passed += 1
            self._beyond = self._beyond + 1 if scale >= _FAR_BEYOND * self._edge else 0
            self._edge = math.inf if self._beyond >= _SETTLES else self._edge
        elif event.scaler_skipped and (self._searching or event.action is Action.WARN):
            self._passed = 0 if self._searching else self._passed
            self._edge = min(self._edge, scale)
            self._beyond = 0

    @property
    def _searching(self) -> bool:
        """True while the GradScaler looks for its scale: overflows are its way to find it."""
        return not self._found_scale or (math.isfinite(self._edge) and self._passed < _SETTLES)

    def rechecks(self, run: Run) -> bool:
        """Return True as long as steps can be computed again, and few came out the same."""
        return self._run is not None and bool(
            self._budget.left(run.iteration) and self._real.left(run.iteration)
        )

    def respond(self, incident: Incident, run: Run) -> Recovery | None:
        """Compute the step again until it is fine, or hand over."""
        if incident.may_stand:
            return self._recheck(incident, run)
        recovery = self._try(incident, run)
        if recovery is None and self._suspected(incident):
            return self._leave_to_scaler(run)  # without a retry, this would have been no incident
        return recovery

    def _try(self, incident: Incident, run: Run) -> Recovery | None:
        if not self._budget.left(run.iteration):
            incident.notes += (f"the budget of {self.max_retries} retries in {self.window} is used up",)
            return None
        if not self._ready(incident, run):
            return None
        before = marks_of(run)
        for attempt in range(1, self.attempts + 1):
            again = self._again(run)
            if again.failure:
                incident.notes += (again.failure,)
                return None
            if again.overflow and self._is_scalers(incident, run):
                return self._leave_to_scaler(run)
            same = run.consensus.all_of(close_marks(before, again.marks))
            fault = incident.kind in NONFINITE or incident.can_be_undone
            usual = run.consensus.all_of(not _unusual(again, incident, run))
            if again.finite and (fault or (usual and not same)):
                return self._use(again, attempt, incident, run)
            if again.finite:
                run.undo_step()  # as large as before: nobody may step with it
            if same:
                break
        incident.notes += ("computed again, the step fails again: the fault is not transient",)
        return None

    def _recheck(self, incident: Incident, run: Run) -> Recovery | None:
        """Use other gradients than those of a step that may stand only if they are shown to be right."""
        if not self._ready(incident, run):
            return _as_it_is("the step is made as it is")
        loops: list[Standing] = []
        if not _together(lambda: loops.append(Standing(run)), incident, run):
            return _as_it_is("the step is made as it is")
        said, recovery = "the step is made as it is", None
        notes, budget = incident.notes, self._budget.state_dict()
        opinion: list[tuple[str, Recovery | None]] = []
        if _together(lambda: opinion.append(self._second_opinion(loops[0], incident, run)), incident, run):
            said, recovery = opinion[0]
        else:  # as on the rank that failed
            incident.notes = (*notes, incident.notes[-1])
            incident.details.pop("retry", None)
            self._budget.load_state_dict(budget)
        if recovery is not None:
            return recovery
        self._real.spend(run.iteration)
        back: list[bool] = []
        if not _together(lambda: back.append(loops[0].put_back()), incident, run) or not run.consensus.all_of(
            back[0]
        ):
            incident.notes += ("its own gradients were written over when it was computed again",)
            run.undo_step()
            return None
        return _as_it_is(said)

    def _second_opinion(self, loops: Standing, incident: Incident, run: Run) -> tuple[str, Recovery | None]:
        """Compute the step again, twice if it comes out otherwise: only what comes out twice is believed."""
        first = self._again(run, tentative=True)
        if first.failure:
            incident.notes += (first.failure,)
            return "the step is made as it is", None
        if not first.finite:
            return "computed again it is not finite: that was another fault, the step is made as it is", None
        if run.consensus.all_of(close_marks(loops.marks, first.marks)):
            return "computed again it is the same: no transient fault, the step is made as it is", None
        second = self._again(run, tentative=True)
        if not second.finite or not run.consensus.all_of(close_marks(first.marks, second.marks)):
            return "computed again it does not come out the same each time: the step is made as it is", None
        doubt = next(filter(None, run.consensus.gather(_doubt(second, incident, run))), "")
        if doubt:
            incident.notes += (doubt,)
        recovery = None if doubt else self._use(second, 2, incident, run)
        return "computed again it is another one, which may be wrong: the step is made as it is", recovery

    def _use(self, again: Recomputed, attempt: int, incident: Incident, run: Run) -> Recovery | None:
        strange = _other_losses(again, run)
        likely = run.consensus.all_of(not strange or self._is_likely(again, run))
        if strange > 1 or not likely:  # one fault does not change several losses, nor improve one
            said = f"forward= gives another loss than the loop, in {strange} micro-batches"
            incident.notes += (f"{said}: it has to compute exactly what the loop computes",)
            run.undo_step()
            return None
        if strange:
            incident.notes += ("the loss was another one too: the fault was in the forward pass",)
        if not run.consensus.all_of(again.draws_alike):
            incident.notes += (
                "forward= drew other random numbers than the loop, which goes on from where its own step was",
            )
        own = not run.consensus.all_of(not again.own_draws)
        if own:
            incident.notes += (_OWN_DRAWS,)
        self._budget.spend(run.iteration)
        left = self._budget.left(run.iteration)
        lost = "no batch" if own else "nothing"
        incident.details["retry"] = {
            "attempts": attempt,
            "loss": again.loss,
            "grad_norm": again.grad_norm,
        }
        return Recovery(
            outcome=Outcome.RETRIED,
            apply=True,
            message=f"computed again and finite, {lost} is lost ({left} of {self.max_retries} retries left)",
        )

    def _is_likely(self, again: Recomputed, run: Run) -> bool:
        """Say whether the second loss may be the right one, by that of the last step; True if unknown."""
        seen = [float(done.loss) for done in run.scene.passes if done.loss is not None]
        first = sum(seen) / len(seen) if seen else math.nan
        losses = (self._last_loss, first, again.loss or math.nan)
        if not all(0 < loss < math.inf for loss in losses):
            return True
        last, one, other = map(math.log, losses)
        return not (abs(one - last) < _DOUBLE < abs(other - last))

    def _is_scalers(self, incident: Incident, run: Run) -> bool:
        """Say whether an overflow is the GradScaler's search for a scale, which ends in a dropped step."""
        if incident.kind is Kind.LOSS_SCALE and not self._suspected(incident):
            return False  # it has collapsed
        scale = getattr(getattr(run.host, "scaler", None), "_scale", None)
        return scale is not None and float(scale) > _LEAST_SCALE

    def _suspected(self, incident: Incident) -> bool:
        """Say whether the incident is an overflow that nobody but this callback minds."""
        return incident.kind is Kind.LOSS_SCALE and incident.detector.partition("#")[0] == type(self).__name__

    def _leave_to_scaler(self, run: Run) -> Recovery:
        self._in_vain.spend(run.iteration)
        return Recovery(
            outcome=Outcome.REPORTED,
            apply=True,
            overflow=True,
            message="the overflow is left to the GradScaler, which drops the step and lowers its scale",
        )

    def _affordable(self, iteration: int) -> bool:
        return bool(self._budget.left(iteration) and self._in_vain.left(iteration))

    def state_dict(self) -> dict[str, Any]:
        """Return what was spent in the window, and the last loss scale that was fine."""
        return {
            "budget": self._budget.state_dict(),
            "in_vain": self._in_vain.state_dict(),
            "real": self._real.state_dict(),
            "found_scale": self._found_scale,
            "passed": self._passed,
            "edge": self._edge,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self._budget.load_state_dict(state["budget"])
        self._in_vain.load_state_dict(state["in_vain"])
        self._real.load_state_dict(state.get("real", {"spent": []}))  # a state of before there were any
        self._passed = state.get("passed", _SETTLES)
        self._found_scale, self._edge = state["found_scale"], state["edge"]


def _together(work: Callable[[], object], incident: Incident, run: Run) -> bool:
    """Do something that may fail on a rank: then all ranks hear of it, and go on as those that did not do it.

    Returns whether it was done on every rank; if not, the incident's last note says why.
    """
    plain, guard = run.consensus, GuardedConsensus(run.consensus, width=1)
    run.consensus = guard
    why = ""
    try:
        work()
    except Exception as error:  # the user's forward= raises anything, and the loop's step may stand as it is
        if not guard.left:
            logger.exception("step %d could not be compared with what it came to before", run.step)
            record_swallowed(error)
            why = f"{type(error).__name__}: {error}"
    finally:
        run.consensus = plain
    (failed,), busy = guard.close_with([int(bool(why))])
    if not failed and not busy:
        return True
    told = next(filter(None, run.consensus.gather(why)), "the ranks did not do the same")
    incident.notes += (f"computing the step again failed: {told}",)
    return False


def _doubt(again: Recomputed, incident: Incident, run: Run) -> str:
    """Return what speaks against a second computation that comes out otherwise; empty if nothing does.

    The loop's own gradients could be used as well, so this one has to be as usual, and has to be shown to
    compute what the loop does: by the same loss, or by the same operators.
    """
    unusual = _unusual(again, incident, run)
    if unusual:
        return unusual
    if not _other_losses_here(again, run) or hasattr(run.host, "compute_again"):
        return ""
    if str(getattr(run.forward, "__module__", "")).startswith("gradsentinel."):
        return ""  # an adapter's: it runs the very step that the framework ran
    if run.scene.graph is None or again.node is None:
        return "the loop did not show its loss (sentinel.backward(loss)): it may compute more than forward="
    what = difference(graph_of(run.scene.graph[1]), graph_of(again.node))
    return f"the loop ran other operators than forward= ({what})" if what else ""


def _unusual(again: Recomputed, incident: Incident, run: Run) -> str:
    """Return by what a spike is still there when it is computed again; empty if by nothing on this rank."""
    signals = incident.details.get("signals") or {}
    mine = any(place.rank == run.rank.rank for place in incident.ranks)
    seen = {"grad_norm": again.grad_norm, **({"loss": again.loss} if mine else {})}
    for name, value in seen.items():
        if name in signals and value is not None and not value <= float(signals[name]["bound"]):
            return f"computed again it is far from usual, too: a {WORDS[name]} of {value:.4g}"
    return ""


def _as_it_is(message: str) -> Recovery:
    return Recovery(outcome=Outcome.REPORTED, apply=True, message=message)


def _other_losses(again: Recomputed, run: Run) -> int:
    """Count the micro-batches, on all ranks, whose loss was finite in the loop and is another one now."""
    return int(run.consensus.total(torch.tensor([float(_other_losses_here(again, run))])))


def _other_losses_here(again: Recomputed, run: Run) -> int:
    """Count those of this rank."""
    seen = [done.loss for done in run.scene.passes if done.loss is not None]
    pairs = [(float(one), float(two)) for one, two in zip(seen, again.losses, strict=False)]
    return sum(
        math.isfinite(one) and abs(one - two) > _OTHER_LOSS * max(abs(one), abs(two)) for one, two in pairs
    )
