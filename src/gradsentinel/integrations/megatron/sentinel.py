"""The watch over a Megatron-Core run: what `attach` returns."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from gradsentinel.again.backward import BackwardPass
from gradsentinel.bus import Handle
from gradsentinel.decision import Action, Decision
from gradsentinel.errors import TrainingAborted
from gradsentinel.events import Event
from gradsentinel.gradients import GradientView
from gradsentinel.incident import Incident
from gradsentinel.integrations.megatron.compat import bucket_groups
from gradsentinel.integrations.megatron.host import MegatronHost
from gradsentinel.integrations.megatron.names import in_bucket
from gradsentinel.integrations.megatron.schedule import ScheduledStep, SeenBatches
from gradsentinel.integrations.wraps import Wraps
from gradsentinel.state.restart import recall
from gradsentinel.watch import Watch

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("gradsentinel")

E = TypeVar("E", bound=Event)

_SKIPPED = (False, None, None)
"""What Megatron's optimizers return for a step that was not made."""


class MegatronSentinel:
    """Watches a run through wraps around methods of its own objects; `attach` makes one.

    on_after_backward comes for each bucket group when it is about to be reduced, with this rank's own
    gradients, and on the last pipeline stage for each micro-batch, with its loss. on_before_clip comes when
    Megatron has made its final gradients; a step that is dropped takes Megatron's own way of skipping one,
    so that neither the schedule nor the count of skipped iterations is wrong.
    """

    def __init__(
        self, host: MegatronHost, watch: Watch, wraps: Wraps, *, recomputing: Sequence[str] = ()
    ) -> None:
        self.host = host
        self._recomputing = tuple(recomputing)
        """Callbacks that compute steps again, until it is clear whether they can."""
        self._watch = watch
        self._wraps = wraps
        self._decision: Decision | None = None
        self._in_step = False
        self._unclosed = False
        """True while a step was made and the loop has yet to move its schedule on."""
        self._last = 0
        """Number of the step's last micro-batch, as far as that is known."""
        self._closed = False

    # -- what the loop uses ------------------------------------------------------------------------

    def schedule(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what `get_forward_backward_func` returned as a function that can run a step again.

        Call it instead. `Retry` needs it, and so does whoever wants to see batches and losses.
        """

        @functools.wraps(function)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            if args:
                kwargs = {**inspect.signature(function).bind_partial(*args).arguments, **kwargs}
            if kwargs.get("forward_only") or not self._wraps.active:
                return function(**kwargs)
            return self._run(function, kwargs)

        return forward_backward

    def on(
        self, event: type[E], function: Callable[[E], Any], *, every: int = 1, once: bool = False
    ) -> Handle:
        """Call a plain function for an event; the handle's `remove()` takes it off again."""
        return self._watch.bus.on(event, function, every=every, once=once)

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """The incidents of this run so far, oldest first."""
        return tuple(self._watch.run.incidents)

    @property
    def last_action(self) -> Action:
        """What was done about the last step."""
        return Action.CONTINUE if self._decision is None else self._decision.action

    @property
    def step_count(self) -> int:
        """Number of the step in flight, from 0 at the attach; goes back on a rollback."""
        return self._watch.run.step

    @property
    def applied_steps(self) -> int:
        """How many steps changed the weights since the attach."""
        return self._watch.run.applied

    @property
    def run_dir(self) -> Path:
        """Where events and incidents are written."""
        return self._watch.run.directory.path

    def restore(self, path: str | os.PathLike[str] | None = None) -> int:
        """Put the training state back to one that an earlier run left on disk, and return its step.

        Called on: every rank, between two steps.

        Args:
            path: this rank's archive; None takes the newest that every rank has.

        Raises:
            ArchiveError: if there is none, or it is damaged.
            SnapshotMismatch: if it does not fit the model or optimizer; nothing was changed then.
        """
        run = self._watch.run
        self.host.random.release()
        recall(self._watch, run.resume(path).callbacks)
        self.between_steps()
        return run.step

    def close(self, error: BaseException | None = None) -> None:
        """Take every wrap off and end the run; a second call does nothing. Called on: every rank."""
        if self._closed:
            return
        self._closed = True
        run = self._watch.run
        try:
            if error is None:
                self._close_step()
            self._wraps.undo()
            self._watch.close(error)
        except BaseException as late:
            error = error or late
            raise
        finally:
            run.local.detach()
            run.close(error)
        if error is None:
            run.consensus.close()

    def detach(self) -> None:
        """Take every wrap off and end the run: the model and the optimizer are what they were."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    # -- the wraps ---------------------------------------------------------------------------------

    def wrap(self, optimizer: Any, scheduler: Any = None, data: Sequence[Any] = ()) -> None:
        """Put the wraps around this run's bucket groups, outermost optimizer, schedule and data iterators."""
        for iterator in data:
            self._wraps.set(iterator, "iterable", SeenBatches(iterator.iterable, self._drawn))
        for chunk in self.host.chunks:
            for group in bucket_groups(chunk):
                named = in_bucket(group, self.host.names)
                self.host.local.watch_names([name for name, _ in named])
                self._wraps.wrap(group, "start_grad_sync", self._looking_at(group, named))
        self.host.watch_exchanges()
        self._wraps.wrap(optimizer, "prepare_grads", self._judging)
        self._waits = hasattr(scheduler, "step")
        self._wraps.wrap(optimizer, "step", self._closing)
        if self._waits:
            self._wraps.wrap(scheduler, "step", self._advancing)

    def between_steps(self) -> None:
        """Remember the state as it is now, for the step that comes next."""
        self._watch.prepare()
        # The loop shows nothing more of a step's gradients than all of it, so each event is of the last one.
        self._watch.expected_microbatches = 0
        self.host.random.hold()
        self.host.step = None
        self._in_step = False

    def _looking_at(
        self, group: Any, named: list[tuple[str, Tensor]]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def start_grad_sync(*args: Any, **kwargs: Any) -> Any:
                # In the first step of an overlapped reduction it is called again for what is under way.
                again = getattr(group, "is_first_batch", False) and (
                    getattr(group, "grad_reduce_handle", None) is not None
                )
                if not again:
                    view = GradientView(named)
                    self.host.local.record(view)
                    scaled = self.host.scaler is not None
                    self._watch.after_backward(
                        None, view, scaled=scaled, reduced=False, microbatch=self._last
                    )
                return plain(*args, **kwargs)

            return start_grad_sync

        return make

    def _judging(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_grads(*args: Any, **kwargs: Any) -> bool:
            host = self.host
            self._close_step()
            host.prepare = lambda: plain(*args, **kwargs)
            host.begin_update()
            host.found = bool(plain(*args, **kwargs))
            return self._judge()

        return prepare_grads

    def _judge(self) -> bool:
        """Have the ranks decide; returns True if the step is not to be made."""
        host, watch = self.host, self._watch
        if self._recomputing:
            self._tell_what_is_missing()
        scale, overflow = host.overflow()
        try:
            decision = watch.before_clip(
                host.gradients(), optimizers=host.optimizers, loss_scale=scale, overflow=overflow
            )
        except TrainingAborted:
            watch.forget_step()
            raise
        if decision.apply and decision.recomputed:
            decision = watch.look_again(decision, host.gradients())
        self._decision = decision
        if not decision.went_back:
            host.settle_scaler(overflow=decision.scaler_skips, dropped=not decision.apply)
        return decision.scaler_skips or not decision.apply

    def _tell_what_is_missing(self) -> None:
        """Say in the first step, and not when it is too late, if no step can be computed again."""
        why = self.host.why_no_recompute(self._watch.run)
        if why is not None and self._watch.run.rank.rank == 0:
            logger.warning("%s can do nothing: %s", " and ".join(self._recomputing), why)
        self._recomputing = ()

    def _closing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            self._decision = None
            result = plain(*args, **kwargs)
            decision = self._decided()
            if decision is None:  # Megatron made no gradients ready: there was no step
                return result
            norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
            if norm is not None:
                self._decision = replace(decision, grad_norm=float(norm), safe_norm=None)
            self._unclosed = True
            # The loop moves its schedule on after this; a snapshot before that would be of two moments.
            if not (self._waits and decision.apply and not decision.scaler_skips):
                late = self._close_step()
                result = _SKIPPED if late > Action.WARN else result
            return result

        return step

    def _decided(self) -> Decision | None:
        """Return what was decided meanwhile."""
        return self._decision

    def _advancing(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            result = plain(*args, **kwargs)
            self._close_step()
            return result

        return step

    def _close_step(self) -> Action:
        """Close the step that was made or dropped, if it is not closed yet; returns what was done late."""
        decision, host = self._decision, self.host
        if decision is None or not self._unclosed:
            return Action.CONTINUE
        self._unclosed = False
        host.random.release()
        clips = any(getattr(getattr(part, "config", None), "clip_grad", 0.0) > 0.0 for part in host.parts)
        late = self._watch.after_step(decision, learning_rates=host.learning_rates(), clipped=clips)
        if late > Action.WARN:  # the step was made, found bad, and undone
            self._decision = replace(decision, apply=False, action=late)
        self.between_steps()
        return late

    def _run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Run the forward and backward passes of a step, seen and kept."""
        watch, host = self._watch, self.host
        self._close_step()
        if self._in_step:  # the loop computes the step anew, as Megatron's rerun machine does
            watch.forget_step()
        host.random.release()
        self.between_steps()
        self._in_step = True
        watch.begin_step()
        step = ScheduledStep(function, arguments, seen=self._seen, output=self._output)
        host.step = step
        self._last = int(arguments.get("num_microbatches", 1)) - 1
        result = step.run()
        scaled = host.scaler is not None
        for number, loss in enumerate(step.losses):
            watch.after_backward(loss, GradientView(()), scaled=scaled, reduced=True, microbatch=number)
            watch.run.scene.passes.append(BackwardPass(number, loss))
        return result

    def _drawn(self, batch: Any) -> None:
        if self._wraps.active and not self._in_step:  # else the schedule's recorder tells
            self._close_step()
            self._seen(batch)

    def _seen(self, batch: Any) -> None:
        data = self._watch.run.data
        self._watch.batch(batch)
        data["batch"] += 1
        data["batches"] += 1

    def _output(self, output: Tensor, microbatch: int, chunk: int) -> None:
        if self.host.stages > 1 and output.is_floating_point():
            self.host.local.record_output(output, microbatch, chunk)
