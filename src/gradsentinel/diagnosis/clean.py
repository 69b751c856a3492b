"""A step that is finite when it is run again: twice more, and then what explains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gradsentinel.again.scene import MicroBatch
from gradsentinel.decision import Kind
from gradsentinel.diagnosis import swap
from gradsentinel.diagnosis.comparison import alike, compare, in_order
from gradsentinel.diagnosis.excess import explain_excess
from gradsentinel.diagnosis.otherwise import explained_otherwise
from gradsentinel.diagnosis.passed import Boundaries, after_the_model, given_otherwise
from gradsentinel.diagnosis.replay import Computed, Replay, is_compiled
from gradsentinel.diagnosis.report import Report
from gradsentinel.diagnosis.surroundings import Surroundings
from gradsentinel.diagnosis.trace import Trace
from gradsentinel.diagnosis.transient import (
    Again,
    came_back,
    comes_back,
    judge_again,
    less_sure,
    not_sure,
)
from gradsentinel.incident import Incident

_SURE = 0.9


class CleanStep:
    """Runs the micro-batches a second time, and compares all of it with what the loop had.

    Args:
        incident: what it is about.
        replay: of the step; call `report` inside `replay.sheltered()`.
        around: as it was before the first replay.
        microbatches: of the step, the suspect first.
        computed: what the first replay came to, as far as there was time.
        boundaries: of these.
        stage: hears what is done.
        time_left: says whether there is time for one more run.
        trace: makes what watches every operator.
    """

    def __init__(
        self,
        incident: Incident,
        replay: Replay,
        around: Surroundings,
        microbatches: Sequence[MicroBatch],
        computed: Sequence[Computed],
        boundaries: Boundaries,
        *,
        stage: Callable[[str], None],
        time_left: Callable[[], bool],
        trace: Callable[[], Trace],
    ) -> None:
        self._incident = incident
        self._replay = replay
        self._around = around
        self._microbatches = microbatches
        self._computed = computed
        self._boundaries = boundaries
        self._stage = stage
        self._time_left = time_left
        self._trace = trace

    def report(self, found: dict[str, Tensor], *, flaky: bool) -> Report:
        """Return what there is to say.

        Args:
            found: the gradients of the run itself.
            flaky: a run of the same was not finite.
        """
        again = self._compared(found, flaky=flaky)
        if comes_back(again, self._incident):
            self._stage("looking for what makes it so large")
            diagnosis, guilty, samples = explain_excess(
                self._replay, self._microbatches, self._computed, self._incident, self._time_left
            )
            return Report(diagnosis=diagnosis, microbatch=guilty, samples=samples)
        given = given_otherwise(self._replay, self._microbatches, again.passed, self._time_left)
        again.given = None if given is None else given.diagnosis
        diagnosis = judge_again(again, self._incident, self._replay.run)
        if given is not None and diagnosis.evidence[:1] == (
            given.diagnosis.evidence[:1] if given.diagnosis else ()
        ):
            return replace(given, diagnosis=diagnosis)
        unsure = diagnosis.cause == "hardware" and diagnosis.confidence < _SURE
        if unsure and came_back(self._incident, self._replay.run.incidents):
            diagnosis = less_sure(diagnosis)
        elif unsure:
            self._stage("looking for what else explains it")
            other = explained_otherwise(
                self._replay,
                self._microbatches,
                again.computed,
                found,
                self._around,
                again.passed,
                self._time_left,
            )
            diagnosis = not_sure(diagnosis, *other) if other else diagnosis
        in_loss = self._incident.kind is Kind.NONFINITE_LOSS
        if in_loss:
            diagnosis = replace(diagnosis, phase="forward")
        return Report(diagnosis=after_the_model(diagnosis, again.passed, in_loss=in_loss))

    def _compared(self, found: dict[str, Tensor], *, flaky: bool) -> Again:
        replay, run = self._replay, self._replay.run
        custom: set[str] = set()
        unwritten = False
        second: list[Computed] = []
        complete = len(self._computed) == len(self._microbatches)
        for microbatch in self._microbatches[: len(self._computed)]:
            if not self._time_left():
                complete = False
                break
            self._stage(f"running micro-batch {microbatch.index} once more, watched")
            second.append(replay.compute(microbatch, mode=(trace := self._trace())))
            custom |= trace.custom | {name for name, mine in second[-1].nodes.values() if mine}
            poisoned = replay.compute(microbatch, mode=swap.Poison())  # type: ignore[no-untyped-call]
            unwritten = unwritten or not swap.is_finite(poisoned)
        same = all(alike(one, other) for one, other in zip(self._computed, second, strict=False))
        scale = getattr(getattr(run.host, "scaler", None), "_scale", None)
        computed = in_order(self._microbatches, self._computed)
        reduced = run.consensus.world_size > 1
        return Again(
            computed=computed,
            complete=complete,
            deterministic=same and not flaky,
            custom=frozenset(custom),
            unwritten=unwritten and not self._around.drawn(),
            written=_written_after(self._computed, found, scaled=scale is not None),
            hooked=any(_is_hooked(parameter) for _, parameter in run.host.named_parameters()),
            compiled=self._compiled(),
            found=found,
            scale=scale,
            comparison=compare(computed, found, run, scale=scale, reduced=reduced),
            passed=self._boundaries.passed(),
        )

    def _compiled(self) -> bool | None:
        """Whether the compiled code, as such, is finite now; None if nothing is compiled."""
        run = self._replay.run
        if not is_compiled(run):
            return None
        if not (run.consensus.world_size == 1 and self._time_left()):
            return True
        self._stage("running the compiled code again")
        return swap.finite_compiled(self._replay, self._microbatches)


def _written_after(
    computed: Sequence[Computed], found: dict[str, Tensor], *, scaled: bool
) -> tuple[str, ...]:
    """Return the gradients that were written to more often than accumulating and unscaling them does."""
    usual = len(computed) - 1 + scaled
    names = []
    for name, gradient in found.items():
        versions = [c.gradients[name]._version for c in computed if name in c.gradients]
        if versions and gradient._version > max(versions) + usual:
            names.append(name)
    return tuple(names)


def _is_hooked(parameter: Any) -> bool:
    """Return True if the user has a hook on the accumulated gradient, which a replay leaves out."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(not getattr(hook, "__module__", "").startswith("gradsentinel") for hook in hooks.values())
